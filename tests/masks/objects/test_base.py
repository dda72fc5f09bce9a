"""Combined masks: what `&`, `|` and `~` allow, the laws they obey, and what kernels get to see of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mask_objects import HEADS, KINDS, combined, simple

from attnroute import masks
from attnroute.errors import ArgumentError
from attnroute.masks.lowered.dense import build
from attnroute.masks.lowered.form import FULL, Extent, LoweredMask, open_band
from attnroute.question.nodes import (
    AnyNode,
    CausalNode,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
)
from attnroute.question.normalize import conjunction

LENGTHS = st.integers(0, 5)
SIZES = st.tuples(st.integers(1, 2), LENGTHS, LENGTHS) | st.tuples(
    st.integers(1, 2), st.shared(LENGTHS, key="same"), st.shared(LENGTHS, key="same")
)


def values(mask, sizes):
    """Return a mask as a bool tensor (batch, HEADS, seqlen_q, seqlen_kv)."""
    batch, seqlen_q, seqlen_kv = sizes
    got = mask.materialize(seqlen_q, seqlen_kv, batch=batch, num_heads_q=HEADS)
    assert got.dtype == torch.bool
    assert got.shape in {(b, h, seqlen_q, seqlen_kv) for b in (1, batch) for h in (1, HEADS)}
    return got.expand(batch, HEADS, seqlen_q, seqlen_kv)


@given(st.data(), SIZES)
def test_every_node_allows_what_its_definition_says(data, sizes):
    mask, wanted = data.draw(simple(*sizes))
    assert torch.equal(values(mask, sizes), wanted)


@given(st.data(), SIZES)
def test_combinations_allow_what_their_parts_say_together(data, sizes):
    mask, wanted = data.draw(combined(*sizes))
    assert torch.equal(values(mask, sizes), wanted)


@settings(max_examples=40)
@given(st.data(), SIZES)
def test_laws(data, sizes):
    one, other, third = (data.draw(combined(*sizes, depth=1))[0] for _ in range(3))

    def same(left, right):
        return torch.equal(values(left, sizes), values(right, sizes))

    assert same(~(one & other), ~one | ~other)
    assert same(~(one | other), ~one & ~other)
    assert same(one & other, other & one)
    assert same(one | other, other | one)
    assert same(one & (other | third), (one & other) | (one & third))
    assert same(one | (other & third), (one | other) & (one | third))
    assert same((one & other) & third, one & (other & third))
    assert same((one | other) | third, one | (other | third))
    assert same(one & one, one)
    assert same(one | (one & other), one)
    assert values(one | ~one, sizes).all()
    assert not values(one & ~one, sizes).any()


@given(st.data(), SIZES)
def test_two_negations_undo_each_other(data, sizes):
    mask, wanted = data.draw(combined(*sizes))
    assert ~~(~mask) == ~mask
    assert torch.equal(values(masks.Not(masks.Not(mask)), sizes), wanted)


def test_a_negation_of_a_negation_is_the_mask_itself():
    mask = masks.Causal() & masks.Window(3)
    assert ~~mask is mask


@given(st.data(), SIZES)
def test_kernels_get_no_more_than_the_decision_was_told(data, sizes):
    """A kernel that was chosen because a part is not said would take what is lowered for the whole mask."""
    mask, wanted = data.draw(combined(*sizes))
    batch, seqlen_q, seqlen_kv = sizes
    extent = Extent(batch, HEADS, seqlen_q, seqlen_kv)
    said = conjunction(mask.describe(extent), extent.sizes)
    lowered = open_band(mask.lower(FULL, extent), extent)
    parts = {
        "band": (CausalNode | WindowNode, {"band_lo": None, "band_hi": None}),
        "keys": (KeyPaddingNode, {"key_keep": None, "key_counts": None, "padding_side": None}),
        "documents": (DocumentsNode, {"document_ids_q": None, "document_ids_kv": None, "cu_seqlens": None}),
        "dense": (DenseNode, {"dense": None}),
        "functions": (FunctionNode, {"functions": (), "sparse": ()}),
        "disjunctions": (AnyNode | PrefixNode | DocumentsNode, {"either": ()}),
        "negations": (NotNode, {"exclude": ()}),
    }
    for kind, nothing in parts.values():
        if not any(isinstance(node, kind) for node in said):
            assert replace(lowered, **nothing) == lowered
    if len([n for n in said if isinstance(n, DocumentsNode)]) < 2 and not any(
        isinstance(node, AnyNode | PrefixNode) for node in said
    ):
        assert lowered.either == ()
    full = (batch, HEADS, seqlen_q, seqlen_kv)
    assert torch.equal(build(lowered, extent).expand(full), wanted)


@given(st.data(), SIZES)
def test_what_is_lowered_into_stays(data, sizes):
    first, wanted_first = data.draw(combined(*sizes, depth=1))
    second, wanted_second = data.draw(combined(*sizes, depth=1))
    batch, seqlen_q, seqlen_kv = sizes
    extent = Extent(batch, HEADS, seqlen_q, seqlen_kv)
    lowered = second.lower(first.lower(FULL, extent), extent)
    got = build(lowered, extent).expand(batch, HEADS, seqlen_q, seqlen_kv)
    assert torch.equal(got, wanted_first & wanted_second)


@given(st.data(), st.integers(1, 6))
def test_a_second_set_of_documents_is_a_disjunction_of_one(data, seqlen):
    ids = [
        torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=seqlen, max_size=seqlen))) for _ in "ab"
    ]
    extent = Extent(1, 1, seqlen, seqlen)
    both = masks.Documents(ids=ids[0]) & masks.Causal() & masks.Documents(ids=ids[1])
    lowered = both.lower(FULL, extent)
    assert torch.equal(lowered.document_ids_q[0], ids[0].to(lowered.document_ids_q))
    ((alternative,),) = lowered.either
    assert torch.equal(alternative.document_ids_q[0], ids[1].to(alternative.document_ids_q))
    same = [row[:, None] == row[None] for row in ids]
    got = both.materialize(seqlen, seqlen)[0, 0]
    assert torch.equal(got, same[0] & same[1] & torch.ones(seqlen, seqlen).tril().bool())


@pytest.mark.parametrize(
    "again",
    [masks.Documents(lengths=[2, 3]), masks.Documents(lengths=[2, 0, 3])],
    ids=["equal", "with an empty document"],
)
def test_the_same_documents_twice_are_lowered_once(again):
    extent = Extent(1, 1, 5, 5)
    assert (masks.Documents(lengths=[2, 3]) & again).lower(FULL, extent).either == ()
    ids = masks.Documents(ids=torch.tensor([0, 0, 1, 1, 1]))
    assert (ids & ids).lower(FULL, extent).either == ()


def test_a_disjunction_of_disjunctions_is_flat():
    one, other, third = masks.Causal(), masks.Window(1), masks.Window(2)
    assert ((one | other) | third).parts == (one | (other | third)).parts == (one, other, third)


@pytest.mark.parametrize("make", [masks.All, masks.Either], ids=["All", "Either"])
def test_only_masks_are_combined(make):
    name = make.__name__
    for parts in ((masks.Causal(), True), [masks.Causal()], masks.Causal()):
        with pytest.raises(
            ArgumentError, match=rf"^mask {name} requires a tuple of masks; got .*; combine masks"
        ):
            make(parts)
    with pytest.raises(ArgumentError, match=r"^mask Not requires a tuple of masks; got \['bool'\]"):
        masks.Not(True)
    for combine in ("__and__", "__or__"):
        assert getattr(masks.Causal(), combine)(True) is NotImplemented


def test_parts_are_checked_inside_combinations():
    padding = masks.KeyPadding(lengths=[1, 2])
    for mask in (masks.Causal() & padding, masks.Causal() | padding, ~padding, ~(masks.Causal() | ~padding)):
        with pytest.raises(ArgumentError, match="one entry per batch row"):
            mask.materialize(4, 4, batch=3)


@given(st.data(), SIZES)
def test_equal_keys_have_equal_descriptions(data, sizes):
    kind = (data.draw(st.sampled_from(KINDS)),)
    (one, _), (other, _) = (data.draw(simple(*sizes, kind)) for _ in range(2))
    batch, seqlen_q, seqlen_kv = sizes
    extent = Extent(batch, HEADS, seqlen_q, seqlen_kv)
    for first, second in (
        (one, other),
        (~one, ~other),
        (one & other, other & one),
        (one | other, other | one),
    ):
        if first.key() == second.key():
            assert first.describe(extent) == second.describe(extent)
        assert hash(first.key()) == hash(first.key())


def test_keys_tell_combinations_apart():
    causal, window = masks.Causal(), masks.Window(1)
    each = [causal & window, causal | window, ~causal, ~(causal & window), ~(causal | window), ~window]
    each += [masks.All((causal,)), masks.Either((causal,)), masks.PrefixLM([1]), masks.PrefixLM([2])]
    each += [masks.PrefixLM([1], "bottom_right"), masks.PrefixLM(torch.tensor([1]))]
    each += [masks.Function(print), masks.Function(print, per_head=False)]
    assert len({mask.key() for mask in each}) == len(each)


def test_combinations_list_the_tensors_of_their_parts():
    flags, ids = torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    mask = masks.Causal() | ~(masks.Dense(flags) & masks.Documents(position_ids=ids))
    assert [t is wanted for t, wanted in zip(mask.tensors, (flags, ids), strict=True)] == [True, True]


def test_nobody_is_lowered_as_the_negation_of_everything():
    extent = Extent(1, 1, 3, 3)
    for mask in (masks.Either(()), masks.Either((masks.KeyPadding(lengths=[0]),)), ~masks.All(())):
        assert mask.lower(FULL, extent) == LoweredMask(exclude=(FULL,))
        assert not mask.materialize(3, 3).any()


def test_conjunctions_of_conjunctions_have_flat_parts():
    inner = masks.Causal() & masks.Window(3)
    outer = masks.All((inner, masks.KeyPadding(lengths=[2])))
    assert outer.nodes == (*inner.nodes, *outer.parts[1].nodes)
    assert ((inner & inner) & masks.Causal()).nodes == (*inner.nodes, *inner.nodes, masks.Causal())


def test_a_mask_is_combined_with_masks_only():
    with pytest.raises(TypeError):
        masks.Causal() & True


def test_descriptions():
    extent = Extent(2, 4, 6, 6)
    lengths, ids = torch.tensor([3, 4]), torch.zeros(6, dtype=torch.int64)
    cu_seqlens, flags = torch.tensor([0, 2, 6]), torch.ones(2, 6, dtype=torch.bool)
    said = [
        (masks.Causal("bottom_right"), CausalNode(alignment="bottom_right")),
        (masks.Window(3, None), WindowNode(left=3)),
        (masks.Documents(lengths=[2, 4]), DocumentsNode(lengths=(2, 4))),
        (masks.Documents(cu_seqlens=cu_seqlens), DocumentsNode(count=2)),
        (masks.Documents(ids=ids), DocumentsNode(contiguous=False)),
        (masks.Documents(position_ids=ids), DocumentsNode()),
        (masks.PrefixLM([3, 4]), PrefixNode(lengths=(3, 4))),
        (masks.PrefixLM(lengths, "bottom_right"), PrefixNode(alignment="bottom_right")),
        (masks.Function(print, per_head=False), FunctionNode(per_head=False)),
        (~masks.Causal(), NotNode(part=(CausalNode(),))),
        (
            masks.Causal() & masks.Window(1) | masks.All(()),
            AnyNode(parts=((CausalNode(), WindowNode(left=1, right=0)), ())),
        ),
        (masks.KeyPadding(lengths=[3, 4]), KeyPaddingNode(lengths=(3, 4))),
        (masks.KeyPadding(lengths=lengths), KeyPaddingNode()),
        (masks.KeyPadding(left=[3, 4]), KeyPaddingNode(lengths=(3, 2), side="left")),
        (masks.KeyPadding(left=lengths), KeyPaddingNode(side="left")),
        (masks.KeyPadding(keep=flags), KeyPaddingNode(side="any")),
        (masks.Dense(flags), DenseNode(shape=(2, 6), aligned=False)),
    ]
    for mask, node in said:
        assert mask.describe(extent) == (node,)
    whole = masks.All(tuple(mask for mask, _ in said))
    assert whole.describe(extent) == tuple(node for _, node in said)


def test_keys_are_equal_only_where_descriptions_are():
    ones, flags = torch.tensor([1]), torch.ones(1, 1, dtype=torch.bool)
    each = [
        masks.KeyPadding(lengths=[1]),
        masks.KeyPadding(lengths=[0]),
        masks.KeyPadding(lengths=ones),
        masks.KeyPadding(left=[1]),
        masks.KeyPadding(left=ones),
        masks.KeyPadding(keep=flags),
        masks.Documents(lengths=[1]),
        masks.Documents(ids=ones),
        masks.Documents(cu_seqlens=torch.tensor([0, 1])),
        masks.Documents(position_ids=ones),
        masks.Causal(),
        masks.Causal("bottom_right"),
        masks.Window(0),
        masks.Dense(flags),
    ]
    assert len({mask.key() for mask in each}) == len(each)
    assert masks.KeyPadding(lengths=torch.tensor([5])).key() == masks.KeyPadding(lengths=ones).key()
    assert masks.Documents(lengths=[1]).key() == each[6].key()


def test_a_band_is_the_narrowest_of_its_parts():
    extent = Extent(1, 1, 4, 6)
    lowered = (masks.Window(5, 3, "bottom_right") & masks.Causal() & masks.Window(2, None)).lower(
        FULL, extent
    )
    assert (lowered.band_lo, lowered.band_hi) == (-2, 0)
    assert lowered.is_band_only
    assert not lowered.is_full


def test_mask_objects_load_no_torch():
    code = "import sys; from attnroute.masks import *; Causal() & Window(3); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
