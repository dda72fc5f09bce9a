"""Calls of other packages' backends on a CUDA device, held against float64, and what ran by name.

Before each run the memory that it will get is filled with NaN, so that what a kernel leaves out shows.
"""

from __future__ import annotations

import importlib.util
import math
import re

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from support.cuda_problems import (
    TOLERANCE,
    apart,
    band,
    compare_gradients,
    packed,
    problem,
    spoil_memory,
    sums_of,
)
from support.kernel_names import KERNELS, PACKAGES, SHARED, names_of
from support.reference import attend, error

import attnroute
from attnroute import masks


def others(backend):
    """Return the pattern of the kernels that may not run."""
    rest = {b: pattern for b, pattern in (KERNELS | PACKAGES).items() if b not in ("math", "cudnn_fe", "te")}
    rest.pop(backend, None)
    if backend in SHARED:
        del rest[SHARED[backend]]
    return "|".join(rest.values())


DISTRIBUTIONS = {
    "fa3": ("xformers", "xformers or flash-attn-3"),
    "fa4": ("flash_attn.cute", "flash-attn-4"),
    "flex_fa4": ("flash_attn.cute", "flash-attn-4"),
    "cudnn_fe": ("cudnn", "nvidia-cudnn-frontend"),
}
"""What to import, and what brings it, of the packages that go into one environment."""
TORCHS = "aten::_scaled_dot_product_cudnn_attention"


def require(module, distribution):
    """Fail where a package is missing: a skip would look like a pass."""
    if importlib.util.find_spec(module) is None:
        pytest.fail(f"{module} cannot be imported here; put {distribution} on PYTHONPATH to run this test.")


def check_names(backend, on_device, names, *, train=False):
    """Fail unless the backend's operators and kernels ran, and nobody else's."""
    kernel = PACKAGES[backend]
    assert any(re.search(kernel, name) for name in on_device), f"no kernel of {backend}: {sorted(on_device)}"
    assert not any(re.search(others(backend), name) for name in on_device), sorted(on_device)
    assert f"attnroute::{backend}" in names, sorted(names)
    assert (f"attnroute::{backend}_backward" in names) == train
    assert not any(name.startswith((TORCHS, "attnroute::chunked")) for name in names), sorted(names)


def check(backend, inputs, mask=None, *, allowed=None, train=True, tolerance=None, **given):
    """Run one padded call, forward and backward, and hold everything against float64."""
    inputs = tuple(t.detach().requires_grad_(train) for t in inputs)
    sink = given.get("sink")
    trained = [*inputs, sink] if sink is not None and sink.requires_grad else list(inputs)
    scores = {"scale": given.get("scale"), "softcap": given.get("softcap", 0.0)}
    want, want_lse = attend(*inputs, allowed=allowed, sink=sink, **scores)
    decision = attnroute.explain(*inputs, mask, backend=backend, return_lse=True, **given)
    assert decision.selected == backend, str(decision)
    cotangent = torch.randn_like(want)

    def run():
        spoil_memory()
        out, lse = attnroute.attention(*inputs, mask, backend=backend, return_lse=True, **given)
        grads = torch.autograd.grad(out, trained, cotangent.to(out.dtype)) if train else ()
        return out, lse, grads

    run()
    (out, lse, grads), on_device, names = names_of(run)
    check_names(backend, on_device, names, train=train)
    tolerance = tolerance or TOLERANCE[out.dtype]
    assert error(out, want) <= tolerance
    hold_lse(lse, want_lse)
    if train:
        wanted = torch.autograd.grad(want, trained, cotangent.to(out.dtype).double())
        for name, got, true in zip(("dq", "dk", "dv", "dsink"), grads, wanted, strict=False):
            assert error(got, true.double(), floor=2.0) <= 2 * tolerance, name
    return decision


