"""torch's own samples of scaled_dot_product_attention (its OpInfo) inside of `route_sdpa()`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db

import attnroute

(OP,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = 0


def samples(dtype=torch.float32, *, grad=False):
    torch.manual_seed(SEED)
    for given in OP.sample_inputs(DEVICE, dtype, requires_grad=grad):
        # What is broadcast is torch's own call, as documented.
        routed = len({t.shape[:-3] for t in (given.input, *given.args)}) == 1
        yield given, routed
        yield given.noncontiguous(), routed


COUNT = len(list(samples()))


def called(tensors, named, *, grad=False):
    """Return the output of a call, and the gradients of all its inputs."""
    torch.manual_seed(SEED)
    out = F.scaled_dot_product_attention(*tensors, **named)
    if not grad:
        return (out,)
    inputs = [t for t in (*tensors, named.get("attn_mask")) if t is not None and t.requires_grad]
    return (out, *torch.autograd.grad(out.double().sin().sum(), inputs))


def in_block(function, *args, **named):
    with attnroute.trace() as trace, attnroute.route_sdpa():
        result = function(*args, **named)
    return result, sum(call.count for call in trace.calls)


def widened(given):
    """Return the tensors and names of a sample in float64."""
    tensors = [t.detach().double().requires_grad_(t.requires_grad) for t in (given.input, *given.args)]
    mask = given.kwargs.get("attn_mask")
    wide = None if mask is None else mask.detach().double().requires_grad_(mask.requires_grad)
    return tensors, {**given.kwargs, **({} if wide is None else {"attn_mask": wide})}


def test_there_are_samples():
    assert COUNT >= 50
    assert sum(routed for _, routed in samples()) >= 30


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_without_dropout_are_as_exact_as_torchs(dtype, grad):
    for given, routed in samples(dtype, grad=grad):
        if given.kwargs.get("dropout_p"):
            continue
        tensors = (given.input, *given.args)
        stock = called(tensors, given.kwargs, grad=grad)
        got, calls = in_block(called, tensors, given.kwargs, grad=grad)
        assert calls == routed
        exact = called(*widened(given), grad=grad)
        for ours, theirs, right in zip(got, stock, exact, strict=True):
            assert ours.dtype == theirs.dtype == dtype
            assert ours.shape == theirs.shape
            error, usual = ((t.double() - right).abs().max() for t in (ours, theirs))
            # Nothing here is more exact than float64, so there torch's own error is not seen.
            least = 1e-11 if dtype == torch.float64 else 64 * torch.finfo(dtype).eps
            assert error <= 2 * usual + least * right.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_with_dropout_drop_weights_and_scale_the_others(dtype):
    dropped, all_of_them = 0, 0
    for given, routed in samples(dtype):
        share = given.kwargs.get("dropout_p")
        if not share:
            continue
        key, value = given.args
        # Values that show each weight.
        units = torch.eye(key.shape[-2], dtype=dtype, device=DEVICE).expand(*value.shape[:-1], -1)
        tensors = (given.input, key, units)
        (weights,) = called(tensors, {**given.kwargs, "dropout_p": 0.0})
        (got,), calls = in_block(called, tensors, given.kwargs)
        assert calls == routed
        kept = got != 0
        scaled = weights / (1 - share)
        torch.testing.assert_close(got[kept], scaled[kept], atol=2e-2, rtol=2e-2)
        dropped += int((~kept & (weights > 1e-3)).sum())
        all_of_them += int((weights > 1e-3).sum())
    assert 0.4 < dropped / all_of_them < 0.6


WRONG = {
    "dtype of the key": lambda q, k, v, named: ((q, k.to(torch.float32), v), named),
    "head_dim of the key": lambda q, k, v, named: ((q, k[..., :-1], v), named),
    "length of the value": lambda q, k, v, named: ((q, k, v[..., :-1, :]), named),
    "heads of the key": lambda q, k, v, named: ((q, k[..., :3, :, :], v[..., :3, :, :]), named),
    "a mask of integers": lambda q, k, v, named: (
        (q, k, v),
        named | {"attn_mask": torch.ones(3, 6, device=DEVICE).int()},
    ),
    "a mask of another length": lambda q, k, v, named: (
        (q, k, v),
        named | {"attn_mask": torch.ones(3, 5, device=DEVICE).bool()},
    ),
    "a mask of another dtype": lambda q, k, v, named: (
        (q, k, v),
        named | {"attn_mask": torch.ones(3, 6, device=DEVICE).to(torch.float16)},
    ),
    "a mask beside is_causal": lambda q, k, v, named: (
        (q, k, v),
        named | {"attn_mask": torch.ones(3, 6, device=DEVICE).bool(), "is_causal": True},
    ),
    "dropout below zero": lambda q, k, v, named: ((q, k, v), named | {"dropout_p": -0.1}),
    "dropout above one": lambda q, k, v, named: ((q, k, v), named | {"dropout_p": 1.1}),
    "a vector": lambda q, k, v, named: ((q.flatten(), k, v), named),
    "an unknown name": lambda q, k, v, named: ((q, k, v), named | {"mask": None}),
    "integers": lambda q, k, v, named: ((q.int(), k.int(), v.int()), named),
    "no tensor": lambda q, _, v, named: ((q, None, v), named),
}


def outcome(tensors, named):
    """Return what a call raises, or gives."""
    try:
        return called(tensors, named)[0]
    except Exception as error:  # noqa: BLE001 - whatever torch raises is what counts.
        return type(error), str(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_for_torch_is_wrong_in_the_same_words(wrong, dtype):
    raised = 0
    for given, _ in samples(dtype):
        tensors, named = WRONG[wrong](given.input, *given.args, dict(given.kwargs))
        want = outcome(tensors, named)
        got, _ = in_block(outcome, tensors, named)
        if isinstance(want, tuple):
            raised += 1
            assert got == want
        elif not named.get("dropout_p"):
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, equal_nan=True)
    assert raised or (wrong == "dtype of the key" and dtype == torch.float32)
