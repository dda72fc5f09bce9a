"""vmap, functorch, forward mode and second derivatives: right, or refused."""

from __future__ import annotations

import pytest
import torch
from support.edge_inputs import close, doubles, normal
from support.reference import attend
from torch.autograd import forward_ad

import attnroute
from attnroute import masks

by_decomposition = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 0)], ids=str)
def test_vmap(in_dims):
    def run(q, k, v):
        return attnroute.attention(q, k, v, is_causal=True, causal_alignment="bottom_right")

    several = list(zip(*(normal() for _ in range(3)), strict=True))
    tensors = [one[0] if d is None else torch.stack(one, d) for one, d in zip(several, in_dims, strict=True)]
    out = torch.vmap(run, in_dims=in_dims)(*tensors)
    for n in range(3):
        one = [t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims, strict=True)]
        close(out[n], run(*one).double())


@pytest.mark.parametrize("beside", [None, "mask", "bias"])
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_vmap_over_a_mask_or_bias(kind, beside):
    query, key, value = normal()
    batched = torch.randn(3, 2, 1, 6, 9)
    batched = batched > -0.5 if kind == "mask" else batched
    other = (
        {}
        if beside in (None, kind)
        else {beside: torch.randn(6, 9) if beside == "bias" else torch.ones(9).bool()}
    )

    def run(extra):
        return attnroute.attention(query, key, value, **{kind: extra}, **other)

    out = torch.vmap(run)(batched)
    for n in range(3):
        close(out[n], run(batched[n]).double())


@by_decomposition
def test_the_gradient_of_a_gradient_by_functorch():
    query, key, value = doubles()

    def loss(function):
        return lambda q: function(q, key, value).square().sum()

    def own(q, k, v):
        return attnroute.attention(q, k, v)

    def wanted(q, k, v):
        return attend(q, k, v)[0]

    hessians = [torch.func.hessian(loss(f))(query) for f in (own, wanted)]
    close(*hessians, dtype=torch.float64)
    twice = [torch.func.grad(lambda q, f=f: torch.func.grad(loss(f))(q).sum())(query) for f in (own, wanted)]
    close(*twice, dtype=torch.float64)


def test_gradients_per_sample():
    query, key, value = doubles(batch=3)

    def loss(q, k, v):
        return attnroute.attention(q[None], k[None], v[None]).square().sum()

    got = torch.vmap(torch.func.grad(loss))(query, key, value)
    whole = query.clone().requires_grad_()
    want = torch.autograd.grad(attend(whole, key, value)[0].square().sum(), whole)[0]
    close(got, want, dtype=torch.float64)


@by_decomposition
def test_jvp_and_dual_numbers():
    primals, tangents = doubles(), doubles()
    want_out, want = torch.func.jvp(lambda *t: attend(*t)[0], primals, tangents)
    out, tangent = torch.func.jvp(attnroute.attention, primals, tangents)
    close(out, want_out, dtype=torch.float64)
    close(tangent, want, dtype=torch.float64)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
        assert attnroute.explain(*duals).call.context.transform == "forward_ad"
        close(forward_ad.unpack_dual(attnroute.attention(*duals)).tangent, want, dtype=torch.float64)
        plain = attnroute.explain(*primals)
    assert plain.call.context.transform is None


@by_decomposition
@pytest.mark.parametrize("masked", [False, True])
def test_tangents_of_a_bias(masked):
    query, key, value = doubles()
    bias, tangent = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    mask = torch.tensor([True, True, False, True]) if masked else None

    def own(b):
        return attnroute.attention(query, key, value, mask, bias=b)

    def wanted(b):
        return attend(query, key, value, allowed=mask, bias=b)[0]

    _, want = torch.func.jvp(wanted, (bias,), (tangent,))
    close(torch.func.jvp(own, (bias,), (tangent,))[1], want, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = own(forward_ad.make_dual(bias, tangent))
        close(forward_ad.unpack_dual(dual).tangent, want, dtype=torch.float64)


@pytest.mark.parametrize("how", ["override", "backend"])
@pytest.mark.parametrize("kind", ["plain", "causal", "padding", "bias"])
def test_gradients_of_gradients(how, kind):
    inputs = [t.requires_grad_() for t in doubles(batch=1)]
    arguments = {
        "plain": {},
        "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
        "padding": {"mask": masks.KeyPadding(lengths=[3])},
        "bias": {"bias": torch.randn(3, 4, dtype=torch.float64).requires_grad_()},
    }[kind]
    trained = [*inputs, *(t for t in arguments.values() if isinstance(t, torch.Tensor))]

    def run(*tensors):
        extra = {"bias": tensors[3]} if kind == "bias" else arguments
        if how == "backend":
            return attnroute.attention(*tensors[:3], backend="math", **extra)
        with attnroute.override(double_backward=True):
            return attnroute.attention(*tensors[:3], **extra)

    assert torch.autograd.gradcheck(run, trained)
    assert torch.autograd.gradgradcheck(run, trained)


def test_what_only_the_slow_tier_can_do_is_refused_where_that_is_not_allowed():
    with (
        attnroute.override(double_backward=True, strict=True),
        pytest.raises(attnroute.NoBackendError, match="strict"),
    ):
        attnroute.attention(*normal())


def test_a_second_derivative_that_nobody_announced_is_an_error_and_never_a_wrong_number():
    inputs = [t.requires_grad_() for t in doubles()]
    for backend in ("chunked", "flash"):
        out = attnroute.attention(*inputs, backend=backend)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError if backend == "flash" else attnroute.AttnRouteError):
            torch.autograd.grad(first[0].sum(), inputs)


PACKED = [torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
ONE_ROW = [torch.randn(1, heads, 9, 8, requires_grad=True) for heads in (4, 2, 2)]
SUMS = torch.tensor([[0, 4, 9], [0, 7, 9], [0, 0, 9]], dtype=torch.int32)
MAPPED = {
    "packed": (PACKED, lambda sums: {"layout": "thd", "cu_seqlens_q": sums}),
    "packed queries": (
        PACKED,
        lambda sums: {"layout": "thd", "cu_seqlens_q": sums, "cu_seqlens_kv": SUMS[0]},
    ),
    "packed keys": (PACKED, lambda sums: {"layout": "thd", "cu_seqlens_q": SUMS[0], "cu_seqlens_kv": sums}),
    "documents": (ONE_ROW, lambda sums: {"mask": masks.Documents(cu_seqlens=sums)}),
}


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
@pytest.mark.parametrize("causal", [{}, {"is_causal": True, "causal_alignment": "bottom_right"}])
@pytest.mark.parametrize("case", MAPPED)
def test_sums_of_sequences_for_each_sample(case, causal):
    """Inside of vmap nobody can read sums, so they are taken as those of a device are: unread."""
    inputs, options = MAPPED[case]

    def run(sums):
        return attnroute.attention(*inputs, **options(sums), **causal)

    got, want = torch.vmap(run)(SUMS), torch.stack([run(sums) for sums in SUMS])
    close(got, want.double())
    pairs = [torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)]
    for mapped, one_by_one in zip(*pairs, strict=True):
        close(mapped, one_by_one.double())
