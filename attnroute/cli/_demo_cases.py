"""Define the calls of the demo: the arguments for attnroute, and what people write with torch today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnroute.masks import Causal, Documents, KeyPadding, Window


class Sizes(NamedTuple):
    """Batch, heads, length and head dim of a call; query and key have the same length."""

    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        title: What it shows.
        dtype: Of query, key and value.
        train: Forward and backward instead of forward alone.
        small: Sizes for the CPU.
        large: Sizes for a GPU.
        ours: Sizes to the keyword arguments of `attnroute.attention`.
        allowed: Sizes and device to a bool tensor (batch or 1, 1, seqlen, seqlen), True = attend.
        plain: Stock attention needs no tensor, `is_causal` says it all.
    """

    title: str
    dtype: torch.dtype
    train: bool
    small: Sizes
    large: Sizes
    ours: Callable[[Sizes], dict[str, Any]]
    allowed: Callable[[Sizes, torch.device], Tensor]
    plain: bool

    def sizes(self, device: torch.device) -> Sizes:
        """Return the sizes for a device."""
        return self.small if device.type == "cpu" else self.large

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, the same on every run."""
        sizes = self.sizes(device)
        heads = (sizes.num_heads_q, sizes.num_heads_kv, sizes.num_heads_kv)
        query, key, value = (self._draw(count, seed, device) for seed, count in enumerate(heads))
        return (
            query.requires_grad_(self.train),
            key.requires_grad_(self.train),
            value.requires_grad_(self.train),
        )

    def upstream(self, device: torch.device) -> Tensor | None:
        """Return the gradient that comes back into the output, None where nothing trains."""
        return self._draw(self.sizes(device).num_heads_q, 3, device) if self.train else None

    def _draw(self, heads: int, seed: int, device: torch.device) -> Tensor:
        sizes = self.sizes(device)
        generator = torch.Generator(device).manual_seed(seed)
        shape = (sizes.batch, heads, sizes.seqlen, sizes.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(self.dtype)

    def stock(self, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments that mean the same to scaled_dot_product_attention."""
        sizes = self.sizes(device)
        arguments: dict[str, Any] = {"enable_gqa": True} if sizes.num_heads_q != sizes.num_heads_kv else {}
        return arguments | ({"is_causal": True} if self.plain else {"attn_mask": self.allowed(sizes, device)})


def _causal(sizes: Sizes, device: torch.device) -> Tensor:
    return torch.ones(1, 1, sizes.seqlen, sizes.seqlen, dtype=torch.bool, device=device).tril()


def _window(sizes: Sizes, device: torch.device) -> Tensor:
    return _causal(sizes, device).triu(-_reach(sizes))


def _documents(sizes: Sizes, device: torch.device) -> Tensor:
    lengths = torch.tensor(_lengths(sizes), device=device)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    return _causal(sizes, device) & (ids[:, None] == ids)


def _padded(sizes: Sizes, device: torch.device) -> Tensor:
    keys = torch.arange(sizes.seqlen, device=device)
    kept = keys >= torch.tensor(_padding(sizes), device=device)[:, None]
    return _causal(sizes, device) & kept[:, None, None, :]


def _reach(sizes: Sizes) -> int:
    return sizes.seqlen // 16 - 1


def _lengths(sizes: Sizes) -> list[int]:
    first = sizes.seqlen // 4 + 1
    return [first, sizes.seqlen // 2, sizes.seqlen - sizes.seqlen // 2 - first]


def _padding(sizes: Sizes) -> tuple[int, ...]:
    return (sizes.seqlen // 4, *[0] * (sizes.batch - 1))


def _is_causal(_sizes: Sizes) -> dict[str, Any]:
    return {"is_causal": True}


CASES: tuple[Case, ...] = (
    Case(
        "causal, GQA",
        torch.bfloat16,
        train=True,
        small=Sizes(1, 8, 2, 512, 64),
        large=Sizes(2, 32, 8, 4096, 128),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
    Case(
        "sliding window",
        torch.bfloat16,
        train=False,
        small=Sizes(1, 4, 2, 2048, 64),
        large=Sizes(1, 16, 8, 16384, 128),
        ours=lambda sizes: {"mask": Window(_reach(sizes), 0)},
        allowed=_window,
        plain=False,
    ),
    Case(
        "packed documents",
        torch.bfloat16,
        train=True,
        small=Sizes(1, 4, 4, 512, 64),
        large=Sizes(1, 16, 16, 8192, 128),
        ours=lambda sizes: {"mask": Causal() & Documents(lengths=tuple(_lengths(sizes)))},
        allowed=_documents,
        plain=False,
    ),
    Case(
        "head_dim 320, GQA",
        torch.bfloat16,
        train=True,
        small=Sizes(1, 4, 2, 256, 320),
        large=Sizes(1, 16, 8, 4096, 320),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
    Case(
        "head_dim 512, GQA",
        torch.bfloat16,
        train=False,
        small=Sizes(1, 4, 2, 512, 512),
        large=Sizes(1, 8, 4, 4096, 512),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
    Case(
        "float32",
        torch.float32,
        train=True,
        small=Sizes(1, 8, 8, 512, 64),
        large=Sizes(1, 16, 16, 2048, 64),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
    Case(
        "rows with no key",
        torch.float32,
        train=True,
        small=Sizes(2, 4, 4, 256, 64),
        large=Sizes(2, 16, 16, 1024, 64),
        ours=lambda sizes: {"mask": Causal() & KeyPadding(left=_padding(sizes))},
        allowed=_padded,
        plain=False,
    ),
)
