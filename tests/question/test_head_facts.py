"""Head dims as kernels round them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnroute.question.call import Call
from attnroute.question.facts import facts_of

HEAD_DIMS = st.integers(1, 640)


def facts(head_dim_qk, head_dim_v):
    call = Call(
        dtype="bfloat16",
        batch=1,
        num_heads_q=1,
        num_heads_kv=1,
        seqlen_q=1,
        seqlen_kv=1,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
    )
    return facts_of(call)


@given(HEAD_DIMS, HEAD_DIMS)
def test_head_dims_in_tiles_of_16_end_at_a_step_of_32_or_half_way(head_dim_qk, head_dim_v):
    halves = [d for start in range(1, 640, 32) for d in range(start, start + 16)]
    wanted = 16 if head_dim_qk in halves else 0
    assert facts(head_dim_qk, head_dim_v)["head_dim_qk_tile_mod_32"] == wanted


@given(HEAD_DIMS, HEAD_DIMS)
def test_dv_is_stored_in_whole_pieces_where_counting_says_so(head_dim_qk, head_dim_v):
    """A piece is the widest of 1 to 32 columns that divides 32 and half a row of dK."""
    found = facts(head_dim_qk, head_dim_v)
    for multiple in (16, 32):
        half_qk, half_v = (-(-n // multiple) * multiple // 2 for n in (head_dim_qk, head_dim_v))
        piece = max(n for n in range(1, 33) if 32 % n == 0 and half_qk % n == 0)
        assert found[f"dv_store_fits_{multiple}"] is (half_v in range(0, half_v + 1, piece))


@pytest.mark.parametrize(
    ("pair", "fits_16", "fits_32"),
    [((128, 96), False, False), ((128, 104), False, True), ((96, 8), False, True), ((192, 128), True, True)],
)
def test_pairs_that_public_reports_name(pair, fits_16, fits_32):
    found = facts(*pair)
    assert (found["dv_store_fits_16"], found["dv_store_fits_32"]) == (fits_16, fits_32)


@pytest.mark.parametrize(
    ("head_dim", "narrow", "wide", "hopper"),
    [(8, 32, 32, 64), (72, 96, 96, 96), (128, 128, 128, 128), (136, 160, 192, 192), (200, 256, 256, 256)],
)
def test_accumulators_are_as_wide_as_each_release_rounds_head_dims(head_dim, narrow, wide, hopper):
    found = facts(head_dim, 8)
    elements = {n: found[f"dq_accumulator_{n}"] // 128 for n in ("elements", "elements_wide", "row_elements")}
    assert elements == {"elements": narrow, "elements_wide": wide, "row_elements": hopper}


@given(HEAD_DIMS, HEAD_DIMS)
def test_values_are_wider_by_whole_tiles(head_dim_qk, head_dim_v):
    found = facts(head_dim_qk, head_dim_v)
    tiles_qk, tiles_v = (len(range(0, n, 16)) for n in (head_dim_qk, head_dim_v))
    assert found["head_dims_ratio"] == tiles_v / tiles_qk
    assert found["fa4_tile_bytes"] == 32 * (128 * tiles_qk + 64 * (tiles_qk + tiles_v))
