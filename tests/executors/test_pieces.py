"""A call in pieces: what reads batch rows and heads by their numbers reads the same ones as in the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import flash_kernel
from support.mask_objects import HEADS, combined
from support.reference import TOLERANCE, attend, error
from support.repair_inputs import executor_of, inputs_of, lowered, plan
from torch.nn.attention.flex_attention import create_block_mask

from attnroute import masks
from attnroute.executors.aten import flash
from attnroute.executors.prepare import apply as repairs
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.prepare.pieces import BATCH, Cut, cut_mask, pieces
from attnroute.executors.prepare.pieces import HEADS as OF_HEADS
from attnroute.masks.lowered.dense import materialize
from attnroute.masks.lowered.form import FULL, Extent

AXES = pytest.mark.parametrize("axis", [BATCH, OF_HEADS], ids=["batch", "heads"])


@pytest.fixture
def small_grid(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(repairs, "GRID_LIMIT", 2)


def in_pieces(mask, batch, heads, seqlen_q, seqlen_kv, axis, limit):
    """Return a mask as it is put together from what its pieces say."""
    inputs = inputs_of(batch, heads, heads, seqlen_q, seqlen_kv)
    inputs.mask = lowered(mask, inputs)
    parts = []
    for piece in pieces(inputs, axis, limit):
        rows, of_heads, *_ = piece.query.shape
        extent = Extent(rows, of_heads, seqlen_q, seqlen_kv)
        parts.append(materialize(piece.mask, extent).expand(rows, of_heads, -1, -1))
    return torch.cat(parts, axis)


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.sampled_from([BATCH, OF_HEADS]))
def test_masks_of_all_kinds(data, batch, seqlen_q, seqlen_kv, axis):
    mask, allowed = data.draw(combined(batch, seqlen_q, seqlen_kv))
    got = in_pieces(mask, batch, HEADS, seqlen_q, seqlen_kv, axis, data.draw(st.integers(1, 2)))
    assert torch.equal(got, allowed)


def odd(b, h, i, j):
    return (i * 3 + j * 5 + b * 7 + h * 11) % 4 > 0


@AXES
@pytest.mark.parametrize("shape", [(3, 4), (3, None), (None, 4), (None, None)], ids=str)
def test_block_masks(shape, axis):
    def first(b, h, i, j):
        return odd(b if shape[0] else 0, h if shape[1] else 0, i, j) & (j <= i + b)

    blocks = create_block_mask(first, *shape, 40, 70, device="cpu", BLOCK_SIZE=16)
    mask = masks.Blocks(blocks)
    whole = mask.materialize(40, 70, batch=3, num_heads_q=4)
    got = in_pieces(mask & masks.Causal("bottom_right"), 3, 4, 40, 70, axis, 2)
    assert torch.equal(got, (whole & masks.Causal("bottom_right").materialize(40, 70)).expand_as(got))
    assert torch.equal(in_pieces(mask, 3, 4, 40, 70, axis, 2), whole.expand_as(got))


@AXES
@pytest.mark.parametrize(
    ("per_batch", "per_head"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_predicates_are_called_as_often_as_they_need(per_batch, per_head, axis):
    def mod(b, h, i, j):
        return odd(b if per_batch else 0, h if per_head else 0, i, j)

    mask = masks.Function(mod, per_batch=per_batch, per_head=per_head)
    whole = mask.materialize(4, 6, batch=3, num_heads_q=4)
    assert torch.equal(in_pieces(mask, 3, 4, 4, 6, axis, 2), whole.expand(3, 4, -1, -1))
    assert whole.shape[:2] == (3 if per_batch else 1, 4 if per_head else 1)


TABLE = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
SCORES = {
    "score_mod": {"score_mod": lambda s, b, h, i, j: s * (1 + 0.1 * h) + TABLE[b, h] * (i - j)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.6, 6)},
    "alibi of each row": {"alibi_slopes": TABLE.abs()},
    "sink": {"sink": torch.linspace(-1.0, 1.0, 6)},
}


@pytest.mark.parametrize(
    "made", [("split_batch",), ("split_heads",), ("split_batch", "split_heads")], ids="+".join
)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_scores_that_depend_on_rows_and_heads(small_grid, scores, made):
    inputs = inputs_of(5, 6, 3, **scores)
    inputs.mask = lowered(masks.Function(odd) | masks.Causal(), inputs)
    chunked = executor_of("chunked")
    want, want_lse = run_repaired(chunked, replace(inputs), plan(return_lse=True))
    out, lse = run_repaired(chunked, replace(inputs), plan(*made, return_lse=True))
    assert error(out, want) <= TOLERANCE[torch.float32]
    assert torch.allclose(lse, want_lse, atol=1e-5)


def test_ragged_rows(monkeypatch, small_grid):
    """The counts of the rows of a piece are its own; documents are the same in every row."""
    flash_kernel.install(monkeypatch)
    given_masks = [
        masks.KeyPadding(left=[0, 6, 2, 1, 5]) & masks.Causal("bottom_right"),
        masks.KeyPadding(lengths=[0, 6, 2, 1, 5]),
        masks.Documents(lengths=[2, 4]) & masks.Causal(),
    ]
    for mask in given_masks:
        inputs = inputs_of(5, 4, 2, 6, 6)
        inputs.mask = lowered(mask, inputs)
        allowed = mask.materialize(6, 6, batch=5)
        want, _ = attend(inputs.query, inputs.key, inputs.value, allowed=allowed)
        prepared = replace(plan("to_varlen", "split_batch", return_lse=True), device_type="cuda")
        out, lse = run_repaired(flash.executor, inputs, prepared)
        assert error(out, want) <= TOLERANCE[torch.float32]
        assert lse.shape == (5, 4, 6)


def test_what_holds_for_all_rows_is_not_cut():
    """A copy would be made anew in each call and piece."""
    inputs = inputs_of(3, 2, 2, 6, 6)
    mask = lowered(masks.Documents(lengths=[2, 4]) & masks.Function(odd, per_batch=False), inputs)
    cut = cut_mask(mask, Cut(BATCH, 1, 3), "cpu")
    assert cut == mask
    assert cut_mask(FULL, Cut(OF_HEADS, 1, 2), "cpu") == FULL


def test_the_first_piece_calls_the_function_itself():
    inputs = inputs_of(4, 2, 2, score_mod=SCORES["score_mod"]["score_mod"])
    first, second = pieces(inputs, BATCH, 2)
    assert first.score_mod is inputs.score_mod
    assert second.score_mod is not inputs.score_mod
