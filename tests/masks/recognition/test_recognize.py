"""Recognition of dense masks: what is found is what the tensor says, and every named kind is found."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnroute.masks import All, Causal, Documents, KeyPadding, PrefixLM, Window
from attnroute.masks.lowered.form import Extent
from attnroute.masks.recognition import summary
from attnroute.masks.recognition.recognize import Rows, recognize
from attnroute.question.nodes import CausalNode, DocumentsNode, KeyPaddingNode, PrefixNode, WindowNode

FORMS = ("2-D", "4-D", "batch", "heads", "expanded", "transposed", "sliced")


def said_by(parts, batch, seqlen_q, seqlen_kv):
    """Return what mask objects say together, one full matrix per batch row."""
    full = torch.ones(batch, 1, seqlen_q, seqlen_kv, dtype=torch.bool)
    return full & All(parts).materialize(seqlen_q, seqlen_kv, batch=batch) if parts else full


def formed(mask, form):
    """Return the same mask in another shape or memory; "2-D" only where all batch rows agree."""
    batch, _, seqlen_q, seqlen_kv = mask.shape
    if form == "2-D" and (mask == mask[:1]).all():
        return mask[0, 0].clone()
    if form == "heads":
        return mask.repeat(1, 3, 1, 1)
    if form == "expanded":
        return mask.expand(batch, 3, seqlen_q, seqlen_kv)
    if form == "transposed":
        return mask.mT.contiguous().mT
    if form == "sliced":
        return torch.cat([mask, ~mask], -1)[..., :seqlen_kv]
    return mask


def looked(mask, batch):
    """Look, whatever the size."""
    return summary._inspect(mask, Extent(batch, 3, mask.shape[-2], mask.shape[-1]))


def check(mask, batch):
    """What is found says the same as the tensor, if something is; return it."""
    seen = looked(mask, batch)
    assert seen.empty_rows == ("none" if mask.any(-1).all() else "some")
    if seen.masks is None:
        assert seen.recognized is None
        return None
    seqlen_q, seqlen_kv = mask.shape[-2:]
    assert torch.equal(*torch.broadcast_tensors(said_by(seen.masks, batch, seqlen_q, seqlen_kv), mask))
    extent = Extent(batch, 3, seqlen_q, seqlen_kv)
    assert seen.recognized == tuple(node for part in seen.masks for node in part.describe(extent))
    return seen.masks


SIZES = st.integers(1, 9)
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])


@st.composite
def structured(draw):
    """Draw parts that a conjunction may have and the sizes that they are read at."""
    batch, seqlen_kv = draw(st.integers(1, 3)), draw(SIZES)
    seqlen_q = draw(st.just(seqlen_kv) | SIZES)
    counts = st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch)
    side = st.none() | st.integers(0, 3)
    bands = [
        st.just(()),
        st.builds(lambda a: (Causal(a),), ALIGNMENTS),
        st.builds(lambda left, right, a: (Window(left, right, a),), side, side, ALIGNMENTS),
        st.builds(lambda lengths, a: (PrefixLM(lengths, a),), counts, ALIGNMENTS),
    ]
    parts = draw(st.one_of(bands))
    if seqlen_q == seqlen_kv and not isinstance(next(iter(parts), None), PrefixLM):
        parts += draw(st.just(()) | documents(batch, seqlen_q))
    paddings = [
        st.just(()),
        st.builds(lambda lengths: (KeyPadding(lengths=lengths),), counts),
        st.builds(lambda left: (KeyPadding(left=left),), counts),
        st.builds(lambda a, b: (KeyPadding(left=a), KeyPadding(lengths=b)), counts, counts),
    ]
    return parts + draw(st.one_of(paddings)), batch, seqlen_q, seqlen_kv


@st.composite
def documents(draw, batch, seqlen):
    """Draw documents that lie side by side: lengths, or ids that differ between batch rows."""
    starts = st.lists(st.booleans(), min_size=seqlen, max_size=seqlen)
    if draw(st.booleans()):
        at = [0, *(i for i, start in enumerate(draw(starts)) if start and i), seqlen]
        return (Documents(lengths=tuple(b - a for a, b in pairwise(at))),)
    return (Documents(ids=torch.tensor([draw(starts) for _ in range(batch)]).cumsum(1)),)


def shows_its_band(parts, seqlen_q, seqlen_kv):
    """Whether a window's edges show in some row: in a sliver, only rows without a key would tell them."""
    return min(seqlen_q, seqlen_kv) > 6 or not any(isinstance(part, Window) for part in parts)


