"""On a CUDA device: what runs is what was named, by the profiler, and it equals float64, gradients too."""

from __future__ import annotations

import math

import pytest
import torch
from support.cuda_problems import TOLERANCE, band, problem
from support.kernel_names import backend_seen, names_of
from support.reference import attend, error

import attnroute
from attnroute import masks

pytestmark = pytest.mark.gpu


def check(inputs, backend, *, mask=None, allowed=None, bias=None, train=True, want_backend=None, **rest):
    """Run one call, forward and backward, and hold everything against float64."""
    if not train:
        inputs = tuple(t.detach() for t in inputs)
    decision = attnroute.explain(*inputs, mask, bias=bias, backend=backend, **rest)
    assert decision.selected is not None, str(decision)
    trained = [*inputs, bias] if bias is not None and bias.requires_grad else list(inputs)
    want, want_lse = attend(*inputs, allowed=allowed, bias=bias, scale=rest.get("scale"))
    cotangent = torch.randn_like(want)

    def run():
        out = attnroute.attention(*inputs, mask, bias=bias, backend=backend, **rest)
        if not train:
            return out, ()
        return out, torch.autograd.grad(out, trained, cotangent.to(out.dtype))

    run()
    (out, got), on_device, names = names_of(run)
    assert backend_seen(on_device, names) == {want_backend or decision.selected}, sorted(on_device)
    tolerance = TOLERANCE[out.dtype]
    assert error(out, want) <= tolerance
    assert (out[want_lse == -math.inf] == 0).all()
    if train:
        wanted = torch.autograd.grad(want, trained, cotangent.to(out.dtype).double())
        for name, a, b in zip(("dq", "dk", "dv", "dbias"), got, wanted, strict=False):
            assert error(a, b, floor=2.0) <= 2 * tolerance, f"{name}: {error(a, b, floor=2.0)}"
    return decision


FUSED = ("flash", "cudnn", "efficient", "chunked", "math")


@pytest.mark.parametrize("head_dim", [8, 20, 64, 72, 128, 256])
@pytest.mark.parametrize("backend", FUSED)
def test_causal_grouped_heads(backend, head_dim):
    inputs = problem(head_dim=head_dim)
    decision = attnroute.explain(*inputs, is_causal=True)
    if decision.verdict(backend).status != "eligible":
        assert head_dim % 8, str(decision)
        return
    check(inputs, backend, is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_wide_heads_never_run_math(head_dim, train, heads_kv):
    inputs = problem(head_dim=head_dim, heads_kv=heads_kv, seqlen_q=257, seqlen_kv=257)
    decision = check(inputs, None, is_causal=True, allowed=band(257, 257, None, 0), train=train)
    assert decision.selected in ("chunked", "efficient", "cudnn_fe")
    assert decision.stock.backend == ("math" if heads_kv < 4 else "efficient")


@pytest.mark.parametrize("backend", ["cudnn", "efficient", "chunked", "math"])
def test_value_head_differs(backend):
    check(problem(head_dim=192, head_dim_v=128), backend, is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(130, 130), (100, 300), (300, 100), (1, 77)])
