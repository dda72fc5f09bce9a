"""What the executors on top of cuDNN's graph have to get right, whichever package sets the graph up."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from support import backwards
from support.reference import attend
from support.repair_inputs import stored

from attnroute import masks
from attnroute.executors.packages.request import Request
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.protocol import Inputs, Plan
from attnroute.masks.lowered.form import FULL, Extent
from attnroute.masks.objects.ragged import Ragged

HEADS = (4, 2)
FORMS = ("packed", "bshd", "row gap", "last stride")
ADVERSARIAL = (0.0, 30.0)
"""What is added to queries and taken from keys: the second makes every score very negative."""

PADDED = {
    "everything": (None, 5, 7),
    "causal": (masks.Causal(), 7, 7),
    "causal from the top left": (masks.Causal(), 5, 8),
    "causal from the top left, more queries": (masks.Causal(), 8, 5),
    "causal from the bottom right": (masks.Causal("bottom_right"), 5, 8),
    "window": (masks.Window(3, 1), 9, 9),
    "window from the top left": (masks.Window(3, 1), 5, 9),
    "window from the bottom right": (masks.Window(3, 1, "bottom_right"), 5, 9),
    "causal window": (masks.Window(2, 0), 9, 9),
    "causal window from the bottom right": (masks.Window(2, 0, "bottom_right"), 5, 9),
    "open at the right": (masks.Window(2, None, "bottom_right"), 5, 9),
    "open at the left": (masks.Window(None, 2, "bottom_right"), 5, 9),
    "one query": (masks.Causal("bottom_right"), 1, 9),
    "one query, window": (masks.Window(3, 0, "bottom_right"), 1, 9),
    "one query, top left": (masks.Causal(), 1, 9),
}
"""Mask, seqlen_q and seqlen_kv."""

DOCUMENTS = masks.Documents(lengths=[4, 0, 1, 4])
SEQUENCES = {
    "documents": (DOCUMENTS, 9, 9),
    "causal documents": (DOCUMENTS & masks.Causal(), 9, 9),
    "documents, window": (DOCUMENTS & masks.Window(1, 0), 9, 9),
    "padding": (masks.KeyPadding(lengths=[9, 0]), 6, 9),
    "padding at the left": (masks.KeyPadding(left=[2, 9]), 6, 9),
    "causal padding at the left": (masks.KeyPadding(left=[2, 8]) & masks.Causal("bottom_right"), 6, 9),
    "one query": (masks.KeyPadding(lengths=[9, 0]), 1, 9),
    "one query, padding at the left": (masks.KeyPadding(left=[3, 9]), 1, 9),
    "one query, causal": (masks.KeyPadding(left=[3, 9]) & masks.Causal("bottom_right"), 1, 9),
}
"""What `to_varlen` makes sequences of: mask, seqlen_q and seqlen_kv, for two batch rows."""

LENGTHS = ([3, 0, 5, 2, 0, 1], [4, 2, 0, 6, 0, 1])
BANDS = {
    "everything": (None, None),
    "causal": (None, 0),
    "window": (1, 0),
    "both sides": (1, 2),
    "open at the right": (1, None),
}
"""Left and right of the diagonal that ends with the last query and key of a sequence."""


def plan_of(backend, *repairs, training=True, **rest):
    return Plan(backend, repairs, training, return_lse=True, device_type="cuda", **rest)


def inputs_of(mask, seqlen_q, seqlen_kv, *, batch=2, shift=0.0, form="packed", dtype=torch.float64, **rest):
    def make(heads, length, mean):
        values = torch.randn(batch, heads, length, 8, dtype=dtype) + mean
        return stored(values, form).detach().requires_grad_()

    lowered = FULL if mask is None else mask.lower(FULL, Extent(batch, HEADS[0], seqlen_q, seqlen_kv))
    query, key = make(HEADS[0], seqlen_q, shift), make(HEADS[1], seqlen_kv, -shift)
    return Inputs(query, key, make(HEADS[1], seqlen_kv, 0.0), lowered, **rest)


def allowed_of(mask, inputs):
    if mask is None:
        return None
    batch, heads, seqlen_q, _ = inputs.query.shape
    return mask.materialize(seqlen_q, inputs.key.shape[2], batch=batch, num_heads_q=heads)


def trained(inputs):
    tensors = (inputs.query, inputs.key, inputs.value, inputs.sink)
    return [t for t in tensors if t is not None and t.requires_grad]


def hold(found, want, tensors, tolerance=1e-5):
    """Hold output, log-sum-exp and gradients against the definition; the log-sum-exp has float32's digits."""
    (out, lse), (want_out, want_lse) = found, want
    assert out.shape == want_out.shape
    assert (lse.dtype, lse.requires_grad) == (torch.float32, False)
    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse.detach(), rtol=tolerance, atol=tolerance)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, cotangent)
    wanted = torch.autograd.grad(want_out, tensors, cotangent.double())
    for got, true in zip(grads, wanted, strict=True):
        size = max(1.0, true.abs().max().item())
        torch.testing.assert_close(got.double(), true.double(), rtol=0.0, atol=20 * tolerance * size)


def check(executor, backend, mask, inputs, *repairs, **settings):
    """Run one call, forward and backward, and hold everything against the definition."""
    found = executor.run(inputs, plan_of(backend, *repairs, **settings))
    tensors = (inputs.query, inputs.key, inputs.value)
    given = {"allowed": allowed_of(mask, inputs), "scale": inputs.scale, "sink": inputs.sink}
    hold(found, attend(*tensors, **given), trained(inputs))


