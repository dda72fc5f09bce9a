"""What may be asked of `chunked`, drawn at random: masks, programs of masks, score features."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from attnroute.masks.lowered.form import LoweredMask, MaskFunction

CHANCE = st.integers(0, 2).map(lambda n: n == 0)


@st.composite
def masks(draw, batch, heads, seqlen_q, seqlen_kv, generator):
    """Draw a conjunction of any of the parts that a lowered mask can have."""
    parts = {}
    edge = st.sampled_from([0, seqlen_kv - seqlen_q]) | st.integers(-40, 40)
    if draw(CHANCE):
        parts["band_lo"] = draw(edge)
    if draw(st.booleans()):
        parts["band_hi"] = draw(edge)
    if draw(CHANCE):
        rows = draw(st.sampled_from([1, batch]))
        parts["key_keep"] = torch.rand(rows, seqlen_kv, generator=generator) < 0.7
    if draw(CHANCE):
        parts |= draw(documents(batch, seqlen_q, seqlen_kv, generator))
    if draw(CHANCE):
        shape = broadcast(draw, batch, heads, seqlen_q, seqlen_kv)
        parts["dense"] = torch.rand(shape, generator=generator) < 0.7
    return LoweredMask(**parts)


@st.composite
def documents(draw, batch, seqlen_q, seqlen_kv, generator):
    if seqlen_q == seqlen_kv and draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, seqlen_q), max_size=3))
        bounds = (0, *sorted(inner), seqlen_q)
        ids = torch.bucketize(torch.arange(seqlen_q), torch.tensor(bounds[1:]), right=True)[None]
        return {"document_ids_q": ids, "document_ids_kv": ids, "document_bounds": bounds}
    rows = draw(st.sampled_from([1, batch]))
    return {
        "document_ids_q": torch.randint(0, 3, (rows, seqlen_q), generator=generator),
        "document_ids_kv": torch.randint(0, 3, (rows, seqlen_kv), generator=generator),
    }


def broadcast(draw, *sizes):
    return tuple(draw(st.sampled_from([1, size])) for size in sizes)


@st.composite
def features(draw, dtype, batch, heads, seqlen_q, seqlen_kv, generator):
    """Draw keyword arguments: bias, softcap, sink, ALiBi, scale."""

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    chosen = {"scale": draw(st.sampled_from([None, None, 0.0, -0.6]))}
    if draw(CHANCE):
        shape = broadcast(draw, batch, heads, seqlen_q, seqlen_kv)[draw(st.integers(0, 2)) :]
        bias = normal(*shape).to(draw(st.sampled_from([dtype, torch.float64])))
        if draw(CHANCE):
            bias[torch.rand(shape, generator=generator) < 0.4] = float("-inf")
        chosen["bias"] = bias.requires_grad_(draw(st.booleans()))
    if draw(CHANCE):
        chosen["softcap"] = 1.5
    if draw(CHANCE):
        chosen["sink"] = normal(heads).requires_grad_()
    if draw(CHANCE):
        shape = draw(st.sampled_from([(heads,), (batch, heads)]))
        # In half precision the output's rounding, times every distance, can exceed a gradient that cancels.
        wants_grad = dtype in {torch.float32, torch.float64} and draw(st.booleans())
        chosen["alibi_slopes"] = normal(*shape).abs().requires_grad_(wants_grad)
    return chosen


@st.composite
def programs(draw, sizes, generator, depth=2):
    """Draw a mask with disjunctions, negations and functions, nested."""
    mask = draw(masks(*sizes, generator))
    deeper = programs(sizes, generator, depth - 1) if depth > 1 else masks(*sizes, generator)
    return replace(
        mask,
        either=tuple(
            tuple(parts) for parts in draw(st.lists(st.lists(deeper, min_size=1, max_size=3), max_size=2))
        ),
        exclude=tuple(draw(st.lists(deeper, max_size=1))),
        functions=tuple(draw(st.lists(functions(*sizes, generator), max_size=1))),
    )


@st.composite
def functions(draw, batch, heads, seqlen_q, seqlen_kv, generator):
    """Draw a predicate over positions, of which each may be read or not."""
    table = torch.rand(heads, seqlen_q + seqlen_kv, generator=generator) < 0.7
    ids_q = torch.randint(0, 3, (batch, seqlen_q), generator=generator)
    ids_kv = torch.randint(0, 3, (batch, seqlen_kv), generator=generator)
    choices = [
        MaskFunction(lambda _b, _h, i, j: j <= i + 2, per_batch=False, per_head=False),
        MaskFunction(lambda _b, h, i, j: i + 2 * h >= j, per_batch=False),
        MaskFunction(lambda b, _h, i, j: (i + 2 * j + b) % 3 != 0, per_head=False),
        MaskFunction(lambda _b, h, i, j: table[h, i - j + seqlen_kv]),
        MaskFunction(lambda b, _h, i, j: (ids_q[b, i] == ids_kv[b, j]) | (j == 0)),
        MaskFunction(lambda b, h, _i, _j: (b + h) % 2 == 0),
        MaskFunction(lambda _b, _h, _i, j: table[0, j]),
    ]
    return draw(st.sampled_from(choices))
