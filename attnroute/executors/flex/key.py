"""Under which key the code of a FlexAttention call is compiled and kept."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnroute.executors.flex.compile import Settings
    from attnroute.executors.flex.program import Blocked, Part


def key_of(qkv: tuple[Tensor, Tensor, Tensor], mask: Blocked, score: Part, settings: Settings) -> Hashable:
    """Return what makes compiled code of its own: everything but lengths and the values of tensors."""
    query = qkv[0]
    return (
        mask.part.structure,
        score.structure,
        settings,
        tuple((t.shape[1], t.shape[3], _order(t), t.requires_grad) for t in qkv),
        query.dtype,
        query.device,
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        torch.is_autocast_enabled(query.device.type),
        tuple(t is None or tuple(n > 1 for n in t.shape[:2]) for t in mask.blocks[:3]),
    )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the widest stride to the narrowest: dynamo guards on strides."""
    return tuple(sorted(range(4), key=tensor.stride, reverse=True))
