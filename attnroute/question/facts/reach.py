"""How far a kernel counts elements inside of a tensor: what rows about indices of 32 bits ask.

A call says of its strides only whether query, key and value are packed. So these are upper bounds: of packed
tensors the heads may lie between two tokens, and of others all that stands beside them may, as in one tensor
of query, key and value whose tokens are outermost.
"""

from __future__ import annotations

from typing import Any

from attnroute.question.call import DenseBias, DenseNode
from attnroute.question.facts.nested import nested


def reach_of(call: Any) -> dict[str, int]:
    """Return the fields about offsets, with the stated lengths where they may vary.

    Args:
        call: A call, or a tracer's sizes in its form.
    """
    width = max(call.head_dim_qk, call.head_dim_v)
    query, key = call.num_heads_q * width, call.num_heads_kv * width
    row = call.batch * (query + 2 * key)
    packed = call.strides.packed
    return {
        "query_reach": call.seqlen_q * (query if packed else row),
        "key_reach": call.seqlen_kv * (key if packed else row),
        "query_elements": call.seqlen_q * (call.batch * query if packed else row),
        "key_elements": call.seqlen_kv * (call.batch * key if packed else row),
        "mask_tensor_elements": _tensor_elements(call),
    }


def _tensor_elements(call: Any) -> int:
    """Return how many elements mask and bias tensors have at most, of the dimensions that any of them has."""
    shapes = [n.shape for n in nested(call.mask) if isinstance(n, DenseNode)]
    if isinstance(call.bias, DenseBias):
        shapes.append(call.bias.shape)
    sizes = (call.seqlen_kv, call.seqlen_q, call.num_heads_q, call.batch)
    elements = 1 if shapes else 0
    for place, size in enumerate(sizes):
        if any(len(shape) > place and shape[-1 - place] > 1 for shape in shapes):
            elements *= size
    return elements
