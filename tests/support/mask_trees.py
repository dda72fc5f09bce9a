"""Random masks of every kind, with their sizes: what the property tests of lowering share."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from attnroute.masks import Causal, Dense, Documents, Function, KeyPadding, PrefixLM, Window
from attnroute.masks.lowered.form import Extent

ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])


def extents():
    """Draw small sizes: odd lengths, more queries than keys and the reverse, one query, batch 2 and more."""
    lengths = st.sampled_from([1, 2, 5, 8, 13, 17])
    return st.builds(
        Extent, st.integers(1, 3), st.sampled_from([1, 2, 4]), lengths, lengths, st.just(torch.device("cpu"))
    )


def _bools(draw, *shape):
    return torch.tensor([draw(st.booleans()) for _ in range(torch.Size(shape).numel())]).reshape(shape)


def _counts(draw, extent, most):
    counts = [draw(st.integers(0, most)) for _ in range(extent.batch)]
    return torch.tensor(counts) if draw(st.booleans()) else counts


def _function(draw, extent):
    table = torch.tensor([draw(st.integers(-3, 3)) for _ in range(extent.batch * extent.num_heads_q)])
    table = table.reshape(extent.batch, extent.num_heads_q)
    return Function(lambda b, h, i, j: (i - j) % 3 != table[b, h])


def _dense(draw, extent):
    full = (extent.batch, extent.num_heads_q, extent.seqlen_q, extent.seqlen_kv)
    shape = [n if draw(st.booleans()) else 1 for n in full]
    return Dense(_bools(draw, *shape))


def _documents(draw, extent):
    ids = [draw(st.integers(0, 2)) for _ in range(extent.seqlen_q)]
    return Documents(ids=torch.tensor(ids))


@st.composite
def leaves(draw, extent):
    """Draw one node."""
    kinds = ["causal", "window", "right", "left", "keep", "prefix", "dense", "function"]
    kinds += ["documents"] if extent.seqlen_q == extent.seqlen_kv else []
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return Causal(draw(ALIGNMENTS))
    if kind == "window":
        side = st.one_of(st.none(), st.integers(0, 6))
        return Window(draw(side), draw(side), draw(ALIGNMENTS))
    if kind == "prefix":
        return PrefixLM(_counts(draw, extent, extent.seqlen_kv), draw(ALIGNMENTS))
    if kind == "keep":
        return KeyPadding(keep=_bools(draw, extent.batch, extent.seqlen_kv))
    if kind in ("right", "left"):
        counts = _counts(draw, extent, extent.seqlen_kv)
        return KeyPadding(lengths=counts) if kind == "right" else KeyPadding(left=counts)
    return {"dense": _dense, "function": _function, "documents": _documents}[kind](draw, extent)


def _combined(children):
    pairs = st.tuples(children, children)
    return st.one_of(
        pairs.map(lambda p: p[0] & p[1]), pairs.map(lambda p: p[0] | p[1]), children.map(lambda m: ~m)
    )


@st.composite
def masks(draw):
    """Draw (mask, extent): a tree of nodes with `&`, `|` and `~`."""
    extent = draw(extents())
    tree = st.recursive(leaves(extent), _combined, max_leaves=5)
    return draw(tree), extent


def written_out(mask, extent):
    batch, heads, seqlen_q, seqlen_kv, _ = extent
    full = mask.materialize(seqlen_q, seqlen_kv, batch=batch, num_heads_q=heads)
    return full.expand(batch, heads, seqlen_q, seqlen_kv)


def by_block(full, block, reduce):
    rows = [
        [getattr(cell.flatten(2), reduce)(-1) for cell in row.split(block[1], 3)]
        for row in full.split(block[0], 2)
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)
