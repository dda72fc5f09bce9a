"""Calls of `attention()` that stand inside of compiled functions, for the CPU and for CUDA devices.

A case is a function of query, key, value and the tensors that its mask or bias needs, which a compiled
function takes as arguments, as a model does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import attnroute
from attnroute import biases, masks

BATCH, HEADS_Q, HEADS_KV = 2, 4, 2


class Case(NamedTuple):
    """One call: the function, what makes its further tensors, and whether these may train."""

    call: object
    extras: object = None
    trains_extras: bool = False

    def tensors(self, length, device):
        return () if self.extras is None else tuple(t.to(device) for t in self.extras(length))


def _ids(length):
    return ((torch.arange(length) // 40)[None].expand(BATCH, -1).contiguous(),)


def _sums(length):
    return (torch.tensor([0, length // 3, length], dtype=torch.int32),)


def _counts(length):
    return (torch.tensor([length, max(1, length - 7)]),)


def _keep(length):
    return ((torch.arange(length) < torch.tensor([[length], [max(1, length - 7)]])),)


def _dense(length):
    generator = torch.Generator().manual_seed(length)
    return (torch.rand(length, length, generator=generator) > 0.3,)


def _bias(length):
    generator = torch.Generator().manual_seed(length)
    return (torch.randn(1, HEADS_Q, length, length, generator=generator),)


def _per_head(_):
    return (torch.linspace(-0.5, 0.75, HEADS_Q),)


def _packed(query, key, value, sums, **options):
    tensors = (t[0].transpose(0, 1) for t in (query, key, value))
    out = attnroute.attention(*tensors, layout="thd", cu_seqlens_q=sums, is_causal=True, **options)
    return out.transpose(0, 1)[None]


def _bshd(query, key, value):
    tensors = (t.transpose(1, 2) for t in (query, key, value))
    return attnroute.attention(*tensors, layout="bshd", is_causal=True)


def _short(query, key, value):
    shorter = query[:, :, : query.shape[2] // 2]
    return attnroute.attention(shorter, key, value, is_causal=True, causal_alignment="bottom_right")


def _with_lse(query, key, value):
    out, lse = attnroute.attention(query, key, value, is_causal=True, return_lse=True)
    return out * (1 + 0 * lse.detach()[..., None].clamp_min(-1e4))


attend = attnroute.attention
CASES = {
    "plain": Case(attend),
    "causal": Case(lambda q, k, v: attend(q, k, v, is_causal=True)),
    "bshd": Case(_bshd),
    "bottom_right": Case(_short),
    "lse": Case(_with_lse),
    "window": Case(lambda q, k, v: attend(q, k, v, window=(16, 0))),
    "conjunction": Case(lambda q, k, v: attend(q, k, v, masks.Causal() & masks.Window(16, 3))),
    "documents_ids": Case(
        lambda q, k, v, ids: attend(q, k, v, masks.Documents(ids=ids) & masks.Causal()), _ids
    ),
    "documents_sums": Case(lambda q, k, v, s: attend(q, k, v, masks.Documents(cu_seqlens=s)), _sums),
    "thd": Case(_packed, _sums),
    "padding_right": Case(lambda q, k, v, n: attend(q, k, v, masks.KeyPadding(lengths=n)), _counts),
    "padding_left": Case(
        lambda q, k, v, n: attend(q, k, v, masks.KeyPadding(left=n // 9) & masks.Causal()), _counts
    ),
    "padding_flags": Case(lambda q, k, v, keep: attend(q, k, v, masks.KeyPadding(keep=keep)), _keep),
    "prefix": Case(lambda q, k, v, n: attend(q, k, v, masks.PrefixLM(n // 4)), _counts),
    "disjunction": Case(
        lambda q, k, v, ids: attend(q, k, v, masks.Window(8) | masks.Documents(ids=ids)), _ids
    ),
    "negation": Case(lambda q, k, v, ids: attend(q, k, v, masks.Not(masks.Documents(ids=ids))), _ids),
    "dense": Case(attend, _dense),
    "bias": Case(lambda q, k, v, b: attend(q, k, v, bias=b.to(q.dtype)), _bias, True),
    "dense_turned": Case(attend, lambda n: (_dense(n)[0].T,)),
    "dense_gaps": Case(attend, lambda n: (_dense(2 * n)[0][:n, ::2],)),
    "bias_turned": Case(lambda q, k, v, b: attend(q, k, v, bias=b), lambda n: (_bias(n)[0].mT,), True),
    "math": Case(lambda q, k, v: attend(q, k, v, backend="math")),
    "math_heads": Case(
        lambda q, k, v, m: attend(q, k, v, m, is_causal=True, causal_alignment="top_left", backend="math"),
        _dense,
    ),
    "alibi": Case(lambda q, k, v, s: attend(q, k, v, alibi_slopes=s, is_causal=True), _per_head),
    "bias_objects": Case(
        lambda q, k, v, s: attend(q, k, v, bias=biases.ALiBi(s) + biases.Softcap(20.0)), _per_head
    ),
    "softcap": Case(lambda q, k, v: attend(q, k, v, softcap=20.0, is_causal=True)),
    "sink": Case(lambda q, k, v, s: attend(q, k, v, sink=s, is_causal=True), _per_head, True),
    "required": Case(lambda q, k, v: attend(q, k, v, is_causal=True, backend="chunked")),
    "preferred": Case(lambda q, k, v: attend(q, k, v, is_causal=True, prefer=["chunked", "math"])),
}


def problem(length, *, device="cpu", dtype=torch.float32, head_dim=16, train=False):
    """Return query, key and value in layout bhsd."""
    torch.manual_seed(length)
    shapes = ((HEADS_Q, length, head_dim), (HEADS_KV, length, head_dim), (HEADS_KV, length, head_dim))
    return [torch.randn(BATCH, *s, device=device, dtype=dtype, requires_grad=train) for s in shapes]


def results(function, case, length, *, train=False, **options):
    """Return the output of one call, and where it trains the gradients of everything that does."""
    device = options.get("device", "cpu")
    inputs = problem(length, train=train, **options)
    extras = case.tensors(length, device)
    if train and case.trains_extras:
        extras = tuple(t.requires_grad_() for t in extras)
    out = function(*inputs, *extras)
    if not train:
        return (out,)
    leaves = [t for t in (*inputs, *extras) if t.requires_grad]
    generator = torch.Generator(device).manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, device=device, dtype=out.dtype)
    return (out, *torch.autograd.grad(out, leaves, cotangent))
