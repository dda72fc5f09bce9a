"""Calls of one backend in every memory layout of inputs and of the output's gradient, against float64."""

from __future__ import annotations

import re

import torch
from support.cuda_problems import TOLERANCE, apart, band, spoil_memory, sums_of
from support.kernel_names import KERNELS, PACKAGES, names_of
from support.reference import attend, error

import attnroute
from attnroute import masks


def _ordered(*dims):
    back = [dims.index(dim) for dim in range(4)]
    return lambda t: t.permute(dims).contiguous().permute(back)


def _part(extra):
    """Return tensors that are the middle of a wider one, as a projection of all three leaves them."""

    def lie(tensor):
        batch, heads, seqlen, width = tensor.shape
        size = heads * width
        wide = tensor.new_zeros(batch, seqlen, 3 * size + extra)
        rows = wide[..., size + extra : 2 * size + extra].unflatten(-1, (heads, width))
        return rows.copy_(tensor.transpose(1, 2)).transpose(1, 2)

    return lie


def _shifted(tensor):
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


INPUTS = {
    "heads outermost": _ordered(0, 1, 2, 3),
    "tokens outermost": _ordered(0, 2, 1, 3),
    "sequence outermost": _ordered(2, 0, 1, 3),
    "part of a wider row": _part(0),
    "part of a misaligned row": _part(1),
    "starts between": _shifted,
    "last dimension strided": _ordered(0, 1, 3, 2),
    "rows with gaps": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "one head for all": lambda t: t[:, :1].contiguous().expand(t.shape),
}
"""How query, key and value lie, as (batch, heads, seqlen, head_dim); some hold other numbers than given."""
GRADIENTS = {
    **INPUTS,
    "a number": lambda t: t.new_ones(()).expand(t.shape),
    "one row for all": lambda t: t[:, :, :1].contiguous().expand(t.shape),
}
NAMES = {
    "flex": r"triton.*flex",
    "flex_fa4": PACKAGES["fa4"],
    "chunked": r"",
    **{b: KERNELS[b] for b in ("flash", "efficient", "math")},
    **PACKAGES,
    "cudnn": PACKAGES["cudnn_fe"],
}
"""Device kernels of each backend; chunked's are torch's products, and its mark says that it ran."""
OPERATORS = {b: f"aten::_scaled_dot_product_{b}_attention" for b in ("cudnn",)}
LENGTHS = [50, 1, 0, 79]
KINDS = ("everything", "causal", "documents", "sequences", "one query")


def check(backend, kind, *, dtype=torch.bfloat16, head_dim=64):
    """Hold one kind of call in every layout; one test, because some backends compile for the kind."""
    for lies in INPUTS:
        _hold(backend, kind, lies, dtype, head_dim)


def _hold(backend, kind, lies, dtype, head_dim):
    """Run one forward, and a backward for every layout of the gradient; hold output and gradients."""
    torch.manual_seed(0)
    seqlen_q, seqlen_kv = (1, 257) if kind == "one query" else (130, 130)
    batch = 1 if kind == "sequences" else 3
    sizes = ((4, seqlen_q), (2, seqlen_kv), (2, seqlen_kv))
    tensors = [torch.randn(batch, h, n, head_dim, device="cuda").to(dtype) for h, n in sizes]
    inputs = [INPUTS[lies](t).requires_grad_() for t in tensors]
    want = _wanted(kind, inputs)
    decision = _asked(attnroute.explain, backend, kind, inputs)
    assert decision.selected == backend, str(decision)

    def run():
        spoil_memory()
        out = _asked(attnroute.attention, backend, kind, inputs)
        out = out.transpose(0, 1)[None] if kind == "sequences" else out
        found = {}
        for name, lie in GRADIENTS.items():
            torch.manual_seed(1)
            grad = lie(torch.randn(want.shape, device="cuda").to(dtype))
            found[name] = grad, torch.autograd.grad(out, inputs, grad, retain_graph=True)
        return out, found

    (out, found), on_device, names = names_of(run)
    check_ran(backend, on_device, names)
    assert error(out, want) <= TOLERANCE[dtype], lies
    for name, (grad, grads) in found.items():
        true = torch.autograd.grad(want, inputs, grad.double(), retain_graph=True)
        for which, got, expected in zip(("dq", "dk", "dv"), grads, true, strict=True):
            assert error(got, expected.double(), floor=2.0) <= 2 * TOLERANCE[dtype], (lies, name, which)


def check_ran(backend, on_device, names):
    """Fail unless a profile shows the kernels and operators of a backend."""
    assert any(re.search(NAMES[backend], name) for name in on_device), sorted(on_device)
    assert backend in KERNELS or f"attnroute::{backend}" in names, sorted(names)
    assert backend not in OPERATORS or any(OPERATORS[backend] in name for name in names)


def _asked(function, backend, kind, inputs):
    if kind == "sequences":
        views = [t[0].transpose(0, 1) for t in inputs]
        given = {"cu_seqlens_q": sums_of(LENGTHS), "max_seqlen_q": max(LENGTHS), "layout": "thd"}
        return function(*views, is_causal=True, backend=backend, **given)
    if kind == "documents":
        mask = masks.Causal() & masks.Documents(lengths=LENGTHS)
        return function(*inputs, mask, backend=backend)
    return function(*inputs, is_causal=kind == "causal", backend=backend)


def _wanted(kind, inputs):
    if kind == "sequences":
        views = [t[0].transpose(0, 1) for t in inputs]
        return apart(views, LENGTHS, LENGTHS, None, 0)[0].transpose(0, 1)[None]
    allowed = None
    if kind in ("causal", "documents"):
        allowed = band(130, 130, None, 0)
    if kind == "documents":
        ids = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)).cuda()
        allowed = allowed & (ids[:, None] == ids)
    return attend(*inputs, allowed=allowed)[0]
