"""Facts about lengths, head dims, shared heads and empty batches, for each of torch's three fused kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from facts_common import DEVICE, KERNELS, Fact, Kernel, compare, error, inputs, reference


class Size(NamedTuple):
    """The lengths and head dims of a call; `cancels`: one key only, so query and key have no gradient."""

    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    cancels: bool = False


SIZES = {
    "s1": Size(1, 1, 64, 64, cancels=True),
    "sk1": Size(64, 1, 64, 64, cancels=True),
    "sq1": Size(1, 64, 64, 64),
    "192/128": Size(128, 128, 192, 128),
    "256": Size(128, 128, 256, 256),
    "64/128": Size(128, 128, 64, 128),
    "d8": Size(128, 128, 8, 8),
    "d72": Size(130, 130, 72, 72),
    "256/128": Size(128, 128, 256, 128),
    "512": Size(128, 128, 512, 512),
    "576/512": Size(64, 128, 576, 512),
}


def sized(kernel: Kernel, size: Size) -> dict[str, Any]:
    """Hold output and gradients at one size against float64."""
    tensors = inputs(
        seqlen_q=size.seqlen_q,
        seqlen_kv=size.seqlen_kv,
        head_dim=size.head_dim_qk,
        head_dim_v=size.head_dim_v,
    )
    return compare(kernel(*tensors)[0], tensors, cancels=size.cancels)


def shared_heads(kernel: Kernel) -> float | str:
    """Give four key/value heads that are one in memory, without a mask."""
    query, key, value = inputs(heads_kv=1, grad=False)
    out, _ = kernel(query, *(t.expand(2, 4, 128, 64) for t in (key, value)))
    return error(out, reference((query, key, value))[0])


def empty_batch(kernel: Kernel) -> list[int]:
    """Give no batch row and return the shape of the output."""
    nothing = torch.randn(0, 4, 128, 64, device=DEVICE).bfloat16()
    return list(kernel(nothing, nothing, nothing)[0].shape)


def facts_of(name: str, kernel: Kernel) -> dict[str, Fact]:
    """Return the facts of one kernel, by key."""
    sizes = {f"{name} {key}": partial(sized, kernel, size) for key, size in SIZES.items()}
    return {
        **sizes,
        f"{name} gqa expanded heads stride0": partial(shared_heads, kernel),
        f"{name} B0": partial(empty_batch, kernel),
    }


FACTS: dict[str, Fact] = {
    key: fact for name, kernel in KERNELS.items() for key, fact in facts_of(name, kernel).items()
}
