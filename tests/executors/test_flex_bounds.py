"""FLEX stays compiled: few compilations for many masks, memory linear in the length, and no way around."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from support.spy import ALL_SCORES, Spy, allocated, profiled
from torch import nn

import attnroute
from attnroute.errors import AttnRouteError, NoBackendError, NotCompiledError
from attnroute.executors import first_call
from attnroute.executors.flex import compile as flex_compile
from attnroute.executors.flex import program
from attnroute.masks import Causal, Documents, KeyPadding, PrefixLM, Window
from attnroute.masks.lowered import mods
from attnroute.memory import reset


@pytest.fixture(autouse=True)
def nothing_compiled():
    reset()
    yield
    reset()


@pytest.fixture
def traced_only(monkeypatch):
    """dynamo traces and guards as ever, then torch runs the traced graph: milliseconds instead of seconds."""
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda graph, _: graph.forward)


def flex(mask, seqlen_q=130, seqlen_kv=None, *, batch=2, **rest):
    query = torch.randn(batch, 4, seqlen_q, 16)
    key, value = torch.randn(2, batch, 2, seqlen_kv or seqlen_q, 16)
    with torch.no_grad():
        return attnroute.attention(query, key, value, mask, backend="flex", **rest)


def padding(left=3):
    return KeyPadding(left=torch.tensor([left, 0]))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(32, 3 * 32), nn.Linear(32, 32)

    def forward(self, tokens, mask, backend):
        heads = self.inside(tokens).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = attnroute.attention(*heads, mask, backend=backend)
        return tokens + self.outside(mixed.transpose(1, 2).flatten(2))


def two_layers(length, mask, backend):
    torch.manual_seed(0)
    layers = Layer(), Layer()
    tokens = torch.randn(2, length, 32)
    for layer in layers:
        tokens = layer(tokens, mask, backend)
    return tokens


LENGTHS = (130, 300, 141, 450, 257, 600, 384, 512, 190, 333)
KINDS = {
    "window": lambda n, _: Window(20 + n, 1 + n),
    "documents": lambda n, length: Causal() & Documents(lengths=[7 * n + 1, 50, length - 7 * n - 51]),
    "everything": lambda n, length: (
        (PrefixLM(torch.tensor([n, length])) | ~padding(n)) & Documents(lengths=[60 + n, length - 60 - n])
    ),
}


def test_thirty_masks_through_one_model_compile_two_functions_for_each_kind(monkeypatch):
    # The first windows are compiled as numbers; with two numbers only the first one is.
    monkeypatch.setattr(mods, "CONSTANT_BANDS", 2)
    for n, length in enumerate(LENGTHS):
        for make in KINDS.values():
            mask = make(n, length)
            with torch.no_grad():
                expected = two_layers(length, mask, "math")
                with profiled("flex"):
                    out = two_layers(length, mask, "flex")
            torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    entries = flex_compile.entries()
    assert len(entries) == len(KINDS) + 1, entries
    assert max(len(entry.seconds) for entry in entries) <= 2, entries


def memory(backend, length, make):
    """Return the largest allocation and the peak of a call with a new mask, whose kernel is there already."""
    query, key, value = (torch.randn(1, 2, length, 16) for _ in range(3))
    with torch.no_grad():
        attnroute.attention(query, key, value, make(length), backend=backend)
        return allocated(lambda: attnroute.attention(query, key, value, make(length), backend=backend))


@pytest.mark.parametrize(
    "make",
    [
        lambda _: Causal() & KeyPadding(left=[9]),
        lambda length: ~Window(99) | Documents(lengths=[length - 9, 9]),
    ],
    ids=["conjunction", "disjunction"],
)
def test_memory_grows_with_the_length_and_not_with_its_square(make):
    used = [memory("flex", length, make) for length in (1024, 2048, 4096)]
    for short, long in pairwise(used):
        assert all(b <= 2.1 * a for a, b in zip(short, long, strict=True)), used
    assert used[-1][1] < 4096**2 / 4, "less than a quarter of one byte for each pair"


def test_a_square_would_be_seen():
    short, long = (
        memory("math", length, lambda _: Causal() & KeyPadding(left=[9])) for length in (512, 1024)
    )
    assert all(b > 3.5 * a for a, b in zip(short, long, strict=True)), (short, long)


def test_forty_windows_are_nine_structures(traced_only):
    for n in range(1, 41):
        flex(Window(n))
    names = [entry.name for entry in flex_compile.entries()]
    assert len(names) == mods.CONSTANT_BANDS + 1, names
    assert sum(len(entry.seconds) for entry in flex_compile.entries()) == len(names)


def test_forty_structures_do_not_share_the_limit_of_dynamo(traced_only):
    torch._dynamo.utils.clear_compilation_metrics()
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in range(1, 41):
            flex(padding(), softcap=float(n))
    entries = flex_compile.entries()
    assert [len(entry.seconds) for entry in entries] == [1] * 40
    functions = [entry.call._torchdynamo_orig_callable for entry in entries]
    assert len({id(function.__code__) for function in functions}) == 40
    traced = {metrics.co_name for metrics in torch._dynamo.utils.get_compilation_metrics()}
    assert {function.__name__ for function in functions} <= traced


@pytest.mark.parametrize(
    ("mask", "rest", "name"),
    [
        (Causal() & padding(), {}, "(j <= i) & (m0[b, j])"),
        (Window(5, 2), {"softcap": 2.0}, "(j - i <= 2) & (j - i >= -5), 2.0 * torch.tanh(s / 2.0)"),
        (None, {}, "no mask"),
    ],
    ids=["causal and padding", "window and softcap", "nothing"],
)
def test_listeners_hear_start_and_end_and_what_it_is(traced_only, mask, rest, name):
    heard = []
    listener = lambda _, name, seconds: heard.append((name, seconds))  # noqa: E731
    for _ in range(2):
        first_call.listen("flex", listener)
    for _ in range(2):
        flex(mask, **rest)
    (start, end), (entry,) = heard, flex_compile.entries()
    assert start == (name, None)
    assert end == (name, entry.seconds[0])
    assert end[1] > 0


def test_layers_share_one_list_of_blocks(traced_only, monkeypatch):
    made = []
    guess = program.guess
    monkeypatch.setattr(program, "guess", lambda *args: made.append(args) or guess(*args))
    mask = Causal() & padding()
    for _ in range(4):
        flex(mask)
    assert len(made) == 1
    mask.nodes[1].left[0] = 40
    flex(mask)
    assert len(made) == 2, "the blocks of a mask that was changed in place are stale"


def test_a_second_length_below_the_limit_of_dynamo_is_refused_and_the_first_still_runs(traced_only):
    first = flex(padding())
    with torch._dynamo.config.patch(recompile_limit=1):
        with pytest.raises(
            NotCompiledError, match=r"at most 1 compilations .* \(m0\[b, j\]\); got one more;"
        ):
            flex(padding(), 300)
        assert flex(padding()).shape == first.shape
    assert flex(padding(), 300).shape == (2, 4, 300, 16)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_stance_that_compiles_nothing_is_refused(traced_only, compiled):
    if compiled:
        flex(padding())
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(NotCompiledError, match=r"set_stance\); remove"),
    ):
        flex(padding())
    assert flex(padding()).shape == (2, 4, 130, 16)
    (entry,) = flex_compile.entries()
    assert len(entry.seconds) == 1


SURROUNDINGS = {
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
    "fail_on_recompile": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "eager_on_recompile": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "switched off": lambda: torch._dynamo.config.patch(disable=True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_refusal_ends_with_its_reason(traced_only, name, compiled):
    """Another backend runs the calls that stand where nothing is compiled, and no other call."""
    mask = PrefixLM([3, 4]) & Window(9)
    given = torch.randn(3, 2, 4, 150, 16)
    shorter = given[:, :, :, :140]
    with torch.no_grad():
        if compiled:
            attnroute.attention(*given, mask, backend="flex")
        with SURROUNDINGS[name]():
            with pytest.raises(NotCompiledError, match=r"requires torch\.compile to compile"):
                attnroute.attention(*shorter, mask, backend="flex")
            with pytest.warns(attnroute.RerouteWarning, match="runs this call instead"):
                out = attnroute.attention(*shorter, mask, prefer="flex")
        torch.testing.assert_close(attnroute.attention(*shorter, mask, backend="chunked"), out)
        assert attnroute.explain(*shorter, mask, prefer="flex").selected == "flex"
        compilations = sum(len(entry.seconds) for entry in flex_compile.entries())
        for tensors in (shorter, given):
            again = attnroute.attention(*tensors, mask, prefer="flex")
            torch.testing.assert_close(attnroute.attention(*tensors, mask, backend="flex"), again)
    assert sum(len(entry.seconds) for entry in flex_compile.entries()) > compilations


@pytest.mark.parametrize("compiled", [False, True])
def test_a_dispatch_mode_is_refused(traced_only, compiled):
    if compiled:
        flex(padding())
    with Spy() as spy, pytest.raises(AttnRouteError, match="TorchDispatchMode"):
        flex(padding())
    assert not ALL_SCORES.intersection(spy.seen)
    assert flex(padding()).shape == (2, 4, 130, 16)


def test_a_switch_that_is_off_is_refused_and_leaves_nothing_behind(traced_only):
    with torch._dynamo.config.patch(disable=True), pytest.raises(AttnRouteError):
        flex(padding())
    assert flex(padding()).shape == (2, 4, 130, 16)


def test_a_compiler_that_fails_is_tried_again(traced_only, monkeypatch):
    def fails(graph, inputs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(torch._dynamo, "lookup_backend", lambda _: fails)
        for suppress in (False, True):
            with (
                torch._dynamo.config.patch(suppress_errors=suppress),
                pytest.raises(NotCompiledError, match="no space left"),
            ):
                flex(padding())
    assert flex(padding()).shape == (2, 4, 130, 16)
    (entry,) = flex_compile.entries()
    assert len(entry.seconds) == 1


SWITCHED_OFF = """
import torch, attnroute
from support.spy import ALL_SCORES, Spy
from attnroute.errors import AttnRouteError
query = torch.randn(1, 2, 130, 16)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    try:
        attnroute.attention(query, query, query, is_causal=True, backend="flex")
    except AttnRouteError as error:
        print(type(error).__name__, error)