@given(structured(), st.sampled_from(FORMS))
@settings(max_examples=150)
def test_structured_masks_are_recognised_bit_for_bit(drawn, form):
    parts, batch, seqlen_q, seqlen_kv = drawn
    mask = formed(said_by(parts, batch, seqlen_q, seqlen_kv), form)
    found = check(mask, batch)
    if seqlen_q == seqlen_kv and shows_its_band(parts, seqlen_q, seqlen_kv):
        assert found is not None
    if not any(isinstance(part, Window) for part in parts):
        assert found is not None


@given(structured(), st.data())
@settings(max_examples=100)
def test_with_one_element_flipped_nothing_wrong_is_recognised(drawn, data):
    parts, batch, seqlen_q, seqlen_kv = drawn
    mask = said_by(parts, batch, seqlen_q, seqlen_kv)
    mask = formed(mask, data.draw(st.sampled_from(["2-D", "4-D", "heads"]))).clone()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in mask.shape)
    mask[place] = ~mask[place]
    check(mask, batch)


@given(st.integers(1, 3), SIZES, SIZES, st.data())
def test_rows_of_runs_that_are_nothing_else_are_not_recognised_wrongly(batch, seqlen_q, seqlen_kv, data):
    ends = st.tuples(st.integers(0, seqlen_kv), st.integers(0, seqlen_kv)).map(sorted)
    mask = torch.zeros(batch, 1, seqlen_q, seqlen_kv, dtype=torch.bool)
    for b in range(batch):
        for i in range(seqlen_q):
            start, stop = data.draw(ends)
            mask[b, 0, i, start:stop] = True
    check(mask, batch)


