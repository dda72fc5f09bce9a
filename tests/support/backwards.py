"""What autograd may ask of a backward beside one gradient of everything, held against the plain backward."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch

SAMPLES = 3


def by_loops(check):
    """Do not hear of torch's own loops over samples, of which it warns."""

    @functools.wraps(check)
    def checked(run, leaves):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
            check(run, leaves)

    return checked


def near(got, want):
    """Compare gradients of two ways that add the same numbers up, in any order."""
    for a, b in zip(got, want, strict=True):
        wide = b.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-10 if wide else 1e-5, atol=1e-10 if wide else 2e-6)


def one(run, leaves, cotangent=None):
    """Return the gradients of one forward by one backward."""
    out = run()
    return torch.autograd.grad(out, leaves, cotangents(out)[0] if cotangent is None else cotangent)


def cotangents(out):
    generator = torch.Generator(out.device).manual_seed(5)
    return torch.randn(SAMPLES, *out.shape, generator=generator, dtype=out.dtype, device=out.device)


def check_again(run, leaves):
    """A backward may run several times, and after the graph is freed it says what torch's own say."""
    want = one(run, leaves)
    for keep in ({"retain_graph": True}, {"create_graph": True}):
        out = run()
        for _ in range(2):
            near(torch.autograd.grad(out, leaves, cotangents(out)[0], **keep), want)
        near(torch.autograd.grad(out, leaves, cotangents(out)[0], retain_graph=False), want)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, leaves, cotangents(out)[0])


def check_some(run, leaves):
    """Inputs that need no gradient change none of the others."""
    want = one(run, leaves)
    for wanted in itertools.product([True, False], repeat=len(leaves)):
        if any(wanted):
            for leaf, wants in zip(leaves, wanted, strict=True):
                leaf.requires_grad_(wants)
            picked = list(itertools.compress(leaves, wanted))
            near(one(run, picked), list(itertools.compress(want, wanted)))
    for leaf in leaves:
        leaf.requires_grad_(True)


def check_forms(run, leaves):
    """A gradient may share its memory or lie in any order."""
    out = run()
    whole, *_ = cotangents(out)
    row = whole[:, :1, :, :1]
    forms = (
        torch.ones((), dtype=out.dtype, device=out.device).expand_as(out),
        row.expand_as(out),
        whole.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.cat([whole, whole], -1)[..., ::2],
    )
    for form in forms:
        near(one(run, leaves, form), one(run, leaves, form.contiguous().clone()))


@by_loops
def check_several(run, leaves):
    """Gradients of several outputs at once are those of each by itself."""
    out = run()
    many = cotangents(out)

    def backward(cotangent):
        return torch.autograd.grad(out, leaves, cotangent, retain_graph=True)

    def together(cotangent):
        return torch.autograd.grad(out, leaves, cotangent, retain_graph=True, is_grads_batched=True)

    want = [torch.stack(parts) for parts in zip(*map(backward, many), strict=True)]
    near(together(many), want)
    near(torch.vmap(backward)(many), want)
    near(torch.vmap(backward, in_dims=2)(many.movedim(0, 2)), want)
    twice = [torch.stack([part, 2 * part]) for part in want]
    pairs = torch.stack([many, 2 * many])
    near(torch.vmap(torch.vmap(backward))(pairs), twice)
    near(torch.vmap(together)(pairs), twice)


def check_changes(run, leaves):
    """What changed between the directions is an error, unless a copy keeps what the forward saw."""
    for leaf in leaves:
        want = torch.autograd.grad(run().sum(), leaves)
        out, before = run(), leaf.detach().clone()
        with torch.no_grad():
            leaf.mul_(1.5)
        said = None
        try:
            near(torch.autograd.grad(out.sum(), leaves), want)
        except RuntimeError as error:
            said = str(error)
        assert said is None or "modified by an inplace operation" in said
        with torch.no_grad():
            leaf.copy_(before)


CHECKS = (check_again, check_some, check_forms, check_several, check_changes)
