"""FLASH on ragged batches, with the kernel written in plain torch: sums, windows and shapes are right.

What torch's own kernel makes of them is tested in tests/gpu/test_cuda_ragged.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import flash_kernel
from support.reference import attend

from attnroute import masks
from attnroute.engine.repairs import apply
from attnroute.executors.aten import flash
from attnroute.executors.protocol import Inputs, Plan
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.masks.objects.ragged import Ragged
from attnroute.question.call import Call
from attnroute.question.normalize import normalize

BESIDE = st.none() | st.integers(0, 9)
LENGTHS = st.integers(1, 6)
HEADS = (4, 2)


@pytest.fixture
def kernel(monkeypatch):
    torch.manual_seed(0)
    return flash_kernel.install(monkeypatch)


def with_kernel(inputs, plan, **how):
    """Run with the kernel for one example of many, which a fixture would outlast."""
    with pytest.MonkeyPatch.context() as patch:
        seen = flash_kernel.install(patch, **how)
        out, lse = flash.run(inputs, plan)
    return out, lse, seen.only


def plan_of(*repairs, training=False):
    return Plan("flash", repairs, training, return_lse=True, device_type="cuda")


def inputs_of(mask, batch, seqlen_q, seqlen_kv, *, train=False):
    def make(heads, length):
        return torch.randn(batch, heads, length, 8, dtype=torch.float64, requires_grad=train)

    query, key, value = make(HEADS[0], seqlen_q), make(HEADS[1], seqlen_kv), make(HEADS[1], seqlen_kv)
    lowered = mask.lower(FULL, Extent(batch, HEADS[0], seqlen_q, seqlen_kv))
    return Inputs(query, key, value, lowered)


def call_of(mask, batch, seqlen_q, seqlen_kv, *, layout="bhsd"):
    extent = Extent(batch, HEADS[0], seqlen_q, seqlen_kv)
    call = Call(
        dtype="bfloat16",
        batch=batch,
        num_heads_q=HEADS[0],
        num_heads_kv=HEADS[1],
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim_qk=8,
        head_dim_v=8,
        layout=layout,
        mask=mask.describe(extent),
    )
    return normalize(call)


def check(inputs, mask, out, lse):
    """Hold output, log-sum-exp and gradients against the definition."""
    batch, heads, seqlen_q, _ = inputs.query.shape
    allowed = mask.materialize(seqlen_q, inputs.key.shape[2], batch=batch, num_heads_q=heads)
    want, want_lse = attend(inputs.query, inputs.key, inputs.value, allowed=allowed)
    assert out.shape == want.shape
    assert torch.allclose(out, want, atol=1e-12)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    assert torch.allclose(lse, want_lse.detach(), atol=1e-12)
    if inputs.query.requires_grad:
        trained = (inputs.query, inputs.key, inputs.value)
        cotangent = torch.randn_like(want)
        for got, wanted in zip(
            torch.autograd.grad(out, trained, cotangent),
            torch.autograd.grad(want, trained, cotangent),
            strict=True,
        ):
            assert torch.allclose(got, wanted, atol=1e-12)


@st.composite
def paddings(draw, batch, seqlen_kv):
    """Draw padding at one side, said in any form."""
    counts = draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch))
    form = draw(st.sampled_from([tuple, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)]))
    return masks.KeyPadding(**{draw(st.sampled_from(["lengths", "left"])): form(counts)})


@st.composite
def bands(draw):
    alignment = draw(st.sampled_from(["top_left", "bottom_right"]))
    kind = draw(st.sampled_from(["none", "causal", "window"]))
    if kind == "none":
        return None
    if kind == "causal":
        return masks.Causal(alignment)
    return masks.Window(draw(BESIDE), draw(BESIDE), alignment)


@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS, st.booleans())
def test_padded_rows(data, batch, seqlen_q, seqlen_kv, train):
    """Whatever padding and band the engine accepts for ragged batches, the kernel is asked for right."""
    mask = data.draw(paddings(batch, seqlen_kv))
    band = data.draw(bands())
    mask = mask if band is None else mask & band
    call = call_of(mask, batch, seqlen_q, seqlen_kv)
    assume(apply("to_varlen", call) is not None)
    inputs = inputs_of(mask, batch, seqlen_q, seqlen_kv, train=train)
    out, lse, seen = with_kernel(inputs, plan_of("to_varlen", training=train))
    check(inputs, mask, out, lse)
    assert seen.sums_kv.numel() - 1 == (batch if seen.used is not None else 2 * batch)
    assert (seen.used is not None) == (not train)


IN_PLACE = {
    "heads outermost": lambda t: t.clone(),
    "tokens outermost": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "the start of a cache": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
    "beside the other one": lambda t: torch.cat([t, t], -1)[..., : t.shape[3]],
}


@pytest.mark.parametrize("side", ["lengths", "left"])
@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("memory", IN_PLACE)
def test_padded_rows_are_read_where_they_lie(kernel, memory, seqlen_q, side):
    """What no key in use is in memory, between rows or in them, may hold anything."""
    counts = torch.tensor([5, 0, 6])
    mask = masks.KeyPadding(**{side: counts if side == "lengths" else 6 - counts})
    inputs = inputs_of(mask, 3, seqlen_q, 6)
    inputs = replace(inputs, key=IN_PLACE[memory](inputs.key), value=IN_PLACE[memory](inputs.value))
    out, lse = flash.run(inputs, plan_of("to_varlen"))
    check(inputs, mask, out, lse)
    assert kernel.only.pointers[1:] == [inputs.key.data_ptr(), inputs.value.data_ptr()]


COPIED = {
    "half a token between rows": lambda t: torch.cat([t.flatten(1), t.flatten(1)[:, :4]], 1)[:, :-4].view_as(
        t
    ),
    "shared by all rows": lambda t: t[:1].clone().expand_as(t),
    "unlike the values": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
}


@pytest.mark.parametrize("memory", COPIED)
def test_rows_that_no_prefix_sums_reach_are_copied(kernel, memory):
    mask = masks.KeyPadding(left=[1, 6, 0])
    inputs = inputs_of(mask, 3, 1, 6)
    inputs = replace(inputs, key=COPIED[memory](inputs.key))
    out, lse = flash.run(inputs, plan_of("to_varlen"))
    check(inputs, mask, out, lse)
    assert kernel.only.pointers[1] != inputs.key.data_ptr()


@given(st.data(), st.integers(1, 3), LENGTHS, st.booleans())
def test_documents(data, batch, seqlen, train):
    cuts = data.draw(st.lists(st.integers(0, seqlen), max_size=3).map(sorted))
    sums = [0, *cuts, seqlen]
    lengths = [b - a for a, b in pairwise(sums)]
    forms = [masks.Documents(lengths=lengths), masks.Documents(cu_seqlens=torch.tensor(sums))]
    mask, band = data.draw(st.sampled_from(forms)), data.draw(bands())
    mask = mask if band is None else mask & band
    assume(apply("to_varlen", call_of(mask, batch, seqlen, seqlen)) is not None)
    inputs = inputs_of(mask, batch, seqlen, seqlen, train=train)
    out, lse, _ = with_kernel(inputs, plan_of("to_varlen", training=train))
    check(inputs, mask, out, lse)


PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4)
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])


@given(PAIRS, BESIDE, BESIDE, ALIGNMENTS, st.booleans(), st.booleans(), st.booleans())
def test_sequences_of_layout_thd(pairs, left, right, alignment, cross, bounded, train):
    lengths_q, lengths_kv = zip(*pairs, strict=True) if cross else ([size for size, _ in pairs],) * 2
    assume(sum(lengths_q) and sum(lengths_kv))
    mask = Ragged(
        torch.tensor([0, *accumulate(lengths_q)]),
        torch.tensor([0, *accumulate(lengths_kv)]) if cross else None,
        max_seqlen=max(lengths_q) if bounded else None,
        max_seqlen_kv=max(lengths_kv) if bounded else None,
        left=left,
        right=right,
        alignment=alignment,
    )
    totals = (sum(lengths_q), sum(lengths_kv))
    call = call_of(mask, 1, *totals, layout="thd")
    band = len(call.mask) > 1
    change = apply("to_varlen", call)
    assert (change is None) == (cross and band and alignment == "top_left")
    assume(change is not None)
    inputs = inputs_of(mask, 1, *totals, train=train)
    out, lse, _ = with_kernel(inputs, plan_of("to_varlen", training=train))
    check(inputs, mask, out, lse)


@st.composite
def windows(draw, seqlen_q, seqlen_kv):
    """Draw a window that is neither open on both sides at these lengths nor causal."""
    left = draw(st.none() | st.integers(0, seqlen_kv - 2)) if seqlen_kv > 1 else None
    least = 1 if left is None else 0
    right = draw(st.none() | st.integers(least, seqlen_q - 2)) if seqlen_q - 2 >= least else None
    return masks.Window(left, right, "bottom_right")


@given(st.data(), st.integers(1, 3), st.integers(1, 9), LENGTHS)
def test_windows_over_whole_rows(data, batch, seqlen_q, seqlen_kv):
    """With more queries than keys the kernel reads open and wide right sides as too short."""
    mask = data.draw(windows(seqlen_q, seqlen_kv))
    assume((mask.left, mask.right) != (None, None))
    inputs = inputs_of(mask, batch, seqlen_q, seqlen_kv, train=True)
    out, lse, seen = with_kernel(inputs, plan_of())
    check(inputs, mask, out, lse)
    assert seen.longest_kv == seqlen_kv or seqlen_q > seqlen_kv


def test_packed_tokens_are_not_copied(kernel):
    total = 7
    mask = Ragged(torch.tensor([0, 3, 7], dtype=torch.int32), right=0)
    packed = [torch.randn(total, heads, 8) for heads in (4, 2, 2)]
    views = [t.transpose(0, 1)[None] for t in packed]
    flash.run(Inputs(*views, mask.lower(FULL, Extent(1, 4, total, total))), plan_of("to_varlen"))
    assert kernel.only.pointers == [t.data_ptr() for t in packed]


def test_one_batch_row_and_layout_bshd_are_not_copied(kernel):
    for batch in (1, 2):
        tensors = [torch.randn(batch, 5, heads, 8).transpose(1, 2) for heads in (4, 2, 2)]
        mask = masks.KeyPadding(lengths=[2] * batch)
        flash.run(Inputs(*tensors, mask.lower(FULL, Extent(batch, 4, 5, 5))), plan_of("to_varlen"))
        assert kernel.calls[-1].pointers == [t.data_ptr() for t in tensors]
    tensors = [torch.randn(1, heads, 5, 8) for heads in (4, 2, 2)]
    mask = masks.KeyPadding(lengths=[2])
    flash.run(Inputs(*tensors, mask.lower(FULL, Extent(1, 4, 5, 5))), plan_of("to_varlen"))
    assert kernel.calls[-1].pointers == [t.data_ptr() for t in tensors]


def test_layers_share_the_sums_of_their_padding(kernel):
    mask = masks.KeyPadding(left=torch.tensor([2, 0])) & masks.Causal()
    for _ in range(2):
        flash.run(inputs_of(mask, 2, 5, 5), plan_of("to_varlen"))
    first, second = kernel.calls
    assert first.sums_q is second.sums_q
    assert first.sums_kv is second.sums_kv
    assert first.sums_q.tolist() == [0, 5, 10]
    assert first.sums_kv.tolist() == [2, 10, 15], (
        "the second row lies two heads of five keys behind the first"
    )
    assert first.used.tolist() == [3, 5]
    assert (first.window, first.longest_q, first.longest_kv) == ((None, 0), 5, 5)


def test_one_document_beside_padding_is_no_document(kernel):
    mask = masks.Documents(lengths=[5]) & masks.KeyPadding(lengths=[2, 4])
    assert apply("to_varlen", call_of(mask, 2, 5, 5)) is not None
    inputs = inputs_of(mask, 2, 5, 5)
    check(inputs, mask, *flash.run(inputs, plan_of("to_varlen")))


def test_decoding_keeps_one_query_per_sequence(kernel):
    """Only then may the kernel treat the heads that share a key head as queries."""
    silent = replace(plan_of("to_varlen"), return_lse=False)
    for mask in (masks.KeyPadding(lengths=[3, 0, 6]), masks.KeyPadding(left=[3, 6, 0])):
        inputs = inputs_of(mask, 3, 1, 6)
        want, lse = flash.run(inputs, plan_of("to_varlen"))
        check(inputs, mask, want, lse)
        out, _ = flash.run(inputs, silent)
        torch.testing.assert_close(out, want)
        assert (kernel.calls[-1].longest_q, kernel.calls[-1].used.numel()) == (1, 3)
    sums_kv = torch.tensor([0, 4, 5, 9])
    mask = Ragged(torch.tensor([0, 1, 2, 3]), sums_kv, 1, 4, right=0, alignment="bottom_right")
    inputs = inputs_of(mask, 1, 3, 9)
    flash.run(inputs, silent)
    assert (kernel.calls[-1].longest_q, kernel.calls[-1].window) == (1, (None, None))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("repairs", [("to_varlen",), ("to_varlen", "sink_from_lse")])
def test_whoever_reads_the_log_sum_exp_of_single_queries_keeps_heads_apart(kernel, repairs, train):
    """Where heads stand in for queries the kernel may put it into wrong places: flash-attention#2573."""
    mask = masks.KeyPadding(lengths=[3, 0, 6])
    plan = replace(plan_of(*repairs, training=train), return_lse=not train and len(repairs) == 1)
    flash.run(inputs_of(mask, 3, 1, 6), plan)
    assert kernel.calls[-1].longest_q == 2


def test_the_log_sum_exp_of_older_kernels_is_padded():
    torch.manual_seed(0)
    mask = masks.KeyPadding(lengths=[3, 0]) & masks.KeyPadding(lengths=[4, 4])
    inputs = inputs_of(mask, 2, 3, 4)
    out, lse, _ = with_kernel(inputs, plan_of("to_varlen"), padded_lse=True)
    check(inputs, mask, out, lse)
    mask = Ragged(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 0, 3, 7]), right=0, alignment="bottom_right")
    inputs = inputs_of(mask, 1, 5, 7)
    out, lse, _ = with_kernel(inputs, plan_of("to_varlen"), padded_lse=True)
    check(inputs, mask, out, lse)


def test_a_mask_without_lengths_is_an_error_of_the_decision():
    mask = masks.KeyPadding(keep=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="to_varlen requires documents or key padding given by lengths"):
        flash.run(inputs_of(mask, 2, 5, 5), plan_of("to_varlen"))