N = 300
SQUARE, LONG, TALL = (N, N), (N, 400), (400, N)
PACKED = DocumentsNode(lengths=(100, 50, 150))
CAUSAL, CORNER = CausalNode(), CausalNode(alignment="bottom_right")
IDS = torch.arange(N) // torch.tensor([[70], [90]])
NAMED = {
    "full": ((), SQUARE, ()),
    "full, oblong": ((), LONG, ()),
    "nothing": ((KeyPadding(lengths=(0, 0)),), SQUARE, (KeyPaddingNode(lengths=(0, 0)),)),
    "causal": ((Causal(),), SQUARE, (CAUSAL,)),
    "causal, top left": ((Causal(),), LONG, (CAUSAL,)),
    "causal, bottom right": ((Causal("bottom_right"),), LONG, (CORNER,)),
    "causal, rows without a key": ((Causal("bottom_right"),), TALL, (CORNER,)),
    "causal, more queries": ((Causal(),), TALL, (CAUSAL,)),
    "window": ((Window(20, 0),), SQUARE, (WindowNode(left=20, right=0),)),
    "window, both sides": ((Window(20, 30),), SQUARE, (WindowNode(left=20, right=30),)),
    "window, left open": ((Window(None, 30),), SQUARE, (WindowNode(left=None, right=30),)),
    "window, right open": ((Window(20, None),), SQUARE, (WindowNode(left=20, right=None),)),
    "window, itself": ((Window(0, 0),), SQUARE, (WindowNode(left=0, right=0),)),
    "window, top left": ((Window(20, 0),), LONG, (WindowNode(left=20, right=0),)),
    "window, bottom right": (
        (Window(20, 20, "bottom_right"),),
        LONG,
        (WindowNode(left=20, right=20, alignment="bottom_right"),),
    ),
    "padding, right": ((KeyPadding(lengths=(N, 70)),), SQUARE, (KeyPaddingNode(lengths=(N, 70)),)),
    "padding, left": (
        (KeyPadding(left=(0, 70)),),
        SQUARE,
        (KeyPaddingNode(lengths=(N, N - 70), side="left"),),
    ),
    "padding, both sides": (
        (KeyPadding(left=(0, 70)), KeyPadding(lengths=(200, N))),
        LONG,
        (KeyPaddingNode(lengths=(400, 330), side="left"), KeyPaddingNode(lengths=(200, N))),
    ),
    "padding, one sequence empty": (
        (KeyPadding(lengths=(0, 70)),),
        LONG,
        (KeyPaddingNode(lengths=(0, 70)),),
    ),
    "prefix": ((PrefixLM((40, 70)),), SQUARE, (PrefixNode(lengths=(40, 70)),)),
    "prefix, bottom right": (
        (PrefixLM((140, 170), "bottom_right"),),
        LONG,
        (PrefixNode(lengths=(140, 170), alignment="bottom_right"),),
    ),
    "prefix & padding": (
        (PrefixLM((40, 70)), KeyPadding(lengths=(N, 250))),
        SQUARE,
        (PrefixNode(lengths=(40, 70)), KeyPaddingNode(lengths=(N, 250))),
    ),
    "documents": ((Documents(lengths=PACKED.lengths),), SQUARE, (PACKED,)),
    "documents per row": ((Documents(ids=IDS),), SQUARE, (DocumentsNode(contiguous=False),)),
    "causal & documents": ((Causal(), Documents(lengths=PACKED.lengths)), SQUARE, (CAUSAL, PACKED)),
    "causal & documents per row": (
        (Causal(), Documents(ids=IDS)),
        SQUARE,
        (CAUSAL, DocumentsNode(contiguous=False)),
    ),
    "window & documents": (
        (Window(9, 0), Documents(lengths=PACKED.lengths)),
        SQUARE,
        (WindowNode(left=9, right=0), PACKED),
    ),
    "causal & padding, right": (
        (Causal(), KeyPadding(lengths=(N, 70))),
        SQUARE,
        (CAUSAL, KeyPaddingNode(lengths=(N, 70))),
    ),
    "causal & padding, left": (
        (Causal(), KeyPadding(left=(0, 70))),
        SQUARE,
        (CAUSAL, KeyPaddingNode(lengths=(N, N - 70), side="left")),
    ),
    "causal, bottom right & padding, left": (
        (Causal("bottom_right"), KeyPadding(left=(0, 170))),
        LONG,
        (CORNER, KeyPaddingNode(lengths=(400, 230), side="left")),
    ),
    "window & padding, right": (
        (Window(20, 0), KeyPadding(lengths=(N, 70))),
        SQUARE,
        (WindowNode(left=20, right=0), KeyPaddingNode(lengths=(N, 70))),
    ),
    "window & padding, left": (
        (Window(20, 0, "bottom_right"), KeyPadding(left=(90, 170))),
        LONG,
        (
            WindowNode(left=20, right=0, alignment="bottom_right"),
            KeyPaddingNode(lengths=(310, 230), side="left"),
        ),
    ),
    "causal & documents & padding": (
        (Causal(), Documents(lengths=PACKED.lengths), KeyPadding(lengths=(280, N))),
        SQUARE,
        (CAUSAL, PACKED, KeyPaddingNode(lengths=(280, N))),
    ),
    "one query, window": (
        (Window(70, 0, "bottom_right"),),
        (1, N),
        (WindowNode(left=70, right=None, alignment="bottom_right"),),
    ),
    "one query, padding": ((KeyPadding(lengths=(70, N)),), (1, N), (KeyPaddingNode(lengths=(70, N)),)),
}


@pytest.mark.parametrize("name", NAMED)
def test_every_kind_is_recognised_as_what_it_is(name):
    parts, (seqlen_q, seqlen_kv), nodes = NAMED[name]
    mask = said_by(parts, 2, seqlen_q, seqlen_kv)
    assert check(mask, 2) is not None
    assert looked(mask, 2).recognized == nodes


def test_padding_with_queries_of_its_own_is_a_document_beside_padding():
    """As masks are where the padding of packed documents neither attends nor is attended to."""
    real = torch.arange(N) < torch.tensor([[N], [220]])
    mask = said_by((Causal(), Documents(lengths=PACKED.lengths)), 2, N, N)
    mask = mask & real[:, None, :, None] & real[:, None, None, :]
    check(mask, 2)
    assert looked(mask, 2).recognized == (
        CAUSAL,
        DocumentsNode(contiguous=False),
        KeyPaddingNode(lengths=(N, 220)),
    )
    assert looked(mask[1:], 1).recognized == (
        CAUSAL,
        DocumentsNode(lengths=(100, 50, 70, 80)),
        KeyPaddingNode(lengths=(220,)),
    )


