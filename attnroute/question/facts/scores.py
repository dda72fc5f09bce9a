"""Facts about how scores are computed, how inputs lie in memory, and what surrounds the call."""

from __future__ import annotations

from typing import get_args

from attnroute.question.call import Call
from attnroute.question.facts.registry import fact, field
from attnroute.vocabulary import Distributed, Layout, Phase, ScaleSign, Transform

field("layout", "bhsd, bshd or thd", words=get_args(Layout))
field("phase", "inference or training", words=get_args(Phase))
field("scale", "sign of the factor on QK^T: positive, zero or negative", words=get_args(ScaleSign))
field("softcap", "softcap value, 0 = off", "number")
field("sink", "an extra logit per head", feature="sink")
field("dropout_p", "dropout probability", "number")


@fact()
def dropout_is_sixteenth(call: Call) -> bool:
    """dropout_p * 16 is an integer."""
    sixteenths = call.dropout_p * 16.0
    return sixteenths == int(sixteenths)


field("deterministic", "only deterministic algorithms may run")
field("return_lse", "the log-sum-exp is returned", feature="return_lse")

_INPUTS = "query, key and value"
field("strides.last_dim_contiguous", f"the last stride of {_INPUTS} is 1", name="qkv_last_dim_contiguous")
field("strides.packed", f"{_INPUTS} are packed (no gaps between rows)", name="qkv_packed")
field(
    "strides.tokens_contiguous",
    f"{_INPUTS} are contiguous with their tokens outermost, each token's heads after each other",
    name="qkv_tokens_contiguous",
)
field(
    "strides.aligned_16",
    f"{_INPUTS}, and each of their rows, start at multiples of 16 bytes",
    name="qkv_aligned_16",
)
field("strides.kv_heads_expanded", "key/value heads are one head with stride 0")
field("context.compiled", "the call is traced by torch.compile", feature="compiled")
field("context.cuda_graph", "the call is captured into a CUDA graph", feature="cuda_graph")
field("context.dispatch_mode", "a TorchDispatchMode sees the operators of the call")


@fact(words=("none", *get_args(Transform)))
def transform(call: Call) -> str:
    """The transform around the call: none, double_backward, forward_ad, vmap or export."""
    return call.context.transform or "none"


@fact(words=("none", *get_args(Distributed)))
def distributed(call: Call) -> str:
    """How the call is distributed: none, dtensor (one process's part), context_parallel (torch's) or ring."""
    return call.context.distributed or "none"
