"""Inputs and plans for the tests of the preparations on tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st
from support.reference import attend

from attnroute.executors import registry
from attnroute.executors.protocol import Inputs, Plan
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.tables.load import load

FORMS = st.sampled_from(["packed", "bshd", "row gap", "last stride", "shifted", "expanded"])


def executor_of(backend):
    return registry.executor(backend, load().backends[backend].module)


def plan(*made, backend="math", return_lse=False):
    return Plan(backend=backend, repairs=made, training=False, return_lse=return_lse, device_type="cpu")


def stored(values, form):
    """Return equal values in other memory."""
    if form == "bshd":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "row gap":
        return torch.cat([values, values], -1)[..., : values.shape[-1]]
    if form == "last stride":
        return values.transpose(2, 3).contiguous().transpose(2, 3)
    if form == "shifted":
        return torch.empty(values.numel() + 1)[1:].view(values.shape).copy_(values)
    return values[:, :1].expand(values.shape) if form == "expanded" else values


def inputs_of(batch=2, heads=4, heads_kv=2, seqlen_q=5, seqlen_kv=7, head_dims=(8, 8), **rest):
    head_dim_qk, head_dim_v = head_dims
    query = torch.randn(batch, heads, seqlen_q, head_dim_qk)
    key = torch.randn(batch, heads_kv, seqlen_kv, head_dim_qk)
    return Inputs(query, key, torch.randn(batch, heads_kv, seqlen_kv, head_dim_v), **rest)


def lowered(mask, inputs):
    extent = Extent(*inputs.query.shape[:3], inputs.key.shape[2], inputs.query.device)
    return mask.lower(FULL, extent)


def reference(inputs, plan):
    """Run what reached the kernel by the definition, and keep a copy of it."""
    attn = inputs.attn
    is_mask = attn is not None and attn.dtype == torch.bool
    out, lse = attend(
        inputs.query,
        inputs.key,
        inputs.value,
        allowed=attn if is_mask else None,
        bias=None if is_mask else attn,
        scale=inputs.scale,
    )
    reference.seen.append(replace(inputs))
    return out, lse
