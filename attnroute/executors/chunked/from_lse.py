"""chunked as the other half of a kernel: the backward pass, from an output and a log-sum-exp that it made.

Whatever kernel ran forward, its weights are exp(scores - lse). chunked makes the scores again block by block,
so it needs of the forward nothing but those two tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnroute.executors.chunked import operator
from attnroute.executors.chunked.backward import NeedsGrad, run_backward
from attnroute.executors.chunked.call import Call, Saved, matmuls_of
from attnroute.executors.chunked.forward import run_forward
from attnroute.executors.chunked.run import described
from attnroute.executors.operators import spread
from attnroute.executors.protocol import Inputs
from attnroute.masks.tracing import is_traced


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a call without dropout, recording no gradient."""
    with matmuls_of(inputs.query):
        saved = run_forward(Call.build(inputs.query, inputs.key, inputs.value, *described(inputs)))
    return saved.out, saved.lse


def gradients(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and sink, None where none is wanted.

    Args:
        inputs: What the forward got, without dropout; its mask and scores hold no functions that train.
        out: (batch, num_heads_q, seqlen_q, head_dim_v), with the sink where there is one.
        lse: (batch, num_heads_q, seqlen_q), natural, with the sink; -inf or +inf in rows with no key.
        grad_out: As out.
        wanted: Which gradients to compute.
    """
    needs = NeedsGrad(*wanted[:3], bias=False, slopes=False, sink=wanted[3])
    row_max = lse.float().masked_fill(lse == torch.inf, -torch.inf)
    stats = torch.stack((row_max, torch.ones_like(row_max)), -1)
    qkv = (inputs.query, inputs.key, inputs.value)
    if is_traced(inputs.query):
        arguments = operator.arguments_of(*qkv, *described(inputs), seed=None)
        found = operator.backward(*arguments, out, stats, grad_out, torch.zeros_like(row_max), list(needs))
        query, key, value, _, _, sink = spread(found, needs)
        return query, key, value, sink
    with matmuls_of(inputs.query):
        call = Call.build(*qkv, *described(inputs))
        grads = run_backward(call, Saved(out, stats), grad_out, None, needs)
    return grads.query, grads.key, grads.value, grads.sink