@pytest.mark.parametrize("backend", FUSED)
def test_window_at_the_bottom_right(backend, seqlen_q, seqlen_kv):
    offset = seqlen_kv - seqlen_q
    check(
        problem(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv),
        backend,
        window=(20, 0),
        causal_alignment="bottom_right",
        allowed=band(seqlen_q, seqlen_kv, offset - 20, offset),
        train=backend != "cudnn" or seqlen_q > 1,
    )


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(100, 300), (300, 100)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("backend", [*FUSED, None])
def test_causal_with_unequal_lengths(backend, alignment, seqlen_q, seqlen_kv):
    inputs = problem(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    offset = seqlen_kv - seqlen_q if alignment == "bottom_right" else 0
    decision = attnroute.explain(*inputs, is_causal=True, causal_alignment=alignment)
    if backend is not None and decision.verdict(backend).status != "eligible":
        assert (backend, alignment) == ("flash", "top_left")
        return
    allowed = band(seqlen_q, seqlen_kv, None, offset)
    check(inputs, backend, is_causal=True, causal_alignment=alignment, allowed=allowed)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_documents(backend, layout):
    ids = torch.repeat_interleave(torch.arange(4, device="cuda"), torch.tensor([50, 1, 0, 79], device="cuda"))
    allowed = (ids[:, None] == ids) & band(130, 130, None, 0)
    mask = masks.Causal() & masks.Documents(lengths=[50, 1, 0, 79])
    inputs = problem(batch=3)
    if layout == "bhsd":
        check(inputs, backend, mask=mask, allowed=allowed)
        return
    turned = [t.detach().transpose(1, 2).contiguous() for t in inputs]
    out = attnroute.attention(*turned, mask, layout="bshd", backend=backend).transpose(1, 2)
    assert error(out, attend(*inputs, allowed=allowed)[0]) <= TOLERANCE[out.dtype]


@pytest.mark.parametrize("backend", ["cudnn", "efficient", "chunked", "math", None])
@pytest.mark.parametrize("length", [128, 130, 192, 257])
def test_dense_mask_with_empty_rows(backend, length):
    torch.manual_seed(1)
    mask = torch.rand(2, 1, length, length, device="cuda") < 0.5
    mask[:, :, 3] = False
    mask[1, :, 40:70] = False
    inputs = problem(seqlen_q=length, seqlen_kv=length)
    decision = attnroute.explain(*inputs, mask)
    if backend is not None and decision.verdict(backend).status != "eligible":
        assert (backend, length) == ("cudnn", 192), str(decision)
        return
    check(inputs, backend, mask=mask, allowed=mask)


@pytest.mark.parametrize("backend", ["cudnn", "efficient", "chunked", "math"])
def test_key_padding_with_a_row_of_nothing(backend):
    kept = torch.arange(130, device="cuda") < torch.tensor([130, 0], device="cuda")[:, None]
    check(problem(), backend, mask=masks.KeyPadding(lengths=[130, 0]), allowed=kept[:, None, None])


@pytest.mark.parametrize("backend", ["efficient", "chunked", "math"])
@pytest.mark.parametrize("shape", [(130, 130), (1, 4, 130, 130), (2, 1, 1, 130)])
def test_bias_gets_its_gradient(backend, shape):
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    check(problem(), backend, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes(dtype):
    check(problem(dtype=dtype), None, is_causal=True, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", None])
@pytest.mark.parametrize("form", ["shifted", "row gap", "last stride", "heads of stride 0", "bshd"])
def test_storage(backend, form):
    query, key, value = (t.detach() for t in problem(heads_kv=4, seqlen_q=128, seqlen_kv=128))

    def stored(tensor):
        if form == "shifted":
            return (
                torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:]
                .copy_(tensor.flatten())
                .view(tensor.shape)
            )
        if form == "row gap":
            return torch.cat([tensor, tensor[..., :1]], -1)[..., :-1]
        if form == "last stride":
            return tensor.transpose(2, 3).contiguous().transpose(2, 3)
        if form == "bshd":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return tensor[:, :1].expand(tensor.shape)

    inputs = (
        (query, *(stored(t) for t in (key, value)))
        if form.startswith("heads")
        else tuple(map(stored, (query, key, value)))
    )
    check(inputs, backend, train=False)


@pytest.mark.parametrize("length", [64, 192, 320, 704, 1088])
@pytest.mark.parametrize("masked", [False, True])
def test_no_nan_gradient_for_very_negative_scores(length, masked):
    query, key, value = problem(heads_kv=4, seqlen_q=length, seqlen_kv=length, mean=4.0)
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda") if masked else None
    decision = check((query, key, value), None, mask=mask, allowed=None)
    assert decision.selected != "cudnn"


@pytest.mark.parametrize("scale", [0.0, -0.2, 3.0])
@pytest.mark.parametrize("causal", [False, True])
def test_any_scale(scale, causal):
    check(problem(), None, is_causal=causal, allowed=band(130, 130, None, 0) if causal else None, scale=scale)


def test_float32_mask_beside_float16_query():
    mask = torch.full((130, 130), -math.inf, device="cuda").triu(1)
    check(problem(dtype=torch.float16), None, mask=mask, allowed=band(130, 130, None, 0))


@pytest.mark.parametrize("shape", [(1, 65536), (65536, 1), (70000, 1)])
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_more_rows_than_a_grid_has(backend, shape):
    batch, heads = shape
    inputs = problem(
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=16,
        seqlen_kv=16,
        head_dim=16,
        dtype=torch.float16,
    )
    decision = attnroute.explain(*(t.detach() for t in inputs))
    if decision.verdict(backend).status != "eligible":
        pytest.fail(str(decision))
    check(inputs, backend, train=False)


@pytest.mark.parametrize("backend", FUSED[:-1])
def test_log_sum_exp(backend):
    inputs = tuple(t.detach() for t in problem(seqlen_q=100, seqlen_kv=75))
    allowed = band(100, 75, None, -25)
    _, want = attend(*inputs, allowed=allowed)
    rest = {"is_causal": True, "causal_alignment": "bottom_right", "return_lse": True}
    _, lse = attnroute.attention(*inputs, backend=backend, **rest)
    assert lse.shape == (2, 4, 100)
    assert lse.dtype == torch.float32
    assert torch.equal(lse == -math.inf, want == -math.inf)
    finite = want > -math.inf
    assert (lse.double() - want)[finite].abs().max() < 1e-3


def test_dropout_keeps_the_mean_and_follows_the_seed():
    query, key, value = (t.detach() for t in problem(seqlen_q=512, seqlen_kv=512, batch=8))
    for backend in ("flash", "chunked", "efficient"):
        torch.manual_seed(3)
        first = attnroute.attention(query, key, torch.ones_like(value), dropout_p=0.25, backend=backend)
        torch.manual_seed(3)
        again = attnroute.attention(query, key, torch.ones_like(value), dropout_p=0.25, backend=backend)
        assert torch.equal(first, again)
        assert abs(first.float().mean().item() - 1.0) < 1e-2
        assert first.float().std().item() > 1e-3


def test_recognised_causal_mask_runs_without_a_mask_tensor():
    mask = torch.ones(512, 512, dtype=torch.bool, device="cuda").tril()
    decision = check(problem(seqlen_q=512, seqlen_kv=512), None, mask=mask, allowed=mask)
    assert decision.verdict(decision.selected).repairs == ("recognize_mask",)