def hold_lse(lse, want):
    assert lse.dtype == torch.float32
    assert torch.equal(lse == -math.inf, want == -math.inf)
    finite = want > -math.inf
    size = want[finite].abs().max().clamp(min=1.0)
    assert (lse.double() - want)[finite].abs().max() <= 1e-3 * size


def check_packed(backend, lengths_q, lengths_kv=None, *, heads=(4, 2), train=True, head_dim=64, **band_given):
    """Run one call of layout thd, and hold everything against each sequence by itself."""
    cross = lengths_kv is not None
    lengths_kv = lengths_kv if cross else lengths_q
    inputs = packed(lengths_q, lengths_kv, heads=heads, head_dim=head_dim, train=train)
    given = {"layout": "thd", "cu_seqlens_q": sums_of(lengths_q), "return_lse": True, **band_given}
    given |= {"max_seqlen_q": max(lengths_q), "max_seqlen_kv": max(lengths_kv)}
    if cross:
        given["cu_seqlens_kv"] = sums_of(lengths_kv)
    if cross and band_given:
        given["causal_alignment"] = "bottom_right"
    sides = (None, 0) if band_given.get("is_causal") else band_given.get("window", (None, None))
    want, want_lse = apart(inputs, lengths_q, lengths_kv, *sides)
    decision = attnroute.explain(*inputs, backend=backend, **given)
    assert decision.selected == backend, str(decision)
    cotangent = torch.randn_like(want)

    def run():
        spoil_memory()
        out, lse = attnroute.attention(*inputs, backend=backend, **given)
        return out, lse, torch.autograd.grad(out, inputs, cotangent.to(out.dtype)) if train else ()

    run()
    (out, lse, grads), on_device, names = names_of(run)
    check_names(backend, on_device, names, train=train)
    tolerance = TOLERANCE[out.dtype]
    assert error(out, want) <= tolerance
    hold_lse(lse, want_lse)
    assert (out.transpose(0, 1)[want_lse == -math.inf] == 0).all()
    if train:
        wanted = torch.autograd.grad(want, inputs, cotangent)
        compare_gradients(grads, wanted, (want == 0).all(-1), tolerance)


def rejected(backend, inputs, **given):
    """Hold that a call outside the rows is refused, with a reason, and not run."""
    verdict = attnroute.explain(*inputs, **given).verdict(backend)
    assert verdict.status == "rejected", verdict
    with pytest.raises(attnroute.AttnRouteError):
        attnroute.attention(*inputs, backend=backend, **given)


