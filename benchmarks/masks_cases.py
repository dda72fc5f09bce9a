"""The cases of `masks_beside_stock.py`: masks and scores that stock reads as a tensor or cannot say."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from masks_common import DEVICE, Allowed, Case, Sizes, dense, draw
from torch import Tensor

from attnroute import biases, masks

HEADS = (32, 8)
"""Query and key/value heads of most cases."""


def causal(i: Tensor, j: Tensor) -> Tensor:
    """No key after the query."""
    return j <= i


def windowed(i: Tensor, j: Tensor, *, left: int) -> Tensor:
    """The query's own key and `left` keys before it."""
    return (j <= i) & (j >= i - left)


def packed(i: Tensor, j: Tensor, *, document: int) -> Tensor:
    """Causal within documents of one length."""
    return (j <= i) & (i // document == j // document)


def build(
    sizes: Sizes,
    length: int,
    ours: dict[str, Any],
    allowed: Allowed,
    *,
    train: bool,
    batch: int = 1,
    heads: tuple[int, int] = HEADS,
    head_dim: int = 128,
) -> Case:
    """Return a case on random inputs, for which stock gets a bool tensor."""
    (heads_q, heads_kv), width = sizes.heads(*heads), sizes.head_dim(head_dim)
    query, key, value = (draw(batch, n, length, width, train=train) for n in (heads_q, heads_kv, heads_kv))

    def stock() -> dict[str, Any]:
        return {"attn_mask": dense(allowed, length)}

    return Case((query, key, value), ours, allowed, stock, train)


def window(
    sizes: Sizes, *, length: int = 16384, width: int = 4096, train: bool = False, batch: int = 1
) -> Case:
    """A sliding window of `width` keys, the query's own included."""
    left = sizes.tokens(width) - 1
    allowed = partial(windowed, left=left)
    ours = {"mask": masks.Window(left)}
    return build(sizes, sizes.tokens(length), ours, allowed, train=train, batch=batch)


def documents(sizes: Sizes, *, length: int = 8192, train: bool = True, batch: int = 1) -> Case:
    """Packed documents of 1024 tokens, causal."""
    tokens, document = sizes.tokens(length), sizes.tokens(1024)
    mask = masks.Documents(lengths=(document,) * (tokens // document)) & masks.Causal()
    allowed = partial(packed, document=document)
    return build(sizes, tokens, {"mask": mask}, allowed, train=train, batch=batch)


def dense_causal(sizes: Sizes, *, train: bool = False) -> Case:
    """A causal mask as a bool tensor, the same for stock and for us."""
    length = sizes.tokens(8192)
    tensor = dense(causal, length)
    case = build(sizes, length, {"mask": tensor}, causal, train=train)
    return case._replace(stock=lambda: {"attn_mask": tensor})


def softcap(sizes: Sizes) -> Case:
    """Causal with scores capped at 30, which stock cannot say."""
    ours = {"is_causal": True, "softcap": 30.0}
    return build(sizes, sizes.tokens(8192), ours, causal, train=False)._replace(stock=None)


def alibi(sizes: Sizes) -> Case:
    """Causal with ALiBi, which stock reads as a bias of every head, query and key."""
    length, (heads, _) = sizes.tokens(8192), sizes.heads(*HEADS)
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=DEVICE) / heads)
    ours = {"is_causal": True, "bias": biases.ALiBi(slopes)}
    return build(sizes, length, ours, causal, train=False)._replace(stock=lambda: _alibi_bias(slopes, length))


def _alibi_bias(slopes: Tensor, length: int) -> dict[str, Any]:
    places = torch.arange(length, device=DEVICE)
    later = ~causal(places[:, None], places[None])
    distance = (places[:, None] - places[None]).abs()
    bias = torch.empty(1, len(slopes), length, length, device=DEVICE, dtype=torch.bfloat16)
    for head, slope in enumerate(slopes):
        bias[0, head] = (-slope * distance).masked_fill_(later, -torch.inf)
    return {"attn_mask": bias}


def sink_window(sizes: Sizes, *, train: bool = False) -> Case:
    """The attention of gpt-oss: a window of 128 and a sink per head, which stock cannot say."""
    left, heads = sizes.tokens(128) - 1, (64, 8)
    sink = torch.randn(sizes.heads(*heads)[0], device=DEVICE, requires_grad=train)
    ours = {"mask": masks.Window(left), "sink": sink}
    allowed = partial(windowed, left=left)
    case = build(sizes, sizes.tokens(8192), ours, allowed, train=train, heads=heads, head_dim=64)
    return case._replace(stock=None)


def prefix(sizes: Sizes) -> Case:
    """Causal but for a prefix of 1024 keys, which every query may attend."""
    length, first = sizes.tokens(8192), sizes.tokens(1024)
    ours = {"mask": masks.PrefixLM((first,))}
    return build(sizes, length, ours, lambda i, j: (j <= i) | (j < first), train=False)


def left_padding(sizes: Sizes) -> Case:
    """Four causal rows with keys missing at their start."""
    length = sizes.tokens(4096)
    missing = torch.tensor([0, length // 4, length // 2, 3 * length // 4], device=DEVICE)
    ours = {"mask": masks.KeyPadding(left=missing) & masks.Causal()}
    starts = missing[:, None, None, None]
    return build(sizes, length, ours, lambda i, j: (j <= i) & (j >= starts), train=False, batch=4)


def combined(sizes: Sizes) -> Case:
    """Causal documents of 1024 tokens that may all attend the first 512 keys."""
    length, document, first = (sizes.tokens(n) for n in (8192, 1024, 512))
    inside = masks.Causal() & masks.Documents(lengths=(document,) * (length // document))
    ours = {"mask": inside | masks.KeyPadding(lengths=(first,))}
    allowed = partial(packed, document=document)
    return build(sizes, length, ours, lambda i, j: allowed(i, j) | (j < first), train=False)
