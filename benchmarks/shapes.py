"""The shapes that are measured beside stock scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnroute import masks


@dataclass(frozen=True)
class Shape:
    """One attention call of a known model, with what a user writes for it today.

    Attributes:
        mask: none, causal, dense_causal (a bool tensor that is causal), window, documents or padding.
    """

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    mask: str
    train: bool
    width: int = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return random bfloat16 query, key and value."""

        def make(heads: int, length: int, head_dim: int) -> Tensor:
            size = (self.batch, heads, length, head_dim)
            return torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=self.train)

        query = make(self.heads_q, self.seqlen_q, self.head_dim_qk)
        key = make(self.heads_kv, self.seqlen_kv, self.head_dim_qk)
        return query, key, make(self.heads_kv, self.seqlen_kv, self.head_dim_v)

    def stock(self) -> dict[str, Any]:
        """Return the mask arguments of scaled_dot_product_attention."""
        if self.mask == "causal":
            return {"is_causal": True}
        allowed = self.allowed()
        return {} if allowed is None else {"attn_mask": allowed}

    def ours(self) -> dict[str, Any]:
        """Return the mask arguments of `attnroute.attention`."""
        if self.mask == "causal":
            return {"is_causal": True}
        if self.mask == "dense_causal":
            return {"mask": self.allowed()}
        if self.mask == "window":
            return {"window": (self.width - 1, 0)}
        if self.mask == "documents":
            return {"mask": masks.Causal() & masks.Documents(lengths=self.documents())}
        if self.mask == "padding":
            return {"mask": masks.KeyPadding(lengths=self.kept())}
        return {}

    def allowed(self) -> Tensor | None:
        """Return who may attend as a bool tensor, as a user would build it."""
        if self.mask == "none":
            return None
        if self.mask == "padding":
            return (torch.arange(self.seqlen_kv, device="cuda") < self.kept()[:, None])[:, None, None]
        rows = torch.arange(self.seqlen_q, device="cuda")[:, None]
        columns = torch.arange(self.seqlen_kv, device="cuda")[None]
        allowed = columns <= rows
        if self.mask == "window":
            allowed &= columns > rows - self.width
        if self.mask == "documents":
            allowed &= rows // self.width == columns // self.width
        return allowed

    def documents(self) -> list[int]:
        """Return the document lengths."""
        return [self.width] * (self.seqlen_kv // self.width)

    def kept(self) -> Tensor:
        """Return how many keys each batch row has."""
        generator = torch.Generator().manual_seed(0)
        low = self.seqlen_kv // 2
        return torch.randint(low, self.seqlen_kv + 1, (self.batch,), generator=generator).cuda()


SHAPES = (
    Shape("llama8b_prefill_8k", 1, 32, 8, 8192, 8192, 128, 128, "causal", False),
    Shape("llama8b_train_4k", 2, 32, 8, 4096, 4096, 128, 128, "causal", True),
    Shape("gemma320_prefill_8k", 1, 8, 8, 8192, 8192, 320, 320, "causal", False),
    Shape("gemma320_gqa_train_4k", 1, 16, 8, 4096, 4096, 320, 320, "causal", True),
    Shape("densecausal_d128_8k", 1, 32, 8, 8192, 8192, 128, 128, "dense_causal", False),
    Shape("mistral_window_16k", 1, 32, 8, 16384, 16384, 128, 128, "window", False, 4096),
    Shape("gemma3_d256_train_4k", 1, 16, 8, 4096, 4096, 256, 256, "causal", True),
    Shape("mla_192_128_train_4k", 1, 32, 32, 4096, 4096, 192, 128, "causal", True),
    Shape("mla_192_128_prefill_8k", 1, 32, 32, 8192, 8192, 192, 128, "causal", False),
    Shape("docpack_8k_train", 1, 32, 8, 8192, 8192, 128, 128, "documents", True, 1024),
    Shape("bert_pad_512", 32, 12, 12, 512, 512, 64, 64, "padding", True),
    Shape("flux_4608", 1, 24, 24, 4608, 4608, 128, 128, "none", False),
    Shape("sd_self_4096_d64", 4, 10, 10, 4096, 4096, 64, 64, "none", False),
    Shape("vit_257_d64", 64, 16, 16, 257, 257, 64, 64, "none", True),
    Shape("decode_8k", 8, 32, 8, 1, 8192, 128, 128, "none", False),
    Shape("decode_b1_32k", 1, 32, 8, 1, 32768, 128, 128, "none", False),
    Shape("short_128_b64", 64, 32, 8, 128, 128, 128, 128, "causal", False),
    Shape("wan_video_32k", 1, 12, 12, 32760, 32760, 128, 128, "none", False),
    Shape("llama_32k_prefill", 1, 32, 8, 32768, 32768, 128, 128, "causal", False),
    Shape("gemma_512_prefill_4k", 1, 8, 4, 4096, 4096, 512, 512, "causal", False),
    Shape("llama8b_train_16k", 1, 32, 8, 16384, 16384, 128, 128, "causal", True),
)
"""The 21 shapes that were measured first; shapes that are not here count as much."""

LARGE_HEADS = tuple(
    Shape(f"d{dim}_{hq}_{hkv}_{length}", 1, hq, hkv, length, length, dim, dim, "causal", True)
    for dim, hq, hkv, length in (
        (320, 16, 8, 4096),
        (320, 16, 8, 8192),
        (320, 16, 8, 16384),
        (512, 8, 4, 4096),
        (512, 16, 8, 4096),
        (512, 16, 8, 8192),
        (512, 16, 8, 16384),
        (512, 16, 1, 16384),
    )
)
"""head_dim 320 and 512 with grouped heads, trained: where stock falls to its quadratic path."""
