"""Attention in blocks of queries, so that no more than a block's scores exist at once."""

from __future__ import annotations

import torch
from torch import Tensor

from attnroute.executors.protocol import Executor, Inputs, Output, Plan

BLOCK = 64


@torch.library.custom_op("toy::attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Tensor:
    parts = []
    for start in range(0, query.shape[2], BLOCK):
        scores = query[:, :, start : start + BLOCK] @ key.transpose(2, 3) * scale
        if is_causal:
            rows = start + torch.arange(scores.shape[2], device=query.device)
            later = torch.arange(key.shape[2], device=query.device) > rows[:, None]
            scores = scores.masked_fill(later, -torch.inf)
        parts.append(scores.softmax(-1) @ value)
    return torch.cat(parts, 2)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


def run(inputs: Inputs, plan: Plan) -> Output:
    scale = inputs.query.shape[3] ** -0.5 if inputs.scale is None else inputs.scale
    is_causal = inputs.mask.band_hi is not None
    return attend(inputs.query, inputs.key, inputs.value, scale, is_causal), None


executor = Executor(run)
