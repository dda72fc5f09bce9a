"""Run `chunked` and dense float64 attention on the same call, and compare outputs and every gradient."""

from __future__ import annotations

import torch
from support.chunked_reference import error, reference, wide

from attnroute.executors.chunked.run import attend
from attnroute.executors.protocol import Inputs

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 5e-6


def chunked_attention(query, key, value, mask, *, block_q=None, **fields):
    """Return output and log-sum-exp of a call whose other fields are those of `Inputs`."""
    return attend(Inputs(query, key, value, mask, **fields), block_q=block_q)


class Drawn:
    """Numbers from one seed, in one dtype, on one device."""

    def __init__(self, seed, dtype, device="cpu"):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def tensors(self, sizes, head_dim_qk=8, head_dim_v=8, heads_kv=None):
        """Return query, key and value for sizes (batch, num_heads_q, seqlen_q, seqlen_kv)."""
        batch, heads, seqlen_q, seqlen_kv = sizes
        shared = heads_kv or heads
        query = self.normal(batch, heads, seqlen_q, head_dim_qk).requires_grad_()
        key = self.normal(batch, shared, seqlen_kv, head_dim_qk).requires_grad_()
        return query, key, self.normal(batch, shared, seqlen_kv, head_dim_v).requires_grad_()


def compare(drawn, tensors, mask, arguments=None, *, score=None, block_q=None):
    """Assert that both agree; returns the output.

    `score` is a pair: what makes a score function from tensors, and the tensors.
    """
    arguments = arguments or {}
    make, read = score or (None, ())
    function = None if make is None else make(*read)
    out, lse = chunked_attention(*tensors, mask, score_mod=function, block_q=block_q, **arguments)
    has_key = torch.isfinite(lse)
    leaves = [t for t in (*tensors, *arguments.values(), *read) if torch.is_tensor(t) and t.requires_grad]
    grad_out, grad_lse = drawn.normal(*out.shape), drawn.normal(*lse.shape).float()
    # What comes in at rows without a key must not matter.
    into = [grad_out, grad_lse.masked_fill(~has_key, float("nan"))]
    grads = torch.autograd.grad([out, lse], leaves, into)
    want_out, want_lse, wanted = _expected(
        tensors, mask, arguments, make, read, (grad_out, grad_lse, has_key)
    )
    assert torch.equal(has_key, torch.isfinite(want_lse))
    assert not out[~has_key].any()
    assert fits(out, want_out, drawn.dtype)
    assert error(lse[has_key], want_lse[has_key]) < max(TOLERANCE[drawn.dtype] / 100, LSE_TOLERANCE)
    for leaf, got, want in zip(leaves, grads, wanted, strict=True):
        assert got.shape == leaf.shape
        assert got.dtype == leaf.dtype
        assert close(got, want, TOLERANCE[drawn.dtype], lse.numel())
    return out


def _expected(tensors, mask, arguments, make, read, grads):
    grad_out, grad_lse, has_key = grads
    wides = {id(t): wide(t) for t in (*tensors, *arguments.values(), *read) if torch.is_tensor(t)}
    leaves = [leaf for leaf in wides.values() if leaf.requires_grad]
    function = None if make is None else make(*(wides[id(t)] for t in read))
    others = {name: wides.get(id(value), value) for name, value in arguments.items()}
    found = reference(*(wides[id(t)] for t in tensors), mask, score_mod=function, **others)
    into = (grad_out.double(), grad_lse.double().masked_fill(~has_key, 0.0))
    # A function that ignores the score may leave nothing for the log-sum-exp to depend on.
    ends, into = zip(
        *((end, grad) for end, grad in zip(found, into, strict=True) if end.requires_grad), strict=True
    )
    return *found, torch.autograd.grad(ends, leaves, into, materialize_grads=True)


def fits(got, want, dtype):
    """Compare relative to `want`; where it is below what the dtype can round to, to that."""
    smallest = torch.finfo(dtype).smallest_normal * got.numel() ** 0.5
    difference = (got.double() - want).detach().norm()
    return error(got, want) < TOLERANCE[dtype] or float(difference) < smallest


def close(got, want, tolerance, rows):
    """Compare relative to `want`; where its terms cancel, to the rounding of as many terms of size 1."""
    return error(got, want) < tolerance or float((got.double() - want).norm()) < tolerance * rows**0.5