@pytest.mark.parametrize("shape", [(400,), (1, 400), (1, 1, 1, 400), (2, 1, 1, 400)])
def test_one_row_for_all_queries_is_padding(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., 30:200] = True
    extent = Extent(2, 3, N, 400)
    seen = summary._inspect(mask, extent)
    assert seen.recognized == (
        KeyPaddingNode(lengths=(370, 370), side="left"),
        KeyPaddingNode(lengths=(200, 200)),
    )
    assert torch.equal(*torch.broadcast_tensors(said_by(seen.masks, 2, N, 400), mask))


@pytest.mark.parametrize("seqlen_q", [1, N])
def test_one_row_that_is_expanded_along_queries_is_read_once(seqlen_q, monkeypatch):
    read = []
    monkeypatch.setattr(
        summary, "_read", lambda m, real=summary._read: read.append(tuple(m.shape)) or real(m)
    )
    mask = (torch.arange(400) < torch.tensor([[400], [200]]))[:, None, None].expand(2, 3, seqlen_q, 400)
    assert looked(mask, 2).recognized == (KeyPaddingNode(lengths=(400, 200)),)
    assert read == [(2, 1, 1, 400)]


def test_one_tensor_for_all_batch_rows_says_so_for_each():
    mask = said_by((Causal(), KeyPadding(left=(70,))), 1, N, N)
    assert looked(mask, 3).recognized == (CAUSAL, KeyPaddingNode(lengths=(230,) * 3, side="left"))


def test_heads_that_differ_are_not_recognised():
    mask = said_by((Causal(),), 2, N, N).repeat(1, 3, 1, 1)
    assert looked(mask, 2).recognized == (CAUSAL,)
    mask[1, 2] = True
    assert looked(mask, 2).recognized is None


@pytest.mark.parametrize("place", [(150, 20), (299, 0), (10, 200), (0, 299)])
def test_one_element_flipped_away_from_the_edge_is_not_recognised(place):
    for parts, (seqlen_q, seqlen_kv), _ in NAMED.values():
        if seqlen_q == seqlen_kv == N and parts != ():
            mask = said_by(parts, 2, N, N)
            mask[1, 0, *place] = ~mask[1, 0, *place]
            assert check(mask, 2) is None or place in {(299, 0), (0, 299)}


@pytest.mark.parametrize("row", [0, 150, 299])
def test_one_empty_row_is_seen(row):
    mask = torch.ones(2, 1, N, N, dtype=torch.bool)
    mask[1, 0, row] = False
    assert looked(mask, 2).empty_rows == "some"
    check(mask, 2)


def test_a_mask_of_no_batch_row_is_looked_at_without_harm():
    mask = torch.ones(1, 1, N, N, dtype=torch.bool).expand(0, 1, N, N)
    assert looked(mask, 0) == summary.MaskSummary("none", ())


def test_a_mask_read_in_several_pieces_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(summary, "_CHUNK", N * 7)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    assert looked(causal, 1).recognized == (CAUSAL,)
    causal[299, 150] = False
    assert looked(causal, 1).recognized is None


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 1016, 1023, 1024, 1025, 2049, 5000])
def test_rows_are_read_as_they_are(width):
    torch.manual_seed(width)
    mask = torch.rand(2, 3, 40, width) < torch.linspace(0, 1, 40)[:, None]
    mask[0, 0, 5], mask[1, 2, 7] = False, True
    first, count, runs = summary._read_rows(mask)
    starts = torch.cat([mask[..., :1], mask[..., 1:] & ~mask[..., :-1]], -1)
    assert torch.equal(first.long(), mask.long().argmax(-1))
    assert torch.equal(count.long(), mask.sum(-1))
    assert torch.equal(runs.long(), starts.sum(-1))


def test_bytes_that_are_neither_zero_nor_one_are_true():
    """As torch's own kernels read them; a view of bytes as bools is checked by nobody."""
    data = torch.ones(N, N, dtype=torch.uint8).tril()
    data[200, 100], data[0, 0] = 255, 2
    assert looked(data.view(torch.bool), 1).recognized == (CAUSAL,)


def test_rows_that_differ_between_sequences_can_share_a_band_only():
    first = torch.zeros(2, 4, dtype=torch.int32)
    last = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 3]], dtype=torch.int32)
    assert recognize(Rows(first[:1], last[:1], 1, 4, 4)) == (Causal(),)
    assert recognize(Rows(first[:1], last[1:], 1, 4, 4)) == (Window(None, 1),)
    assert recognize(Rows(first, last, 2, 4, 4)) is None
