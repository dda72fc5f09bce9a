"""FLEX_FA4 on the CPU: what torch is asked for, under which names, and that flex shares nothing of it.

torch takes FlashAttention-4's kernels on a GPU alone, and has gradients of FlexAttention only there. Here
dynamo traces as ever, and the traced graph runs.
"""

from __future__ import annotations

import pytest
import torch
from support.cudnn_checks import allowed_of
from support.cudnn_checks import inputs_of as trained_inputs_of
from support.fa4_hosts import NEWEST
from support.flex_fa4_calls import FLASH, LENGTH, OPTIONS, asked_of, inputs_of, plan, run, uncompiled
from support.reference import attend
from support.row_calls import verdict
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, noop_mask

import attnroute
from attnroute import masks
from attnroute.errors import AttnRouteError, KernelRefusedError, NotCompiledError
from attnroute.executors import first_call
from attnroute.executors.flex import compile as flex_compile
from attnroute.executors.flex import run as flex
from attnroute.executors.flex.program import blocked
from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered.mods import CONSTANT_BANDS


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    with uncompiled(monkeypatch) as found:
        yield found


BLOCKS = (("SPARSE_Q_BLOCK_SIZE", 128), ("SPARSE_KV_BLOCK_SIZE", 128))
IDS = torch.tensor([[0, 0, 1, 1, 1, 2]]).expand(2, -1).contiguous()
MASKS = {
    "everything": None,
    "causal": masks.Causal(),
    "window": masks.Window(2, 1),
    "documents": masks.Documents(ids=IDS) & masks.Causal(),
    "documents or a window": masks.Documents(ids=IDS) | masks.Window(1, 0),
    "padding": masks.KeyPadding(left=torch.tensor([2, 0])),
    "prefix": masks.PrefixLM(lengths=torch.tensor([3, 5])),
}


def further_is_less(score, b, h, i, j):
    return score - 0.3 * (i - j)


@pytest.mark.parametrize("case", MASKS)
def test_torch_is_asked_for_these_kernels_and_the_call_is_right(graphs, case):
    mask = MASKS[case]
    inputs = inputs_of(mask)
    out, lse = run(inputs)
    assert lse is None
    assert [asked_of(graph)["BACKEND"] for graph in graphs] == ["FLASH"]
    tensors = (inputs.query, inputs.key, inputs.value)
    want, _ = attend(*tensors, allowed=allowed_of(mask, inputs))
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scores", ["softcap", "alibi", "function"])
def test_scores_are_changed(graphs, scores):
    inputs = inputs_of(masks.Causal())
    given = {}
    if scores == "softcap":
        inputs.softcap = given["softcap"] = 0.8
    elif scores == "alibi":
        inputs.alibi_slopes = given["alibi_slopes"] = torch.tensor([0.5, 0.25, 1.0, 2.0])
    else:
        inputs.score_mod = further_is_less
        rows = torch.arange(LENGTH)
        given["bias"] = -0.3 * (rows[:, None] - rows)
    out, _ = run(inputs)
    tensors = (inputs.query, inputs.key, inputs.value)
    want, _ = attend(*tensors, allowed=allowed_of(masks.Causal(), inputs), **given)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    assert asked_of(graphs[0])["BACKEND"] == "FLASH"


def read_by(graph):
    """Return the tensors that the traced mask and scores read, and the graph of the mask."""
    (node,) = (n for n in graph.graph.nodes if n.target is torch.ops.higher_order.flex_attention)
    captured = [n.meta["example_value"] for group in node.args[-2:] for n in group]
    return captured, getattr(graph, node.args[4][-1].target)