def check_without_gradients(executor, backend, mask, inputs, *repairs):
    """Run one call as inference does."""
    tensors = [t.detach() for t in (inputs.query, inputs.key, inputs.value)]
    inputs = Inputs(*tensors, inputs.mask, scale=inputs.scale, sink=inputs.sink)
    out, lse = executor.run(inputs, plan_of(backend, *repairs, training=False))
    want, want_lse = attend(*tensors, allowed=allowed_of(mask, inputs), sink=inputs.sink)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def sequences_of(left, right, *, lengths=LENGTHS, sink=None, dtype=torch.float64):
    """Return the mask of sequences with lengths of their own, and inputs of one batch row."""
    sums = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in lengths]
    longest = [max(n) for n in lengths]
    mask = Ragged(*sums, *longest, left=left, right=right, alignment="bottom_right")
    return mask, inputs_of(mask, sum(lengths[0]), sum(lengths[1]), batch=1, sink=sink, dtype=dtype)


def request_of(mask=None, seqlen_q=5, seqlen_kv=7, **changes):
    """Return a padded request as the executor gets it, with fields changed."""
    inputs = inputs_of(mask, seqlen_q, seqlen_kv)
    query, key, value = (t.detach().transpose(1, 2) for t in (inputs.query, inputs.key, inputs.value))
    given = dict.fromkeys(Request._fields)
    given |= {"query": query, "key": key, "value": value, "max_seqlen_q": seqlen_q}
    given |= {"max_seqlen_kv": seqlen_kv, "scale": 0.5, "softcap": 0.0, "dropout_p": 0.0}
    given |= {"deterministic": False, "training": True, "fallback": "none", "options": ""}
    return Request(**({"heads_first": False} | given | changes))


def ragged_request(lengths=LENGTHS, **changes):
    """Return a ragged request as the executor gets it."""
    sums_q, sums_kv = (torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in lengths)
    query = torch.randn(sum(lengths[0]), HEADS[0], 8, dtype=torch.float64)
    key, value = (torch.randn(sum(lengths[1]), HEADS[1], 8, dtype=torch.float64) for _ in "kv")
    given = {"query": query, "key": key, "value": value, "cu_seqlens_q": sums_q, "cu_seqlens_kv": sums_kv}
    given |= {"max_seqlen_q": max(lengths[0]), "max_seqlen_kv": max(lengths[1])}
    return request_of(**(given | changes))


def sinks(*, train=True):
    return torch.tensor([0.5, -2.0, 3.0, -math.inf], requires_grad=train)


REQUESTS = {
    "padded": lambda: request_of(left=None, right=0),
    "ragged": lambda: ragged_request(left=2, right=0),
    "sinks": lambda: request_of(sink=sinks(train=False)),
    "ragged sinks": lambda: ragged_request(right=0, sink=sinks(train=False)),
}
"""Requests for the custom operators themselves."""


def check_operators(backend, request):
    """Hold the operators against what they tell torch's tracers: shapes, strides, gradients, no aliases."""
    tensors = {n: getattr(request, n) for n in ("query", "key", "value", "sink")}
    trained = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    request = request._replace(**trained)
    operators = torch.ops.attnroute
    torch.library.opcheck(getattr(operators, backend).default, tuple(request))
    with torch.no_grad():
        found = getattr(operators, backend)(*request)
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in request]
    arguments = (torch.randn_like(found[0]), *found, *detached)
    torch.library.opcheck(getattr(operators, f"{backend}_backward").default, arguments)


def check_compiled(executor, backend, compiler):
    """Compile forward and backward without a graph break, over lengths with one recompilation at most."""
    plan = plan_of(backend)

    def attend_causal(query, key, value):
        mask = masks.Causal().lower(FULL, Extent(2, HEADS[0], query.shape[2], key.shape[2]))
        out, lse = executor.run(Inputs(query, key, value, mask), plan)
        return out * 2, lse

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(attend_causal, backend=counter, fullgraph=True)
    for length in (5, 6, 9, 12):
        inputs = inputs_of(None, length, length)
        tensors = (inputs.query, inputs.key, inputs.value)
        out, lse = compiled(*tensors)
        want, want_lse = attend(*tensors, allowed=torch.ones(length, length, dtype=torch.bool).tril())
        hold((out, lse), (want * 2, want_lse), tensors)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def check_backwards(executor, backend, *repairs, form="packed"):
    """Run its backward in every way that autograd may."""
    inputs = inputs_of(masks.Causal(), 6, 6, form=form, sink=sinks() if "sink_from_lse" in repairs else None)
    leaves = trained(inputs)

    def run():
        given = replace(inputs)
        return run_repaired(executor, given, plan_of(backend, *repairs))[0]

    for each in backwards.CHECKS:
        each(run, leaves)


def check_checkpoint(executor, backend, *, use_reentrant):
    """Compare gradients with and without recomputation."""
    inputs = inputs_of(None, 6, 6)
    tensors = (inputs.query, inputs.key, inputs.value)

    def run(query, key, value):
        return executor.run(Inputs(query, key, value, scale=0.4), plan_of(backend))[0]

    cotangent = torch.randn_like(inputs.query)
    plain = torch.autograd.grad(run(*tensors), tensors, cotangent)
    again = torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=use_reentrant)
    again.backward(cotangent)
    for tensor, want in zip(tensors, plain, strict=True):
        assert torch.equal(tensor.grad, want)
