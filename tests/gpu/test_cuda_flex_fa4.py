"""FLEX_FA4 on a CUDA device: FlexAttention with flash-attn-4's kernels underneath, and float64."""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo.testing
from packaging.version import Version
from support.cuda_problems import TOLERANCE, band, problem
from support.kernel_names import PACKAGES, names_of
from support.package_runs import check_again, check_captured, check_checkpoint, hold_lse, require
from support.reference import attend, error
from torch.nn.attention.flex_attention import BlockMask, noop_mask

import attnroute
from attnroute import masks

# CuTe DSL and inductor warn about their own code while they compile.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BACKEND = "flex_fa4"
LENGTH = 384


@pytest.fixture(autouse=True)
def _package():
    require("flash_attn.cute", "flash-attn-4")


def check(inputs, mask=None, *, allowed, train, **given):
    inputs = tuple(t.detach().requires_grad_(train) for t in inputs)
    changed = {name: given[name] for name in ("softcap", "alibi_slopes") if given.get(name) is not None}
    want, _ = attend(*inputs, allowed=allowed, **changed)
    cotangent = torch.randn_like(want)

    def run():
        out = attnroute.attention(*inputs, mask, backend=BACKEND, **given)
        return out, torch.autograd.grad(out, inputs, cotangent.to(out.dtype)) if train else ()

    run()
    (out, grads), on_device, _ = names_of(run)
    assert any(re.search(PACKAGES["fa4"], name) for name in on_device), sorted(on_device)
    assert not any("triton" in name and "flex" in name for name in on_device), sorted(on_device)
    assert error(out, want) <= TOLERANCE[out.dtype]
    wanted = torch.autograd.grad(want, inputs, cotangent.to(out.dtype).double()) if train else ()
    for name, got, true in zip(("dq", "dk", "dv"), grads, wanted, strict=False):
        assert error(got, true.double(), floor=2.0) <= 2 * TOLERANCE[out.dtype], name


def square(head_dim=64, length=LENGTH):
    return problem(seqlen_q=length, seqlen_kv=length, head_dim=head_dim)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_causal(head_dim, train):
    check(square(head_dim), is_causal=True, allowed=band(LENGTH, LENGTH, None, 0), train=train)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_documents_or_a_window(batch, train):
    ids = (torch.arange(LENGTH, device="cuda") // 150)[None].expand(batch, -1).contiguous()
    allowed = (ids[:, None, :, None] == ids[:, None, None]) | band(LENGTH, LENGTH, -20, 20)
    inputs = [t[:batch] for t in square()]
    check(inputs, masks.Documents(ids=ids) | masks.Window(20, 20), allowed=allowed, train=train)


@pytest.mark.parametrize("batch", [1, 2])
def test_padding(batch):
    keys = torch.arange(LENGTH, device="cuda")
    lengths = torch.tensor([LENGTH - 90, 200][:batch], device="cuda")
    allowed = (keys < lengths[:, None])[:, None, None]
    inputs = [t[:batch] for t in square()]
    check(inputs, masks.KeyPadding(lengths=lengths), allowed=allowed, train=True)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("lengths", [(8, 4096), (2048, 32768), (130, 384)], ids=str)
@pytest.mark.parametrize("case", ["causal", "window", "either", "alibi"])
def test_numbers_that_follow_the_lengths(case, lengths, train):
    """A diagonal at the bottom right is a number in a tensor, which CuTe DSL reads only at an index."""
    queries, keys = lengths
    mask, limits = {
        "causal": (masks.Causal("bottom_right"), [(None, 0)]),
        "window": (masks.Window(100, 0, "bottom_right"), [(-100, 0)]),
        "either": (masks.Window(9, 0, "bottom_right") | masks.Window(3, 3), [(-9, 0)]),
        "alibi": (masks.Causal("bottom_right"), [(None, 0)]),
    }[case]
    shift = keys - queries
    allowed = band(queries, keys, *(None if n is None else n + shift for n in limits[0]))
    if case == "either":
        allowed = allowed | band(queries, keys, -3, 3)
    # With shared key heads its gradients are wrong under ALiBi, and a row refuses them.
    heads_kv = 4 if case == "alibi" else 2
    inputs = problem(heads_kv=heads_kv, seqlen_q=queries, seqlen_kv=keys, head_dim=64)
    slopes = torch.tensor([0.5, 0.25, 1.0, 2.0], device="cuda") if case == "alibi" else None
    check(inputs, mask, allowed=allowed, train=train, alibi_slopes=slopes)


def test_more_windows_than_are_compiled_as_constants():
    for left in range(10, 24):
        allowed = band(LENGTH, LENGTH, -left, 0)
        check(square(), masks.Causal() & masks.Window(left), allowed=allowed, train=False)


def test_given_blocks_beside_a_mask_that_lets_everything_pass():
    """torch ignores the lists there unless it sees a mask: pytorch#188322."""
    counts = torch.full((1, 1, 3), 1, dtype=torch.int32, device="cuda")
    columns = torch.tensor([[1, 0, 2], [2, 0, 1], [0, 1, 2]], dtype=torch.int32, device="cuda")[None, None]
    given = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=128, mask_mod=noop_mask)
    blocks = torch.zeros(3, 3, dtype=torch.bool, device="cuda")
    blocks[[0, 1, 2], [1, 2, 0]] = True
    allowed = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    check(square(), masks.Blocks(given), allowed=allowed, train=False)