@pytest.mark.parametrize("lengths", [(8, 40), (40, 8), (1, 33)], ids=str)
@pytest.mark.parametrize("case", ["causal", "window", "either", "not", "alibi"])
def test_numbers_that_follow_the_lengths_are_read_at_an_index(graphs, case, lengths):
    """torch's code for CuTe DSL stops at a tensor without a dimension: pytorch#177813."""
    mask = {
        "causal": masks.Causal("bottom_right"),
        "window": masks.Window(5, 1, "bottom_right"),
        "either": masks.Window(2, 0, "bottom_right") | masks.PrefixLM(lengths=torch.tensor([3, 5])),
        "not": ~masks.Window(1, 0, "bottom_right"),
        "alibi": None,
    }[case]
    inputs = trained_inputs_of(mask, *lengths, dtype=torch.float32)
    inputs.query, inputs.key, inputs.value = (t.detach() for t in (inputs.query, inputs.key, inputs.value))
    slopes = inputs.alibi_slopes = torch.tensor([0.5, 0.25, 1.0, 2.0]) if case == "alibi" else None
    out, _ = run(inputs)
    captured, _ = read_by(graphs[0])
    assert captured
    assert all(t.dim() for t in captured)
    tensors = (inputs.query, inputs.key, inputs.value)
    want, _ = attend(*tensors, allowed=allowed_of(mask, inputs), alibi_slopes=slopes)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_a_window_that_is_no_constant_any_more_is_read_at_an_index(graphs):
    for left in range(1, CONSTANT_BANDS + 4):
        run(inputs_of(masks.Window(left, 0), 40))
    captured = [t for graph in graphs for t in read_by(graph)[0]]
    assert captured
    assert all(t.dim() for t in captured)


def test_given_blocks_are_never_beside_a_mask_that_torch_takes_for_none(graphs):
    """It ignores the lists there: pytorch#188322."""
    counts, columns = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]]).int()
    given = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=128, mask_mod=noop_mask)
    inputs = inputs_of(masks.Blocks(given), 256)
    run(inputs)
    _, mask = read_by(graphs[0])
    (last,) = (n for n in mask.graph.nodes if n.op == "output")
    assert "and" in str(last.args[0].target), mask.graph


def test_given_blocks_without_whole_ones_get_an_empty_list_of_these(graphs):
    """torch's code for CuTe DSL takes no lists of blocks without one of whole blocks."""
    counts, columns = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]]).int()
    given = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=128, mask_mod=noop_mask)
    assert given.full_kv_num_blocks is None
    inputs = inputs_of(masks.Blocks(given), 256)
    for cute in (True, False):
        lists = blocked(inputs, cute=cute).blocks
        assert lists[0] is given.kv_num_blocks
        assert (lists[2] is None, lists[6] is None) == (not cute, not cute)
    assert not blocked(inputs, cute=True).blocks[2].any()
    run(inputs)
    assert graphs


@pytest.mark.parametrize(("backend", "raised"), [("flex", ValueError), ("flex_fa4", KernelRefusedError)])
def test_what_flash_attention_4_says_at_its_first_launch_is_a_refusal(monkeypatch, backend, raised):
    def refuse(*_):
        msg = "Expected TensorSSA"
        raise ValueError(msg)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda *_: refuse)
    with pytest.raises(raised, match="Expected TensorSSA"):
        run(inputs_of(masks.Causal()), backend)


@pytest.mark.parametrize("order", [("flex", "flex_fa4"), ("flex_fa4", "flex")])
def test_flex_and_flex_fa4_share_no_code(graphs, order):
    inputs = inputs_of(masks.Causal())
    for backend in (*order, *order):
        run(inputs, backend)
    assert [entry.backend for entry in flex_compile.entries()] == list(order)
    wanted = {"flex": "AUTO", "flex_fa4": "FLASH"}
    assert [asked_of(graph)["BACKEND"] for graph in graphs] == [wanted[b] for b in order]


