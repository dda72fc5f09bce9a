"""Arbitrary mask objects, each with what it allows: written down from its docstring, one pair at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st

from attnroute import masks

HEADS = 2
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])
BESIDE = st.none() | st.integers(0, 7)
KINDS = ("causal", "window", "prefix", "padding", "dense", "function")


def table(batch, seqlen_q, seqlen_kv, allows):
    """Return the bool tensor (batch, HEADS, seqlen_q, seqlen_kv) of a predicate over Python ints."""
    pairs = [
        [
            [[bool(allows(b, h, i, j)) for j in range(seqlen_kv)] for i in range(seqlen_q)]
            for h in range(HEADS)
        ]
        for b in range(batch)
    ]
    return torch.tensor(pairs, dtype=torch.bool).reshape(batch, HEADS, seqlen_q, seqlen_kv)


@st.composite
def simple(draw, batch, seqlen_q, seqlen_kv, kinds=KINDS):
    """Draw one node and its table; documents where there are as many queries as keys."""
    kinds = (*kinds, "documents") if kinds == KINDS and seqlen_q == seqlen_kv else kinds
    make = _MAKERS[draw(st.sampled_from(kinds))]
    mask, allows = make(draw, batch, seqlen_q, seqlen_kv)
    return mask, table(batch, seqlen_q, seqlen_kv, allows)


@st.composite
def combined(draw, batch, seqlen_q, seqlen_kv, depth=2):
    """Draw a node or a combination, and its table: the combinations of the tables of its parts."""
    if depth == 0 or draw(st.booleans()):
        return draw(simple(batch, seqlen_q, seqlen_kv))
    inner = combined(batch, seqlen_q, seqlen_kv, depth - 1)
    (one, first), (other, second) = draw(inner), draw(inner)
    kind = draw(st.sampled_from(["and", "or", "not", "all of one", "either of one", "nothing", "everything"]))
    full = torch.ones_like(first)
    return {
        "and": lambda: (one & other, first & second),
        "or": lambda: (one | other, first | second),
        "not": lambda: (~one, ~first),
        "all of one": lambda: (masks.All((one,)), first),
        "either of one": lambda: (masks.Either((one,)), first),
        "nothing": lambda: (masks.Either(()), ~full),
        "everything": lambda: (masks.All(()), full),
    }[kind]()


def _offset(alignment, seqlen_q, seqlen_kv):
    return seqlen_kv - seqlen_q if alignment == "bottom_right" else 0


def _causal(draw, _batch, seqlen_q, seqlen_kv):
    alignment = draw(ALIGNMENTS)
    offset = _offset(alignment, seqlen_q, seqlen_kv)
    return masks.Causal(alignment), lambda _b, _h, i, j: j <= i + offset


def _window(draw, _batch, seqlen_q, seqlen_kv):
    left, right, alignment = draw(BESIDE), draw(BESIDE), draw(ALIGNMENTS)
    offset = _offset(alignment, seqlen_q, seqlen_kv)

    def allows(b, h, i, j):
        too_early = left is not None and j < i + offset - left
        too_late = right is not None and j > i + offset + right
        return not (too_early or too_late)

    return masks.Window(left, right, alignment), allows


def _prefix(draw, batch, seqlen_q, seqlen_kv):
    counts = draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch))
    alignment = draw(ALIGNMENTS)
    offset = _offset(alignment, seqlen_q, seqlen_kv)
    given = torch.tensor(counts) if draw(st.booleans()) else counts
    return masks.PrefixLM(given, alignment), lambda b, _h, i, j: j < counts[b] or j <= i + offset


def _padding(draw, batch, _seqlen_q, seqlen_kv):
    counts = draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch))
    flags = torch.arange(seqlen_kv) < torch.tensor(counts)[:, None]
    form = draw(st.sampled_from(["lengths", "tensor", "keep", "left", "left tensor"]))
    mask = {
        "lengths": lambda: masks.KeyPadding(lengths=counts),
        "tensor": lambda: masks.KeyPadding(lengths=torch.tensor(counts)),
        "keep": lambda: masks.KeyPadding(keep=flags),
        "left": lambda: masks.KeyPadding(left=counts),
        "left tensor": lambda: masks.KeyPadding(left=torch.tensor(counts, dtype=torch.int32)),
    }[form]()
    on_the_left = form.startswith("left")
    return mask, lambda b, _h, _i, j: j >= counts[b] if on_the_left else j < counts[b]


def _documents(draw, batch, _seqlen_q, seqlen):
    cuts = sorted(draw(st.lists(st.integers(0, seqlen), max_size=3)))
    sums = [0, *cuts, seqlen]
    lengths = [stop - start for start, stop in pairwise(sums)]
    ids = [n for n, length in enumerate(lengths) for _ in range(length)]
    positions = torch.tensor([n for length in lengths for n in range(length)], dtype=torch.int32)
    form = draw(
        st.sampled_from(["lengths", "ids", "rows of ids", "cu_seqlens", "positions", "expanded", "rows"])
    )
    mask = {
        "lengths": lambda: masks.Documents(lengths=lengths),
        "ids": lambda: masks.Documents(ids=torch.tensor(ids, dtype=torch.int64)),
        "rows of ids": lambda: masks.Documents(ids=torch.tensor([ids] * batch, dtype=torch.int64)),
        "cu_seqlens": lambda: masks.Documents(cu_seqlens=torch.tensor(sums, dtype=torch.int32)),
        "positions": lambda: masks.Documents(position_ids=positions),
        "expanded": lambda: masks.Documents(position_ids=positions.expand(batch, -1)),
        "rows": lambda: masks.Documents(position_ids=positions.repeat(batch, 1)),
    }[form]()
    return mask, lambda _b, _h, i, j: ids[i] == ids[j]


def _dense(draw, batch, seqlen_q, seqlen_kv):
    full = (batch, HEADS, seqlen_q, seqlen_kv)
    shape = [draw(st.sampled_from([1, size])) for size in full][draw(st.sampled_from([0, 2, 3, 4])) :]
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.5
    values = tensor.expand(full).tolist()
    return masks.Dense(tensor), lambda b, h, i, j: values[b][h][i][j]


def _function(draw, _batch, seqlen_q, seqlen_kv):
    marks = torch.arange(max(seqlen_q, seqlen_kv, 1)) // 2
    functions = {
        "both indices": (lambda b, h, i, j: (i * 3 + j * 5 + b + 2 * h) % 4 > 0, True, True),
        "no head": (lambda b, _h, i, j: (i + j + b) % 2 == 0, True, False),
        "no batch": (lambda _b, h, i, j: j >= i + h, False, True),
        "neither": (lambda _b, _h, i, j: j <= i + 1, False, False),
        "tensor": (lambda _b, _h, i, j: marks[i] == marks[j], False, False),
    }
    mask_mod, per_batch, per_head = functions[draw(st.sampled_from(sorted(functions)))]
    return masks.Function(mask_mod, per_batch, per_head), mask_mod


_MAKERS = {
    "causal": _causal,
    "window": _window,
    "prefix": _prefix,
    "padding": _padding,
    "documents": _documents,
    "dense": _dense,
    "function": _function,
}