seen = {event.key for event in profile.key_averages()}
assert not seen & ALL_SCORES, seen
"""


def test_torch_compile_disable_is_refused():
    environment = {
        **os.environ,
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", SWITCHED_OFF]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "TORCH_COMPILE_DISABLE" in done.stdout, done.stdout


def test_a_model_that_is_compiled_itself_runs_the_same_functions(traced_only):
    mask = padding()

    @torch.compile(backend="eager")
    def model(query):
        return 2 * attnroute.attention(query, query, query, mask, backend="flex")

    query = torch.randn(2, 4, 130, 16)
    with torch.no_grad():
        expected = 2 * attnroute.attention(query, query, query, mask, backend="math")
        torch.testing.assert_close(model(query), expected, atol=1e-4, rtol=1e-4)
    (entry,) = flex_compile.entries()
    assert len(entry.seconds) == 1


@pytest.mark.parametrize(
    ("dtype", "trains", "row"),
    [(torch.float32, True, "cpu/flex/inference-only"), (torch.float64, False, "any/flex/dtype")],
    ids=["training", "float64"],
)
def test_what_no_kernel_does_is_refused_by_its_row(dtype, trains, row):
    query = torch.randn(1, 2, 130, 16, dtype=dtype, requires_grad=trains)
    with pytest.raises(NoBackendError) as caught:
        attnroute.attention(query, query, query, is_causal=True, backend="flex")
    assert f"[{row}]" in str(caught.value)
    assert not flex_compile.entries()