@pytest.mark.parametrize("lengths", [(128, 256), (128, 130)])
@pytest.mark.parametrize("backend", OPTIONS)
def test_what_only_tritons_kernels_read_is_not_passed(backend, lengths):
    made = (torch.empty(1, 2, n, 8, device="meta") for n in (lengths[0], lengths[1], lengths[1]))
    options = dict(flex._options(Inputs(*made), plan(backend, device_type="cuda")))
    is_told = backend == "flex" and lengths == (128, 256)
    assert options == dict(OPTIONS[backend]) | ({"IS_DIVISIBLE": True} if is_told else {})


@pytest.mark.parametrize("backend", OPTIONS)
def test_profiles_show_the_backend(backend):
    inputs = inputs_of(masks.Causal())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(inputs, backend)
    marks = {e.key for e in profile.key_averages() if e.key.startswith("attnroute::")}
    assert marks == {f"attnroute::{backend}"}


@pytest.mark.parametrize("backend", OPTIONS)
def test_listeners_hear_whose_code_is_compiled(backend):
    heard = []
    first_call.listen(backend, lambda backend, name, seconds: heard.append((backend, name, seconds is None)))
    run(inputs_of(masks.Causal()), backend)
    assert heard == [(backend, "j <= i", True), (backend, "j <= i", False)]


@pytest.mark.parametrize("backend", OPTIONS)
def test_a_compiler_that_gives_up_is_told_with_the_name_of_the_backend(monkeypatch, backend):
    def fail(*_):
        msg = "BACKEND='FLASH' but flash attention cannot be used"
        raise RuntimeError(msg)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: fail)
    with pytest.raises(NotCompiledError, match=f"^backend {backend} requires code that torch.compile") as got:
        run(inputs_of(None), backend)
    assert f'override(ban="{backend}")' in str(got.value)


@pytest.mark.parametrize("backend", OPTIONS)
def test_a_limit_of_the_compiler_is_told_with_the_name_of_the_backend(backend):
    message = f"^backend {backend} requires at most 1 compilations of one structure"
    with torch._dynamo.config.patch(recompile_limit=1):
        run(inputs_of(masks.Causal()), backend)
        with pytest.raises(NotCompiledError, match=message):
            run(inputs_of(masks.Causal(), 200), backend)


@pytest.mark.parametrize("backend", OPTIONS)
def test_a_plain_call_is_refused_with_the_name_of_the_backend(backend):
    inputs = inputs_of(None)
    message = f"^backend {backend} requires torch.compile to compile its call"
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(NotCompiledError, match=message),
    ):
        run(inputs, backend)


def test_a_graph_asks_for_the_same_kernels(graphs):
    """The operator of a graph has the name of its backend, and runs the compiled code of the structure."""
    inputs = inputs_of(masks.Causal())

    def function(query, key, value):
        return run(Inputs(query, key, value, inputs.mask))[0] * 2

    tensors = (inputs.query, inputs.key, inputs.value)
    traced = make_fx(function, tracing_mode="fake")(*tensors)
    assert not graphs, "nothing is compiled while a graph is made"
    held = [n.target for n in traced.graph.nodes if "flex" in n.name]
    assert held == [torch.ops.attnroute.flex_fa4.default]
    out = traced(*tensors)
    want, _ = attend(*tensors, allowed=allowed_of(masks.Causal(), inputs))
    torch.testing.assert_close(out.double(), 2 * want, rtol=1e-4, atol=1e-5)
    assert [asked_of(graph)["BACKEND"] for graph in graphs] == ["FLASH"]


def test_a_device_without_these_kernels_is_no_place_for_it():
    query, key, value = (torch.randn(1, 2, LENGTH, 8) for _ in "qkv")
    with pytest.raises(AttnRouteError, match="flex_fa4"):
        attnroute.attention(query, key, value, is_causal=True, backend="flex_fa4")


def test_the_rows_set_the_option():
    """The executor holds none of its own: what the test plans say is what a decision says."""
    assert dict(verdict("flex_fa4", NEWEST, "sm_90", {}).options) == dict(FLASH + BLOCKS)
