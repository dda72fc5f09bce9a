"""Calls whose tokens are spread over ranks, beside attention that is written out in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import attnroute


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def drawn(batch=2, heads=4, heads_kv=2, tokens=16, tokens_kv=None, dim=8, dim_v=8, dtype=torch.float64):
    """The same on each rank: query, key, value and the output's gradient, of whole sequences."""
    tokens_kv = tokens_kv or tokens
    shapes = [
        (batch, heads, tokens, dim),
        (batch, heads_kv, tokens_kv, dim),
        (batch, heads_kv, tokens_kv, dim_v),
        (batch, heads, tokens, dim_v),
    ]
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(tensors, allowed=None, change=lambda scores: scores, sink=None):
    """Output, log-sum-exp and gradients of query, key and value, without any of attnroute's code."""
    query, key, value, grad = (t.double() for t in tensors)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    scores = change(leaves[0] @ leaves[1].repeat_interleave(group, 1).mT * query.shape[-1] ** -0.5)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    total = torch.logsumexp(scores, -1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, sink.double()[:, None, None])
    out = (scores - total).exp() @ leaves[2].repeat_interleave(group, 1)
    out.backward(grad)
    return [out.detach(), total.detach().squeeze(-1), *[t.grad for t in leaves]]


class Kernels(TorchDispatchMode):
    """What attention ran.

    Attributes:
        seen: Operators of torch without what their names have in common, and marks of chunked, in order.
        shapes: Of the query of each operator of a forward.
    """

    def __init__(self):
        super().__init__()
        self.seen, self.shapes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("aten::_scaled_dot_product"):
            self.seen.append(name.removeprefix("aten::_scaled_dot_product_"))
            self.shapes += [] if "backward" in name else [tuple(args[0].shape)]
        elif "record_function_enter" in name and args[0].startswith("attnroute::"):
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


def attended(block, tensors, layout="bhsd", **arguments):
    """Output, log-sum-exp and gradients of this rank's tokens, all in layout bhsd, and what ran."""
    own = [block.shard(t, 2).detach() for t in tensors]
    if layout == "bshd":
        own = [t.transpose(1, 2).contiguous() for t in own]
    leaves = [t.requires_grad_() for t in own[:3]]
    with Kernels() as kernels:
        with block:
            out, lse = attnroute.attention(*leaves, return_lse=True, layout=layout, **arguments)
        out.backward(own[3])
    found = [out.detach(), *[t.grad for t in leaves]]
    if layout == "bshd":
        found = [t.transpose(1, 2) for t in found]
    return [found[0], lse, *found[1:]], kernels
