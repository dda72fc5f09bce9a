"""The fields that a capability rule may ask about, computed from a `Call`.

A rule never computes: needed arithmetic is a named field here, documented in `FACTS` and tested. A length
that may change at run time (`context.dynamic`) is a `Varies`: a rule about it must hold for every value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, get_args

from attnroute.question.call import (
    AlibiBias,
    AnyNode,
    Call,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionBias,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
)
from attnroute.question.facts import heads
from attnroute.question.facts.empty import empty_rows_of
from attnroute.question.facts.nested import is_cross, lengths_vary, nested
from attnroute.question.facts.reach import reach_of
from attnroute.vocabulary import DTYPES, Distributed, EmptyRows, Layout, Phase, ScaleSign, Transform

__all__ = ["BOOLS", "FACTS", "LENGTH_FACTS", "UNKNOWN", "WORDS", "Facts", "Value", "Varies"]
__all__ += ["alignment_of", "empty_rows_of", "facts_of", "nested", "sizes_of"]


@dataclass(frozen=True, slots=True)
class Varies:
    """An integer that may be anything from `low` up."""

    low: int = 1

    def __str__(self) -> str:
        """Say it as a reader meets it in a finding."""
        return "varies"


class Unknown:
    """A value that nobody stated."""

    def __str__(self) -> str:
        """Say it as a reader meets it in a finding."""
        return "unknown"


UNKNOWN: Final = Unknown()
Value = bool | int | float | str | Varies | Unknown
Facts = Mapping[str, Value]

FACTS: Final[dict[str, str]] = {
    "dtype": "dtype of query, key and value",
    "batch": "batch size",
    "num_heads_q": "query heads",
    "num_heads_kv": "key/value heads",
    "is_gqa": "key/value heads are fewer than query heads",
    "seqlen_q": "query length",
    "seqlen_kv": "key length",
    "seqlens_equal": "query length equals key length",
    "seqlen_q_mod_128": "query length modulo 128",
    "seqlen_kv_mod_128": "key length modulo 128",
    "score_elements": "batch * num_heads_q * seqlen_q * seqlen_kv",
    "mask_elements": "seqlen_q * seqlen_kv: the elements of one full mask",
    "dq_accumulator_elements": (
        "batch * num_heads_q * seqlen_q * head_dim_qk, the last two rounded up to multiples of 128 and 32; a "
        "head_dim above 192 becomes 256"
    ),
    "dq_accumulator_elements_wide": "the same, a head_dim_qk above 128 up to 64",
    "dq_accumulator_row_elements": (
        "num_heads_q * seqlen_q * head_dim_qk: those of one batch row, the last two up to 128 and to the next"
        " of 64, 96, 128, 192 and 256"
    ),
    "query_reach": (
        "elements between the first and the last token of a head of query or output, at most: those of all "
        "heads, and where query, key and value are not packed those of all three in the whole batch; here "
        "and in the next four, lengths that vary count as they are stated"
    ),
    "key_reach": "the same of key and value",
    "query_elements": "the same of all heads of all batches: as many elements as query or output spread over",
    "key_elements": "the same of key and value",
    "mask_tensor_elements": (
        "elements of the largest mask or bias tensor, at most, those inside a disjunction or a negation too; "
        "0 without one"
    ),
    "head_dim_qk": "last dimension of query and key",
    "head_dim_v": "last dimension of value",
    "head_dim_max": "the larger of head_dim_qk and head_dim_v",
    "head_dims_equal": "head_dim_qk equals head_dim_v",
    "head_dims_ratio": "head_dim_v / head_dim_qk, both rounded up to multiples of 16",
    "head_dims_power_of_two": "head_dim_qk and head_dim_v are powers of two",
    "head_dim_qk_tile_mod_32": "head_dim_qk, rounded up to a multiple of 16, modulo 32",
    "dv_store_fits_16": (
        "half of head_dim_v is a multiple of gcd(32, half of head_dim_qk), both rounded up to multiples of 16"
    ),
    "dv_store_fits_32": "the same as dv_store_fits_16, both rounded up to multiples of 32",
    "fa4_tile_bytes": "2 * (192 * head_dim_qk + 64 * head_dim_v): 128 queries and 64 keys in shared memory",
    "gqa_ratio_power_of_two": "num_heads_q / num_heads_kv is a power of two",
    "layout": "bhsd, bshd or thd",
    "phase": "inference or training",
    "scale": "sign of the factor on QK^T: positive, zero or negative",
    "masked": "the mask has a node of any kind",
    "causal": "the mask has a causal node; those inside a disjunction or a negation do not count",
    "window": "the mask has a window node; those inside a disjunction or a negation do not count",
    "window_right_open": "the mask has a window node whose right side is open and no causal node",
    "window_looks_ahead": (
        "the mask has a window node, no causal node, and the window's right side is open or above 0: queries "
        "attend keys behind the diagonal"
    ),
    "documents": "the mask has a documents node; those inside a disjunction or a negation do not count",
    "key_padding": "the mask has a key padding node; those inside a disjunction or a negation do not count",
    "left_out_finite": "what key padding nodes leave out holds no NaN and no infinity; true without one",
    "prefix": "the mask has a prefix node; those inside a disjunction or a negation do not count",
    "combined_mask": (
        "the mask has a disjunction or a negation: a kernel that takes one evaluates the causal, window, "
        "documents, key padding and prefix nodes inside it"
    ),
    "documents_cross": (
        "a ragged batch whose queries and keys have lengths of their own: causal and window nodes have a "
        "diagonal in each document"
    ),
    "dense_mask": "the mask has a bool tensor, or one inside a disjunction or a negation, which reads it",
    "function_mask": "the mask has a predicate, or one inside a disjunction or a negation, which calls it",
    "band_only": "the mask says no more than causal and window do",
    "only_causal": "the mask is causal and nothing else, and there is no bias",
    "alignment": "of causal, window and prefix nodes: none, square, top_left, bottom_right or mixed",
    "mask_last_dim_contiguous": "the last stride of mask and bias tensors that a kernel is handed is 1",
    "mask_aligned": "row, head and batch strides of mask and bias tensors are multiples of 8 elements",
    "mask_rank_2_or_4": "every mask or bias tensor has 2 or 4 dimensions; true without one",
    "mask_has_query_dim": "a mask or bias tensor has its own row for every query",
    "dense_bias": "a float tensor is added to the scores",
    "bias_is_query_dtype": "there is no bias tensor, or its dtype is the query's",
    "bias_requires_grad": "the bias, the ALiBi slopes or a tensor that a score_mod reads require grad",
    "only_bias_requires_grad": "the bias requires grad, query, key and value do not",
    "empty_rows": "whether some query may attend no key: none, some or unknown",
    "softcap": "softcap value, 0 = off",
    "sink": "an extra logit per head",
    "alibi": "ALiBi slopes are given",
    "function_bias": "a score_mod changes the scores",
    "dropout_p": "dropout probability",
    "dropout_is_sixteenth": "dropout_p * 16 is an integer",
    "deterministic": "only deterministic algorithms may run",
    "return_lse": "the log-sum-exp is returned",
    "qkv_last_dim_contiguous": "the last stride of query, key and value is 1",
    "qkv_packed": "query, key and value are packed (no gaps between rows)",
    "qkv_tokens_contiguous": (
        "query, key and value are contiguous with their tokens outermost, each token's heads after each other"
    ),
    "qkv_aligned_16": "query, key and value, and each of their rows, start at multiples of 16 bytes",
    "kv_heads_expanded": "key/value heads are one head with stride 0",
    "compiled": "the call is traced by torch.compile",
    "cuda_graph": "the call is captured into a CUDA graph",
    "dispatch_mode": "a TorchDispatchMode sees the operators of the call",
    "transform": "none, double_backward, forward_ad, vmap or export",
    "distributed": "none, dtensor or context_parallel",
}


LENGTH_FACTS: Final = frozenset(
    {
        "seqlen_q",
        "seqlen_kv",
        "seqlens_equal",
        "seqlen_q_mod_128",
        "seqlen_kv_mod_128",
        "score_elements",
        "mask_elements",
        "dq_accumulator_elements",
        "query_reach",
        "key_reach",
        "query_elements",
        "key_elements",
        "mask_tensor_elements",
        "dq_accumulator_elements_wide",
        "dq_accumulator_row_elements",
    }
)
"""The fields whose value changes with every length: only what rules ask about them sorts calls."""

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "dtype": DTYPES,
    "layout": get_args(Layout),
    "phase": get_args(Phase),
    "scale": get_args(ScaleSign),
    "alignment": ("none", "square", "top_left", "bottom_right", "mixed"),
    "empty_rows": get_args(EmptyRows),
    "transform": ("none", *get_args(Transform)),
    "distributed": ("none", *get_args(Distributed)),
}
"""The fields whose value is a word, with every word that it can be. All others are numbers or bools."""


@lru_cache(maxsize=64)
def facts_of(call: Call) -> Facts:
    """Compute every field of `FACTS` for one call: once, though every backend's rows are held against it."""
    return {**sizes_of(call), **_mask(call), **_additive(call), **_rest(call)}


