"""`chunked` in every memory layout: the numbers, where results are written, and what is never copied."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.chunked_compare import TOLERANCE, Drawn, chunked_attention, compare
from support.chunked_tiling import tiling
from torch.utils._python_dispatch import TorchDispatchMode

from attnroute.executors.chunked import call as chunked_call
from attnroute.executors.chunked import plan as chunked_plan
from attnroute.executors.chunked.run import run
from attnroute.executors.protocol import Inputs, Plan
from attnroute.masks.lowered.form import FULL, LoweredMask

CAUSAL = LoweredMask(band_hi=0)
LAYOUTS = {
    "heads": lambda t: t,
    "tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "dims": lambda t: t.mT.contiguous().mT,
    "parts": lambda t: torch.cat((t, t), -1)[..., : t.shape[3]],
    "odd": lambda t: torch.cat((t, t), -1)[..., 1 : t.shape[3] + 1].copy_(t),
}


@pytest.fixture
def large(monkeypatch):
    """Take every tensor for one whose copy is worth a thought."""
    monkeypatch.setattr(chunked_call, "LARGE_COPY", 1)
    monkeypatch.setattr(chunked_call, "LARGE_ROW", 1)


@pytest.fixture
def dividing(monkeypatch):
    """Divide probabilities, as the kernels of a GPU do, on calls of one tile too."""
    steps = chunked_call.EAGER_STEPS._replace(divides=True)
    monkeypatch.setattr(chunked_call, "steps_for", lambda _: steps)
    monkeypatch.setattr(chunked_plan, "CPU", chunked_plan.ACCELERATOR)
    monkeypatch.setattr("attnroute.executors.chunked.autograd.is_whole", lambda _: False)
    monkeypatch.setattr("attnroute.executors.chunked.run.one_block", lambda *_: None)


class Operators(TorchDispatchMode):
    """Count torch's operators, and elements that copies write."""

    def __init__(self):
        super().__init__()
        self.seen, self.copied = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0].removeprefix("aten::")
        self.seen[name] += 1
        if name in {"clone", "copy_", "_to_copy"}:
            self.copied += result.numel()
        return result


def laid_out(tensors, layout):
    return tuple(LAYOUTS[layout](t.detach()).requires_grad_() for t in tensors)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize("block_q", [8, None])
def test_output_and_gradients_of_blocks(dtype, layout, heads_kv, block_q):
    drawn = Drawn(0, dtype)
    tensors = laid_out(drawn.tensors((2, 4, 40, 44), 16, 8, heads_kv=heads_kv), layout)
    with tiling(2_000):
        compare(drawn, tensors, CAUSAL, block_q=block_q)


@pytest.mark.usefixtures("dividing")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, LoweredMask(band_hi=-30)], ids=["full", "causal", "empty"])
@pytest.mark.parametrize("block_q", [8, None])
@pytest.mark.parametrize("scores", [500, 20_000])
def test_output_and_gradients_where_probabilities_are_divided(dtype, layout, mask, block_q, scores):
    drawn = Drawn(1, dtype)
    tensors = laid_out(drawn.tensors((2, 4, 40, 44), 16, 8, heads_kv=2), layout)
    with tiling(scores):
        compare(drawn, tensors, mask, {"sink": drawn.normal(4).requires_grad_()}, block_q=block_q)


@pytest.mark.usefixtures("dividing")
@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("queries", [1, 40])
def test_one_tile_writes_its_output_and_gradients_where_they_belong(heads_kv, queries):
    tensors = Drawn(2, torch.float32).tensors((3, 4, queries, 44), heads_kv=heads_kv)
    with Operators() as forward:
        out, _ = run(Inputs(*tensors), Plan("chunked", (), True, False, "cpu"))
    assert forward.seen["baddbmm"] == 2
    assert forward.copied == out.numel() // out.shape[3], (
        "the statistics' start, of the steps in torch, alone"
    )
    assert not forward.seen["log"], "nobody reads the log-sum-exp"
    with Operators() as backward:
        torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert backward.seen["baddbmm"] == 5
    assert backward.copied == 0
    assert not backward.seen["zero_"]


@pytest.mark.parametrize(("row", "chunks"), [(1, 3), (2**26, 1)])
def test_long_batch_rows_with_tokens_outermost_are_not_copied_together(monkeypatch, row, chunks):
    monkeypatch.setattr(chunked_call, "LARGE_ROW", row)
    tensors = laid_out(Drawn(3, torch.float32).tensors((3, 2, 16, 600)), "tokens")
    with torch.no_grad(), tiling(10**6) as plans, Operators() as operators:
        chunked_attention(*tensors, FULL, block_q=8)
    assert len(plans[0].chunks) == chunks
    copies_keys = operators.copied >= tensors[1].numel()
    assert copies_keys == (chunks == 1)


def test_large_blocks_are_copied_in_words(monkeypatch):
    monkeypatch.setattr(chunked_call, "LARGE_COPY", 1)
    drawn = Drawn(4, torch.bfloat16)
    target, source = drawn.normal(2, 3, 4, 8), drawn.normal(2, 4, 3, 8).transpose(1, 2)
    with Operators() as operators:
        chunked_call.copy_block(target, source)
    assert torch.equal(target, source)
    assert operators.copied == target.numel() // 4
    odd = drawn.normal(2, 3, 4, 7)
    chunked_call.copy_block(odd, source[..., :7])
    assert torch.equal(odd, source[..., :7])
