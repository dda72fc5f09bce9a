"""Define the calls of the demo: the arguments for attnroute, and what people write with torch today.

At their large sizes they are calls of known models, whose times on an H200 lie beside this file
(`demo_measured.json`, which `python -m benchmarks.report` writes).
"""

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
        recorded: The name of the same call, at its large sizes, among the recorded ones.
        dtype: Of query, key and value.
        train: Forward and backward instead of forward alone.
        small: Sizes for the CPU.
        large: Sizes for a GPU.
        ours: Sizes and device to the keyword arguments of `attnroute.attention`.
        allowed: Sizes and device to a bool tensor (batch or 1, 1, seqlen, seqlen), True = attend.
        plain: Stock attention needs no tensor, `is_causal` says it all.
    """

    title: str
    recorded: str
    dtype: torch.dtype
    train: bool
    small: Sizes
    large: Sizes
    ours: Callable[[Sizes, torch.device], dict[str, Any]]
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
        # Tokens lie outermost in memory, as a model's projections leave them.
        shape = (sizes.batch, sizes.seqlen, heads, sizes.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(self.dtype).transpose(1, 2)

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
    return sizes.seqlen // 4 - 1


def _lengths(sizes: Sizes) -> tuple[int, ...]:
    return (sizes.seqlen // 8,) * 8


def _padding(sizes: Sizes) -> list[int]:
    return [row * sizes.seqlen // (2 * sizes.batch) for row in range(sizes.batch)]


def _is_causal(_sizes: Sizes, _device: torch.device) -> dict[str, Any]:
    return {"is_causal": True}


def _mask_tensor(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    return {"mask": _causal(sizes, device)[0, 0]}


def _window_mask(sizes: Sizes, _device: torch.device) -> dict[str, Any]:
    return {"mask": Causal() & Window(_reach(sizes), 0)}


def _documents_mask(sizes: Sizes, _device: torch.device) -> dict[str, Any]:
    return {"mask": Causal() & Documents(lengths=_lengths(sizes))}


def _padding_mask(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    return {"mask": Causal() & KeyPadding(left=torch.tensor(_padding(sizes), device=device), finite=True)}


CASES: tuple[Case, ...] = (
    Case(
        "causal, GQA, train",
        "llama8b_train_4k_b2",
        torch.bfloat16,
        train=True,
        small=Sizes(1, 8, 2, 512, 64),
        large=Sizes(2, 32, 8, 4096, 128),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
    Case(
        "causal mask tensor",
        "dense_causal_4k",
        torch.bfloat16,
        train=False,
        small=Sizes(1, 8, 2, 1024, 64),
        large=Sizes(1, 32, 8, 4096, 128),
        ours=_mask_tensor,
        allowed=_causal,
        plain=False,
    ),
    Case(
        "sliding window",
        "window_4k_of_16k",
        torch.bfloat16,
        train=False,
        small=Sizes(1, 4, 2, 2048, 64),
        large=Sizes(1, 32, 8, 16384, 128),
        ours=_window_mask,
        allowed=_window,
        plain=False,
    ),
    Case(
        "documents, train",
        "docs_8k_train",
        torch.bfloat16,
        train=True,
        small=Sizes(1, 4, 2, 512, 64),
        large=Sizes(1, 32, 8, 8192, 128),
        ours=_documents_mask,
        allowed=_documents,
        plain=False,
    ),
    Case(
        "padded on the left",
        "left_pad_causal_2k_b8",
        torch.bfloat16,
        train=False,
        small=Sizes(4, 4, 2, 512, 64),
        large=Sizes(8, 32, 8, 2048, 128),
        ours=_padding_mask,
        allowed=_padded,
        plain=False,
    ),
    Case(
        "head_dim 320, train",
        "d320_gqa_train_4k",
        torch.bfloat16,
        train=True,
        small=Sizes(1, 4, 2, 256, 320),
        large=Sizes(1, 16, 8, 4096, 320),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
    Case(
        "head_dim 512",
        "gemma4_d512_prefill_4k",
        torch.bfloat16,
        train=False,
        small=Sizes(1, 4, 2, 512, 512),
        large=Sizes(1, 8, 4, 4096, 512),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
    Case(
        "float32, train",
        "fp32_train_1k",
        torch.float32,
        train=True,
        small=Sizes(1, 8, 8, 512, 64),
        large=Sizes(2, 16, 16, 1024, 64),
        ours=_is_causal,
        allowed=_causal,
        plain=True,
    ),
)
