"""Packed sequences, a log-sum-exp and blocks of override() on the short way of repeated calls."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.spy import profiled
from support.variations import tensors

import attnroute
from attnroute import masks
from attnroute.api import checkpoint, dispatch
from attnroute.api.records import Given

pytestmark = pytest.mark.usefixtures("fresh")


SUMS = torch.tensor([0, 3, 3, 9, 12], dtype=torch.int32)
PACKED = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "one tensor for both": {"is_causal": True, "cu_seqlens_kv": SUMS},
    "bounds": {"is_causal": True, "max_seqlen_q": 8, "max_seqlen_kv": 7},
    "with a log-sum-exp": {"return_lse": True},
    "with a sink": {"is_causal": True, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "on chunked": {"is_causal": True, "backend": "chunked"},
}


def tokens(*, train):
    """Return a packed batch whose tokens lie as a projection to all heads leaves them."""
    whole = torch.randn(12, 8, 16)
    return [t.requires_grad_(train) for t in whole.split([4, 2, 2], 1)]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PACKED)
def test_sequences_go_the_short_way_and_are_right(name, train, ways):
    arguments = {"layout": "thd", "cu_seqlens_q": SUMS, **PACKED[name]}
    for n in range(4):
        inputs = tokens(train=train)
        out, want = attnroute.attention(*inputs, **arguments), dispatch.run(Given(*inputs, **arguments))
        ways.pop()
        if arguments.get("return_lse"):
            torch.testing.assert_close(out[1], want[1])
            out = out[0]
        assert error(out, want[0]) <= TOLERANCE[torch.float32]
        assert out.stride() == want[0].stride()
        if train:
            grad = torch.randn_like(out)
            pair = [torch.autograd.grad(o, inputs, grad) for o in (out, want[0])]
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
        assert ways[-1] == ("short" if n else "long")


def test_sums_that_change_are_read_again(ways):
    inputs, sums = tokens(train=False), SUMS.clone()
    given = {"layout": "thd", "cu_seqlens_q": sums, "is_causal": True}
    for cut in (3, 5):
        sums[1:3] = cut
        for _ in range(3):
            out = attnroute.attention(*inputs, **given)
        query, key, value = (t.transpose(0, 1)[None] for t in inputs)
        allowed = masks.Documents(cu_seqlens=sums) & masks.Causal()
        want = attend(query, key, value, allowed=allowed.materialize(12, 12))[0]
        assert error(out, want[0].transpose(0, 1)) <= TOLERANCE[torch.float32]
    assert ways == ["long", "short", "short"] * 2


def test_sums_are_not_kept_alive(ways):
    inputs, sums = tokens(train=False), SUMS.clone()
    for _ in range(3):
        attnroute.attention(*inputs, layout="thd", cu_seqlens_q=sums)
    assert ways[-1] == "short"
    gone = weakref.ref(sums.untyped_storage())
    del sums
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "other",
    [
        {"cu_seqlens_kv": SUMS.clone()},
        {"max_seqlen_q": 7},
        {"max_seqlen_kv": 7},
        {"return_lse": True},
        {"is_causal": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_sequences_with_another_argument_are_another_call(other, ways):
    inputs = tokens(train=False)
    given = {"layout": "thd", "cu_seqlens_q": SUMS}
    for _ in range(3):
        attnroute.attention(*inputs, **given)
    attnroute.attention(*inputs, **given, **other)
    assert ways == ["long", "short", "short", "long"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_seqlen_q": 7.0},
        {"max_seqlen_kv": True},
        {"cu_seqlens_q": None},
        {"mask": torch.ones(12, 12, dtype=torch.bool)},
        {"layout": "bshd"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_sequences_with_a_wrong_argument_are_refused_every_time(wrong):
    inputs = tokens(train=False)
    for given in ({}, {"max_seqlen_q": 7}, {"max_seqlen_kv": 7}):
        for _ in range(3):
            attnroute.attention(*inputs, layout="thd", cu_seqlens_q=SUMS, **given)
    for _ in range(2):
        with pytest.raises(attnroute.ArgumentError):
            attnroute.attention(*inputs, **{"layout": "thd", "cu_seqlens_q": SUMS, **wrong})


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_log_sum_exp_comes_the_short_way_too(layout, train, ways):
    for n in range(3):
        inputs = [t.requires_grad_(train) for t in tensors()]
        passed = inputs if layout == "bhsd" else [t.transpose(1, 2) for t in inputs]
        out, lse = attnroute.attention(*passed, layout=layout, is_causal=True, return_lse=True)
        want, want_lse = dispatch.run(Given(*passed, layout=layout, is_causal=True, return_lse=True))
        ways.pop()
        torch.testing.assert_close((out, lse), (want, want_lse))
        assert ways[-1] == ("short" if n else "long")


# Inside of override().


def test_calls_go_the_short_way_to_its_backend(ways):
    inputs = tensors()
    want = attend(*inputs)[0]
    for _ in range(3):
        # Each block is another object; what it says is the same.
        with attnroute.override(backend="chunked"), profiled("chunked"):
            out = attnroute.attention(*inputs)
        assert error(out, want) <= TOLERANCE[torch.float32]
    assert ways == ["long", "short", "short"]


def test_other_settings_are_another_call(ways):
    inputs = tensors()
    for backend in ("chunked", "math", "chunked", "math"):
        with attnroute.override(backend=backend), profiled(backend):
            attnroute.attention(*inputs)
    assert ways == ["long"] * 4
    with attnroute.override(backend="math"):
        attnroute.attention(*inputs)
        with attnroute.override(recognize=False):
            attnroute.attention(*inputs)
    assert ways[4:] == ["short", "long"]


def test_neither_side_finds_the_repeats_of_the_other(ways):
    inputs = tensors()
    for _ in range(3):
        with profiled("flash"):
            attnroute.attention(*inputs)
        with attnroute.override(backend="chunked"), profiled("chunked"):
            attnroute.attention(*inputs)
    assert ways == ["long"] * 6


def test_a_call_outside_is_noted_inside_again(ways):
    """What a recompute takes is what the last call said."""
    inputs = tensors()
    block = attnroute.override(backend="chunked")
    for times in (3, 2):
        with block:
            for _ in range(times):
                attnroute.attention(*inputs)
        assert len(checkpoint.POLICIES) == 1
        attnroute.attention(*inputs)
        assert len(checkpoint.POLICIES) == 0
    assert ways == ["long", "short", "short", "long", "long", "short", "long"]


def test_backends_of_the_call_itself(ways):
    inputs = tensors()
    for _ in range(3):
        with attnroute.override(ban="math"), profiled("chunked"):
            attnroute.attention(*inputs, backend="chunked")
    assert ways == ["long", "short", "short"]


def test_what_the_process_no_longer_notes_goes_the_long_way(ways):
    inputs = tensors()
    with attnroute.override(backend="chunked"):
        attnroute.attention(*inputs)
        checkpoint.POLICIES.forget()
        attnroute.attention(*inputs)
        assert len(checkpoint.POLICIES) == 1
    assert ways == ["long", "long"]
