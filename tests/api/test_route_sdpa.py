"""`route_sdpa()`: calls of torch's function in code that nobody edits run on attnroute, and mean the same."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.reference import attend
from support.repair_inputs import stored
from support.routed import KEY, QUERY, VALUE, normal, routed_calls
from support.spy import ran
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_before

import attnroute

SMALL = normal(2, 2, 9, 16)
KEEP = normal(2, 4, 6, 9) > -0.5
EMPTY = KEEP.clone()
EMPTY[:, :, 2] = False
FIVE = (normal(3, 2, 4, 6, 16), normal(3, 2, 4, 9, 16), normal(3, 2, 4, 9, 16))


def added(keep):
    """Return the float mask that says the same."""
    return torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)


KNOWN = {
    "plain": ((QUERY, KEY, VALUE), {}),
    "positional": ((QUERY, KEY, VALUE, KEEP, 0.0, False), {}),
    "top-left causal": ((QUERY, KEY, VALUE), {"is_causal": True}),
    "more queries than keys": ((KEY, QUERY, QUERY), {"is_causal": True}),
    "scale": ((QUERY, KEY, VALUE), {"scale": 0.3}),
    "scale of zero": ((QUERY, KEY, VALUE), {"scale": 0.0}),
    "bool mask": ((QUERY, KEY, VALUE, KEEP), {}),
    "bool mask, 2-D": ((QUERY, KEY, VALUE, KEEP[0, 0]), {}),
    "bool mask, 3-D": ((QUERY, KEY, VALUE, KEEP[0]), {}),
    "padding": ((QUERY, KEY, VALUE, KEEP[:, :1, :1]), {}),
    "rows without keys": ((QUERY, KEY, VALUE, EMPTY), {}),
    "float mask": ((QUERY, KEY, VALUE, normal(4, 6, 9)), {}),
    "float mask of -inf": ((QUERY, KEY, VALUE, added(KEEP[:, :1])), {}),
    "float rows without keys": ((QUERY, KEY, VALUE, added(EMPTY)), {}),
    "gqa": ((QUERY, SMALL, SMALL), {"enable_gqa": True}),
    "gqa, causal": ((QUERY, SMALL, SMALL), {"enable_gqa": True, "is_causal": True}),
    "other head_dim of values": ((QUERY, KEY, normal(2, 4, 9, 8)), {}),
    "3-D": ((QUERY[0], KEY[0], VALUE[0]), {"is_causal": True}),
    "3-D, mask": ((QUERY[0], KEY[0], VALUE[0], KEEP[0]), {}),
    "3-D, gqa": ((QUERY[0], SMALL[0], SMALL[0]), {"enable_gqa": True}),
    "5-D": (FIVE, {}),
    "5-D, mask": ((*FIVE, KEEP), {}),
    "5-D, mask of one batch": ((*FIVE, KEEP[None, :1, :1]), {}),
    "5-D, mask of each": ((*FIVE, normal(3, 1, 1, 6, 9) > -0.5), {}),
    "bfloat16": (tuple(t.bfloat16() for t in (QUERY, KEY, VALUE)), {}),
    "float64": (tuple(t.double() for t in (QUERY, KEY, VALUE)), {"is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "named"), KNOWN.values(), ids=KNOWN)
def test_a_call_is_routed_and_gives_what_torch_gives(tensors, named):
    inputs = [
        t.clone().requires_grad_(t.is_floating_point()) for t in tensors[:4] if isinstance(t, torch.Tensor)
    ]
    rest = [t for t in tensors if not isinstance(t, torch.Tensor)]

    def both():
        out = imported_before(*inputs, *rest, **named)
        floats = [t for t in inputs if t.requires_grad]
        return out, *torch.autograd.grad(out.float().sin().sum(), floats)

    want = both()
    got, calls = routed_calls(both)
    assert calls == 1
    tolerance = (
        {"atol": 2e-2, "rtol": 2e-2} if inputs[0].dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}
    )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)


VIEWS = {
    "tokens outermost": lambda t: stored(t, "bshd"),
    "sliced": lambda t: stored(t, "row gap"),
    "starts between": lambda t: stored(t, "shifted"),
    "last dimension strided": lambda t: stored(t, "last stride"),
    "one head for all": lambda t: t[:, :1].expand(t.shape),
}


@pytest.mark.parametrize("lies", VIEWS)
@pytest.mark.parametrize("how", ["plain", "causal", "mask"])
def test_views_are_routed_with_their_numbers(how, lies):
    inputs = [VIEWS[lies](t.clone()).requires_grad_() for t in (QUERY, KEY, VALUE)]
    allowed = {"plain": None, "causal": torch.ones(6, 9).tril().bool(), "mask": KEEP}[how]
    named = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": KEEP}}[how]
    with attnroute.trace() as trace, attnroute.route_sdpa():
        out = F.scaled_dot_product_attention(*inputs, **named)
    assert [call.backend for call in trace.calls] == ["flash"]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    want, _ = attend(*wide, allowed=allowed)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    for one, other in zip(got, torch.autograd.grad(want, wide, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


UNKNOWN = {
    "2-D": (QUERY[0, 0], KEY[0, 0], VALUE[0, 0]),
    "one key head without enable_gqa": (QUERY, KEY[:, :1], VALUE[:, :1]),
    "one key batch": (QUERY, KEY[:1], VALUE[:1]),
    "no keys": (QUERY, KEY[:, :, :0], VALUE[:, :, :0]),
    "is_causal beside a mask": (QUERY, KEY, VALUE, KEEP, 0.0, True),
    "meta": tuple(t.to("meta") for t in (QUERY, KEY, VALUE)),
    "a subclass": (QUERY, KEY, VALUE, causal_lower_right(6, 9)),
    "nested": (torch.nested.nested_tensor([normal(6, 4, 16), normal(5, 4, 16)], layout=torch.jagged),) * 3,
}  # fmt: skip


@pytest.mark.parametrize("tensors", UNKNOWN.values(), ids=UNKNOWN)
def test_what_attention_does_not_know_is_torchs_own(tensors):
    def run():
        if tensors[0].is_nested:
            return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors)).values()
        return F.scaled_dot_product_attention(*tensors)

    with warnings.catch_warnings():
        # Nested tensors are a prototype.
        warnings.simplefilter("ignore")
        want = run()
        got, calls = routed_calls(run)
    assert calls == 0
    assert got.device == want.device
    if not got.is_meta:
        assert torch.equal(got, want)


REFUSED = {
    "heads without enable_gqa": ((QUERY, SMALL, SMALL), {}),
    "a mask of another shape": ((QUERY, KEY, VALUE, KEEP[..., :4]), {}),
    "a mask of integers": ((QUERY, KEY, VALUE, KEEP.int()), {}),
    "dtypes": ((QUERY, KEY.double(), VALUE), {}),
    "an unknown argument": ((QUERY, KEY, VALUE), {"mask": KEEP}),
}


@pytest.mark.parametrize(("tensors", "named"), REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused_by_torch(tensors, named):
    with pytest.raises((RuntimeError, TypeError)) as stock:
        F.scaled_dot_product_attention(*tensors, **named)
    with attnroute.route_sdpa(), pytest.raises(stock.type) as routed:
        F.scaled_dot_product_attention(*tensors, **named)
    assert str(routed.value) == str(stock.value)


def test_dropout_is_applied():
    def run():
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(QUERY, KEY, torch.ones_like(VALUE), dropout_p=0.5)

    out, calls = routed_calls(run)
    assert calls == 1
    assert out.std() > 0.1
    assert abs(out.mean() - 1) < 0.1


def test_the_kernel_that_was_decided_runs():
    for backend in ("chunked", "flash", "math"):
        with attnroute.route_sdpa(), attnroute.override(backend=backend), ran(backend):
            imported_before(QUERY, KEY, VALUE)


def test_attention_itself_keeps_its_kernel_inside_of_the_block():
    with attnroute.route_sdpa():
        for _ in range(3):
            with ran("math"):
                attnroute.attention(QUERY, KEY, VALUE, backend="math")
            with attnroute.override(backend="chunked"):
                attnroute.attention(QUERY, KEY, VALUE, backend="flash")
    with attnroute.trace() as trace, attnroute.route_sdpa():
        attnroute.attention(QUERY, KEY, VALUE)
    assert [call.count for call in trace.calls] == [1]


def test_a_call_that_repeats_runs_the_same_kernel_with_and_without_modes_around_it():
    want = F.scaled_dot_product_attention(QUERY, KEY, VALUE)
    for _ in range(3):
        attnroute.attention(QUERY, KEY, VALUE)
    with attnroute.route_sdpa(), attnroute.route_sdpa():
        for _ in range(3):
            torch.testing.assert_close(attnroute.attention(QUERY, KEY, VALUE), want)
            torch.testing.assert_close(F.scaled_dot_product_attention(QUERY, KEY, VALUE), want)


def test_code_that_chose_the_composite_function_gets_it():
    def run():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(QUERY, KEY, VALUE)

    assert routed_calls(run)[1] == 0


def test_transforms_are_torchs_own():
    want = torch.vmap(F.scaled_dot_product_attention)(QUERY, KEY, VALUE)
    got, calls = routed_calls(lambda: torch.vmap(F.scaled_dot_product_attention)(QUERY, KEY, VALUE))
    assert calls == 0
    torch.testing.assert_close(got, want)


def test_autocast_casts_as_for_torch():
    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(QUERY, KEY, VALUE.bfloat16())

    want = run()
    got, calls = routed_calls(run)
    assert calls == 1
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