def check_kernels(on_device, names):
    """Fail where another kernel than flash-attn-4's ran."""
    assert any(re.search(PACKAGES["fa4"], name) for name in on_device), sorted(on_device)
    assert not any("triton" in name and "flex" in name for name in on_device), sorted(on_device)
    assert f"attnroute::{BACKEND}" in names, sorted(names)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def call(query, key, value):
        return attnroute.attention(query, key, value, masks.Causal() & masks.Window(100), backend=BACKEND)

    run = torch.compile(call, backend=counter, fullgraph=True)
    for length in (256, 384, 512, 640):
        inputs = square(length=length)
        want = call(*inputs)
        cotangent = torch.randn_like(want)
        run(*inputs)
        out, on_device, names = names_of(lambda inputs=inputs: run(*inputs))
        check_kernels(on_device, names)
        assert error(out, want.double()) <= TOLERANCE[out.dtype]
        grads = torch.autograd.grad(out, inputs, cotangent)
        for got, true in zip(grads, torch.autograd.grad(want, inputs, cotangent), strict=True):
            assert error(got, true.double(), floor=2.0) <= 2 * TOLERANCE[out.dtype]
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_captured_in_a_cuda_graph():
    check_captured(BACKEND, masks.Causal() & masks.Window(100))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    check_checkpoint(BACKEND, use_reentrant=use_reentrant, check=check_kernels)


def test_a_predicate():
    def strided(b, h, i, j):
        return (j <= i) & ((i - j) % 3 != 1)

    rows = torch.arange(LENGTH, device="cuda")
    gap = rows[:, None] - rows
    allowed = (gap >= 0) & (gap % 3 != 1)
    check(square(), masks.Function(strided), allowed=allowed, train=False)


def test_softcap():
    check(square(), is_causal=True, allowed=band(LENGTH, LENGTH, None, 0), softcap=15.0, train=False)


@pytest.mark.parametrize("sink", [None, [0.5, -2.0, 3.0, 0.0]], ids=["plain", "sink"])
def test_the_log_sum_exp_is_natural_or_refused(sink):
    """torch multiplies it by log(2) before 2.13, as if these kernels gave it to the base 2."""
    inputs = [t.detach() for t in square()]
    given = {"is_causal": True, "sink": None if sink is None else torch.tensor(sink, device="cuda")}
    verdict = attnroute.explain(*inputs, return_lse=True, **given).verdict(BACKEND)
    if Version(torch.__version__) < Version("2.13"):
        assert verdict.status == "rejected", verdict
        return
    out, lse = attnroute.attention(*inputs, backend=BACKEND, return_lse=True, **given)
    allowed = band(LENGTH, LENGTH, None, 0)
    want, want_lse = attend(*inputs, allowed=allowed, sink=given["sink"])
    assert error(out, want) <= TOLERANCE[out.dtype]
    hold_lse(lse, want_lse)


def test_calls_outside_the_rows_are_rejected():
    inputs = square(256)
    verdict = attnroute.explain(*inputs, is_causal=True).verdict(BACKEND)
    assert verdict.status == "rejected"
    with pytest.raises(attnroute.AttnRouteError):
        attnroute.attention(*inputs, is_causal=True, backend=BACKEND)


def test_backwards_run_again():
    check_again(BACKEND)