def check_compiled(backend):
    """Compile without a graph break; the same kernel runs, and few lengths compile anew."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def call(query, key, value):
        return attnroute.attention(query, key, value, is_causal=True, backend=backend) * 1.0

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for length in (128, 256, 384, 1024):
        inputs = problem(seqlen_q=length, seqlen_kv=length)
        want = call(*inputs)
        cotangent = torch.randn_like(want)

        def both(inputs=inputs, cotangent=cotangent):
            out = compiled(*inputs)
            return out, torch.autograd.grad(out, inputs, cotangent)

        both()
        (out, grads), on_device, names = names_of(both)
        check_names(backend, on_device, names, train=True)
        assert error(out, want.double()) <= TOLERANCE[out.dtype]
        for got, true in zip(grads, torch.autograd.grad(want, inputs, cotangent), strict=True):
            assert error(got, true.double(), floor=2.0) <= 2 * TOLERANCE[out.dtype]
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def check_captured(backend, mask=None, **given):
    """Capture a call in a CUDA graph; a replay with other values equals the eager call."""
    inputs = [t.detach() for t in problem(seqlen_q=256, seqlen_kv=256)]

    def call():
        return attnroute.attention(*inputs, mask, backend=backend, **given)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for tensor in inputs:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call())


def check_again(backend, *, together=False, **options):
    """Run backwards again and again, and where asked for several outputs at once, against the definition."""
    inputs = problem()
    wanted = attend(*inputs, allowed=band(130, 130, None, 0), sink=options.get("sink"))[0]
    many = torch.randn(2, *inputs[0].shape, device="cuda").to(inputs[0].dtype)
    true = [torch.autograd.grad(wanted, inputs, one.double(), retain_graph=True) for one in many]

    def near(grads, expected):
        for got, want in zip(grads, expected, strict=True):
            assert error(got, want.double(), floor=2.0) <= 2 * TOLERANCE[got.dtype]

    # What the first backward of compiled code asks for need not be what the next ones do.
    for keep in ({}, {"retain_graph": True}, {"create_graph": True}):
        out = attnroute.attention(*inputs, is_causal=True, backend=backend, **options)
        for _ in range(3 if keep else 1):
            near(torch.autograd.grad(out, inputs, many[0], **keep), true[0])
    if together:
        out = attnroute.attention(*inputs, is_causal=True, backend=backend, **options)
        grads = torch.autograd.grad(out, inputs, many, is_grads_batched=True)
        near(grads, [torch.stack(parts) for parts in zip(*true, strict=True)])


def check_checkpoint(backend, *, use_reentrant, check=None):
    """Recompute the forward in the backward: the same kernel, the same gradients.

    `check(on_device, names)` holds what ran; by default that it was the backend's, backward included.
    """
    inputs = problem()

    def call(query, key, value):
        return attnroute.attention(query, key, value, is_causal=True, backend=backend)

    cotangent = torch.randn_like(inputs[0])
    plain = torch.autograd.grad(call(*inputs), inputs, cotangent)

    def again():
        for tensor in inputs:
            tensor.grad = None
        torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=use_reentrant).backward(cotangent)

    _, on_device, names = names_of(again)
    if check is None:
        check_names(backend, on_device, names, train=True)
    else:
        check(on_device, names)
    for tensor, want in zip(inputs, plain, strict=True):
        assert error(tensor.grad, want.double(), floor=2.0) <= TOLERANCE[want.dtype]


BANDS = {
    "causal": ({"is_causal": True}, 130, 130, (None, 0)),
    "bottom right": ({"is_causal": True, "causal_alignment": "bottom_right"}, 100, 300, (None, 200)),
    "top left": ({"is_causal": True, "causal_alignment": "top_left"}, 100, 300, (None, 0)),
    "window": ({"window": (20, 0), "causal_alignment": "top_left"}, 130, 130, (-20, 0)),
    "window, bottom right": ({"window": (20, 0), "causal_alignment": "bottom_right"}, 100, 300, (180, 200)),
    "both sides": ({"window": (20, 7), "causal_alignment": "top_left"}, 130, 130, (-20, 7)),
}
"""Arguments, lengths, and smallest and largest key index minus query index."""


def check_band(backend, case, **changes):
    given, seqlen_q, seqlen_kv, sides = BANDS[case]
    allowed = band(seqlen_q, seqlen_kv, *sides)
    check(backend, problem(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, **changes), allowed=allowed, **given)


def check_decode(backend, *, padded):
    """One query of each row beside 8192 keys, some of which may not exist."""
    inputs = [t.detach() for t in problem(2, 8, 2, 1, 8192, 128)]
    counts = torch.tensor([8192, 5001], device="cuda")
    if not padded:
        check(backend, inputs, train=False, is_causal=True, causal_alignment="bottom_right")
        return
    kept = torch.arange(8192, device="cuda") < counts[:, None]
    mask = masks.KeyPadding(lengths=counts)
    if backend not in ("cudnn_fe", "te"):
        check(backend, inputs, mask, allowed=kept[:, None, None], train=False)
        return
    # For single queries of ragged batches with shared heads their log-sum-exp is wrong, their output right.
    assert attnroute.explain(*inputs, mask, return_lse=True).verdict(backend).status == "rejected"
    want, _ = attend(*inputs, allowed=kept[:, None, None])
    out, on_device, names = names_of(lambda: attnroute.attention(*inputs, mask, backend=backend))
    check_names(backend, on_device, names)
    assert error(out, want) <= TOLERANCE[out.dtype]