def _length(call: Call, name: str) -> int | Varies:
    # Not converted: a tracer's lengths stand in for those of a call (attnroute.api.guards).
    return Varies() if name in call.context.dynamic else getattr(call, name)


def _mod_128(value: int | Varies) -> int | Varies:
    return Varies(0) if isinstance(value, Varies) else value % 128


def _product(*values: int | Varies) -> int | Varies:
    result = 1
    varies = False
    for value in values:
        varies = varies or isinstance(value, Varies)
        result *= value.low if isinstance(value, Varies) else value
    return Varies(result) if varies else result


def _round_up(value: int | Varies, multiple: int) -> int | Varies:
    return value if isinstance(value, Varies) else -(-value // multiple) * multiple


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def sizes_of(call: Call) -> Facts:
    """Compute the fields that only sizes and dtype say, of a tracer's sizes too."""
    batch = _length(call, "batch")
    seqlen_q, seqlen_kv = _length(call, "seqlen_q"), _length(call, "seqlen_kv")
    varies = isinstance(seqlen_q, Varies) or isinstance(seqlen_kv, Varies)
    rows = _product(call.num_heads_q, _round_up(seqlen_q, 128))
    return {
        "dtype": call.dtype,
        "batch": batch,
        "num_heads_q": call.num_heads_q,
        "num_heads_kv": call.num_heads_kv,
        "is_gqa": call.num_heads_q != call.num_heads_kv,
        "seqlen_q": seqlen_q,
        "seqlen_kv": seqlen_kv,
        "seqlens_equal": Varies(0) if varies else seqlen_q == seqlen_kv,
        "seqlen_q_mod_128": _mod_128(seqlen_q),
        "seqlen_kv_mod_128": _mod_128(seqlen_kv),
        "score_elements": _product(batch, call.num_heads_q, seqlen_q, seqlen_kv),
        "mask_elements": _product(seqlen_q, seqlen_kv),
        "dq_accumulator_elements": _product(batch, rows, heads.accumulator_width(call.head_dim_qk)),
        "dq_accumulator_elements_wide": _product(batch, rows, heads.up_wide(call.head_dim_qk)),
        "dq_accumulator_row_elements": _product(rows, heads.up_to_hopper(call.head_dim_qk)),
        **reach_of(call),
        "head_dim_qk": call.head_dim_qk,
        "head_dim_v": call.head_dim_v,
        "head_dim_max": max(call.head_dim_qk, call.head_dim_v),
        "head_dims_equal": call.head_dim_qk == call.head_dim_v,
        "head_dims_ratio": heads.ratio(call.head_dim_qk, call.head_dim_v),
        "head_dims_power_of_two": _is_power_of_two(call.head_dim_qk) and _is_power_of_two(call.head_dim_v),
        "head_dim_qk_tile_mod_32": heads.tile_mod_32(call.head_dim_qk),
        "dv_store_fits_16": heads.store_fits(call.head_dim_qk, call.head_dim_v, 16),
        "dv_store_fits_32": heads.store_fits(call.head_dim_qk, call.head_dim_v, 32),
        "fa4_tile_bytes": heads.tile_bytes(call.head_dim_qk, call.head_dim_v),
        "gqa_ratio_power_of_two": _is_power_of_two(call.num_heads_q // max(1, call.num_heads_kv)),
    }


def _mask(call: Call) -> Facts:
    nodes = call.mask
    band = [n for n in nodes if isinstance(n, CausalNode | WindowNode)]
    windows = [n for n in nodes if isinstance(n, WindowNode)]
    causal = any(isinstance(n, CausalNode) for n in nodes)
    return {
        "masked": bool(nodes),
        "causal": causal,
        "window": bool(windows),
        "window_right_open": any(n.right is None for n in windows) and not causal,
        "window_looks_ahead": bool(windows) and not causal and all(n.right != 0 for n in windows),
        "documents": any(isinstance(n, DocumentsNode) for n in nodes),
        "key_padding": any(isinstance(n, KeyPaddingNode) for n in nodes),
        "left_out_finite": all(n.finite for n in nodes if isinstance(n, KeyPaddingNode)),
        "prefix": any(isinstance(n, PrefixNode) for n in nodes),
        "dense_mask": any(isinstance(n, DenseNode) for n in nested(nodes)),
        "function_mask": any(isinstance(n, FunctionNode) for n in nested(nodes)),
        "combined_mask": any(isinstance(n, AnyNode | NotNode) for n in nodes),
        "documents_cross": is_cross(call),
        "band_only": len(band) == len(nodes),
        "only_causal": causal and len(nodes) == 1 and call.bias is None,
        "alignment": alignment_of(call),
        "empty_rows": empty_rows_of(call),
    }


def _tensors(call: Call) -> list[DenseNode | DenseBias]:
    """Return what a kernel is handed; a tensor inside a disjunction is read element by element."""
    found: list[DenseNode | DenseBias] = [n for n in call.mask if isinstance(n, DenseNode)]
    if isinstance(call.bias, DenseBias):
        found.append(call.bias)
    return found


def _additive(call: Call) -> Facts:
    tensors = _tensors(call)
    bias = call.bias if isinstance(call.bias, DenseBias) else None
    grad = call.bias is not None and call.bias.requires_grad
    only: Value = False
    if grad and call.phase == "training":
        only = UNKNOWN if call.qkv_requires_grad is None else not call.qkv_requires_grad
    return {
        "mask_last_dim_contiguous": all(t.last_dim_contiguous for t in tensors),
        "mask_aligned": all(t.aligned for t in tensors),
        "mask_rank_2_or_4": all(len(t.shape) in (2, 4) for t in tensors),
        "mask_has_query_dim": any(len(t.shape) >= 2 and t.shape[-2] > 1 for t in tensors),
        "dense_bias": bias is not None,
        "bias_is_query_dtype": bias is None or bias.dtype == call.dtype,
        "bias_requires_grad": grad,
        "only_bias_requires_grad": only,
        "alibi": isinstance(call.bias, AlibiBias),
        "function_bias": isinstance(call.bias, FunctionBias),
    }


def _rest(call: Call) -> Facts:
    sixteenths = call.dropout_p * 16.0
    return {
        "layout": call.layout,
        "phase": call.phase,
        "scale": call.scale,
        "softcap": call.softcap,
        "sink": call.sink,
        "dropout_p": call.dropout_p,
        "dropout_is_sixteenth": sixteenths == int(sixteenths),
        "deterministic": call.deterministic,
        "return_lse": call.return_lse,
        "qkv_last_dim_contiguous": call.strides.last_dim_contiguous,
        "qkv_packed": call.strides.packed,
        "qkv_tokens_contiguous": call.strides.tokens_contiguous,
        "qkv_aligned_16": call.strides.aligned_16,
        "kv_heads_expanded": call.strides.kv_heads_expanded,
        "compiled": call.context.compiled,
        "cuda_graph": call.context.cuda_graph,
        "dispatch_mode": call.context.dispatch_mode,
        "transform": call.context.transform or "none",
        "distributed": call.context.distributed or "none",
    }


def alignment_of(call: Call) -> str:
    """Return where the diagonal of causal, window and prefix nodes starts, "square" if both corners agree."""
    found = {n.alignment for n in call.mask if isinstance(n, CausalNode | WindowNode | PrefixNode)}
    if not found:
        return "none"
    if call.seqlen_q == call.seqlen_kv and not lengths_vary(call) and not is_cross(call):
        return "square"
    return found.pop() if len(found) == 1 else "mixed"


_EXAMPLE: Final = Call(
    dtype="float16",
    batch=1,
    num_heads_q=1,
    num_heads_kv=1,
    seqlen_q=1,
    seqlen_kv=1,
    head_dim_qk=1,
    head_dim_v=1,
)
BOOLS: Final = frozenset(name for name, value in facts_of(_EXAMPLE).items() if isinstance(value, bool))
"""The fields whose value is true or false."""
