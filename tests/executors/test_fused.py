"""Kernels of ours in the place of operators: when they are compiled, what they are launched with, who may."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.fused_standins import Standins
from support.left_out import COUNTS, MEMORY, RIGHT, hold, inputs_of

from attnroute import masks
from attnroute.executors import fused
from attnroute.executors.fused import OFTEN, Kernel, Prebound
from attnroute.executors.prepare import kernels
from attnroute.executors.prepare.kernels import CLEAR, GRADIENT, SHRINK, pieces
from attnroute.memory import reset


class Card:
    """What is asked of CUDA, and what a kernel does there."""

    def __init__(self):
        self.current, self.capturing, self.compiled, self.launched = 0, False, 0, []
        self.refuses = False

    def compile(self, *_):
        self.compiled += 1
        if self.refuses:
            raise SystemExit
        signature = {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        src = SimpleNamespace(signature=signature, fn=SimpleNamespace(constexprs=[2]))
        return _Compiled(src, self.launched)


class _Compiled:
    def __init__(self, src, launched):
        self.src, self.launched = src, launched

    function, packed_metadata = "function", "metadata"

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *given):
        assert (function, metadata, launch_metadata, enter, leave) == (
            "function",
            "metadata",
            None,
            None,
            None,
        )
        self.launched.append(((x, y, z), given, stream))


@pytest.fixture
def card(monkeypatch):
    found = Card()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda n: 70 + n, raising=False)
    reset()
    yield found
    reset()


DEVICE = torch.device("cuda", 0)
TENSOR = SimpleNamespace(device=DEVICE, data_ptr=lambda: 4096)


def kernel_of(card, kind="a kind"):
    return Kernel(
        lambda *_: kind,
        card.compile,
        lambda compiled, *_: fused.bind(compiled, (3, 2, 1), (5, 128), DEVICE),
    )


def test_a_kernel_is_compiled_once_calls_came_often_and_then_gets_addresses(card):
    kernel = kernel_of(card)
    run = Prebound(kernel)
    assert [run(TENSOR) for _ in range(OFTEN)] == [False] * OFTEN
    assert card.compiled == 0
    assert [run(TENSOR) for _ in range(3)] == [True] * 3
    assert (card.compiled, card.launched) == (1, [((3, 2, 1), (4096, 5, 128), 70)] * 3)
    # Another call of the kind has it at once.
    assert Prebound(kernel)(TENSOR)
    assert card.compiled == 1


def test_before_triton_3_3_constants_are_no_arguments(card):
    compiled = card.compile()
    del compiled.src.signature["BLOCK"]
    assert fused.bind(compiled, (1, 1, 1), (5, 128), DEVICE)(4096)
    assert card.launched == [((1, 1, 1), (4096, 5), 70)]


def test_nothing_is_compiled_into_a_graph_that_is_captured(card):
    run = Prebound(kernel_of(card))
    for _ in range(OFTEN):
        run(TENSOR)
    card.capturing = True
    assert not run(TENSOR)
    assert card.compiled == 0
    card.capturing = False
    assert run(TENSOR)
    # What is compiled may be captured.
    card.capturing = True
    assert run(TENSOR)


def test_operators_run_where_another_device_is_the_current_one(card):
    run = Prebound(kernel_of(card))
    for _ in range(OFTEN):
        run(TENSOR)
    card.current = 1
    assert not run(TENSOR)
    assert card.compiled == 0
    card.current = 0
    assert run(TENSOR)
    card.current = 1
    assert not run(TENSOR)
    assert len(card.launched) == 1


def test_what_cannot_be_compiled_is_tried_once(card):
    card.refuses = True
    run = Prebound(kernel_of(card))
    assert not any(run(TENSOR) for _ in range(OFTEN + 5))
    assert card.compiled == 1


def test_a_triton_that_takes_other_arguments_leaves_it_to_operators(card, monkeypatch):
    monkeypatch.setattr(_Compiled, "run", lambda *_, stream: stream)
    kernel = kernel_of(card)
    for _ in range(OFTEN):
        Prebound(kernel)(TENSOR)
    assert not any(run(TENSOR) for run in (Prebound(kernel), Prebound(kernel)))
    assert card.compiled == 1


def test_what_a_kernel_does_not_take_is_left_to_operators(card):
    run = Prebound(kernel_of(card, kind=None))
    assert not any(run(TENSOR) for _ in range(OFTEN + 5))
    assert card.compiled == 0


def test_a_reset_forgets_what_was_compiled(card):
    kernel = kernel_of(card)
    for _ in range(OFTEN + 1):
        Prebound(kernel)(TENSOR)
    reset()
    assert not Prebound(kernel)(TENSOR)
    assert card.compiled == 1


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        (lambda t: t, True),
        (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), True),
        (lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), False),
        (lambda t: t.double(), False),
    ],
    ids=["packed", "tokens outermost", "rows apart", "float64"],
)
def test_which_outputs_a_kernel_takes(change, takes):
    out, lse, sink = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6), torch.randn(4)
    into = torch.empty(4)
    assert (SHRINK[True].kind(change(out), lse, sink) is not None) == takes
    assert (GRADIENT.kind(out, change(out), lse, sink, into) is not None) == takes
    assert (CLEAR.kind(change(out), out, out, out, torch.ones(2, 1, 6, 1, dtype=torch.bool)) is not None) == (
        takes
    )


def test_kinds_tell_apart_what_is_compiled_apart():
    out, lse, sink = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6), torch.randn(4)
    shifted = torch.empty(out.numel() + 1)[1:].view(out.shape)
    odd = torch.randn(2, 4, 6, 9)[..., :8]
    kinds = [SHRINK[trains].kind(out, lse, sink) for trains in (False, True)]
    others = (shifted, odd, out.bfloat16(), torch.randn(2, 4, 6, 72))
    kinds += [SHRINK[True].kind(other, lse, sink) for other in others]
    kinds += [SHRINK[True].kind(out, lse, sink.bfloat16())]
    assert len(set(kinds)) == len(kinds)
    longer = torch.randn(3, 5, 70, 8), torch.randn(3, 5, 96), torch.randn(5)
    assert SHRINK[True].kind(*longer) == kinds[1]


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 4, 64, 64), (3, 64, 8000, 128), (1, 2000, 5000, 8)])
def test_programs_sum_every_row_of_a_head(shape):
    out = torch.empty(shape, device="meta")
    batch, heads, seqlen, dim = shape
    lse, sink = torch.empty(shape[:3], device="meta"), torch.empty(heads, device="meta")
    *_, steps, _, rows, block = kernels._gradient_numbers(out, out, lse, sink, sink)
    assert block >= dim
    assert pieces(out) * steps * rows >= batch * seqlen
    assert pieces(out) * heads <= max(1024, heads)


@pytest.mark.parametrize("heads", [4, 2**16])
def test_grids_hold_every_head(card, heads):
    out = torch.empty(2, heads, 3, 8, device="meta")
    lse, sink = torch.empty(out.shape[:3], device="meta"), torch.empty(heads, device="meta")
    compiled = card.compile()
    on_card = SimpleNamespace(shape=out.shape, stride=out.stride, device=DEVICE)
    assert kernels._bound_gradient(compiled, out, on_card, lse, sink, sink)(1, 2, 3, 4, 5)
    assert kernels._bound_shrink(compiled, on_card, lse, sink, trains=True)(1, 2, 3)
    for (_, y, z), _, _ in card.launched:
        assert max(y, z) <= 65535
    assert card.launched[0][0][:2] == (heads, pieces(out))


@pytest.mark.parametrize("memory", MEMORY)
def test_padding_is_cleared_in_one_launch_where_rows_can_be_read(monkeypatch, memory):
    standins = Standins(monkeypatch)
    reset()
    mask = masks.KeyPadding(lengths=COUNTS)
    inputs = inputs_of(memory, math.nan, RIGHT)
    for _ in range(3):
        hold(inputs, mask, RIGHT, False, 1e-5, train=False)
    # The first call goes the long way, and is the only one there.
    assert standins.seen == ([] if memory == "between words" else ["clear"] * 2)
    reset()
