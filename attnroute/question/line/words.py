"""List the words of a call line, which reading and writing share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from attnroute.question.call import Call
from attnroute.question.nodes import AlibiBias, DocumentsNode, FunctionBias
from attnroute.vocabulary import DTYPE_SHORT

WORDS: Final[dict[str, str]] = {
    "bf16 fp16 fp32 fp64 fp8e4 fp8e5": "dtype of query, key and value",
    "b2 hq32 hkv8 sq4096 skv4096": "batch, heads and lengths; hkv is hq and skv is sq where left out",
    "d128 or d192/128": "head_dim_qk and, where it differs, head_dim_v",
    "bshd or thd": "layout; bhsd where left out",
    "causal or causal=bottom_right": (
        "causal mask, and where its diagonal ends: top_left or bottom_right, stated where sq is not skv"
    ),
    "window=4095,0 or window=open,0,bottom_right": "keys beside the diagonal; window=4096 is window=4095,0",
    "documents or documents=1000,3096": (
        "packed documents; documents=x2: two of unknown lengths; then :scattered (tokens lie anywhere) :cross"
    ),
    "keys=100,37 or keys-left=100,37 or keys-any": "keys per batch row; padding right, left or anywhere",
    "prefix or prefix=10,20": "causal behind a prefix that every query sees; then :bottom_right",
    "dense=2x1x100x100": "bool mask tensor; then :grad :strided :unaligned :empty=some :recognized=causal",
    "function or function=4096x4096": "predicate, with the shape of its block mask; then :no_batch :no_head",
    "any(causal+window=3,0|prefix)": "one part must allow; of a part all words; full is a part without words",
    "not(causal+documents)": "what the words allow together is forbidden",
    "bias=bf16:1x1x64x64": "bias tensor; then :grad :strided :unaligned :empty=none",
    "alibi, function_bias": "ALiBi slopes, a score_mod; then :grad",
    "scale=negative or scale=zero": "sign of the factor on QK^T",
    "softcap=30, sink, dropout=0.1": "score features",
    "train, deterministic, lse": "training, only deterministic kernels, log-sum-exp returned",
    "qkv_grad or no_qkv_grad": "whether query, key or value needs a gradient, where that is known",
    "last_dim_strided, unpacked, tokens_apart, misaligned, kv_expanded": "how query, key and value lie",
    "compiled, graph, dispatch_mode": "traced by torch.compile, captured into a CUDA graph, inside a mode",
    "shapes_vary": "calls like it come with other lengths and batch sizes, so few share a plan for one shape",
    "dynamic=seqlen_q,seqlen_kv": "sizes that may change",
    "double_backward or forward_ad or vmap or export": "transform around the call",
    "dtensor or context_parallel or ring": "how the call is distributed",
}
"""Every word, with its meaning."""

SIZES: Final = {
    "b": "batch",
    "hq": "num_heads_q",
    "hkv": "num_heads_kv",
    "sq": "seqlen_q",
    "skv": "seqlen_kv",
}
FLAGS: Final[dict[str, tuple[str, object]]] = {
    **{word: ("dtype", long) for word, long in DTYPE_SHORT.items()},
    **{word: ("layout", word) for word in ("bhsd", "bshd", "thd")},
    "alibi": ("bias", AlibiBias()),
    "alibi:grad": ("bias", AlibiBias(requires_grad=True)),
    "function_bias": ("bias", FunctionBias()),
    "function_bias:grad": ("bias", FunctionBias(requires_grad=True)),
    "sink": ("sink", True),
    "train": ("phase", "training"),
    "deterministic": ("deterministic", True),
    "lse": ("return_lse", True),
    "qkv_grad": ("qkv_requires_grad", True),
    "no_qkv_grad": ("qkv_requires_grad", False),
}
STRIDES: Final[dict[str, tuple[str, object]]] = {
    "last_dim_strided": ("last_dim_contiguous", False),
    "unpacked": ("packed", False),
    "tokens_apart": ("tokens_contiguous", False),
    "misaligned": ("aligned_16", False),
    "kv_expanded": ("kv_heads_expanded", True),
}
CONTEXT: Final[dict[str, tuple[str, object]]] = {
    "compiled": ("compiled", True),
    "graph": ("cuda_graph", True),
    "dispatch_mode": ("dispatch_mode", True),
    "shapes_vary": ("shapes_vary", True),
    **{word: ("transform", word) for word in ("double_backward", "forward_ad", "vmap", "export")},
    **{word: ("distributed", word) for word in ("dtensor", "context_parallel", "ring")},
}
NUMBERS: Final = {"softcap": "softcap", "dropout": "dropout_p"}
TENSOR: Final[dict[str, tuple[str, object]]] = {
    "grad": ("requires_grad", True),
    "strided": ("last_dim_contiguous", False),
    "unaligned": ("aligned", False),
    **{f"empty={state}": ("empty_rows", state) for state in ("none", "some", "unknown")},
}
DOCUMENTS: Final[dict[str, tuple[str, object]]] = {
    "scattered": ("contiguous", False),
    "cross": ("cross", True),
}
PREFIX: Final[dict[str, tuple[str, object]]] = {"bottom_right": ("alignment", "bottom_right")}
FUNCTION: Final[dict[str, tuple[str, object]]] = {
    "no_batch": ("per_batch", False),
    "no_head": ("per_head", False),
}
KEYS: Final[dict[str, tuple[str, object]]] = {"finite": ("finite", True)}
SIDES: Final = {"keys": "right", "keys-left": "left", "keys-any": "any"}
OPEN, EMPTY, SCALAR, FULL = "open", "empty", "scalar", "full"
COUNTED: Final = "x"
"""In place of the lengths of documents: how many there are follows."""
ANY, NOT = "any", "not"


def is_ragged(call: Call) -> bool:
    """Return whether each document has a diagonal of its own, that of queries and keys of other lengths."""
    return any(isinstance(node, DocumentsNode) and node.cross for node in call.mask)


def name_of(word: str) -> str:
    """Return what a word begins with, up to its value, options or parts."""
    return re.split(r"[=:(]", word, maxsplit=1)[0]


def word_of(words: Mapping[str, tuple[str, object]], field: str, value: object) -> str:
    """Return the word for a value of a field."""
    return next(word for word, meaning in words.items() if meaning == (field, value))


def split(text: str, mark: str) -> list[str]:
    """Split at a mark, but for those inside parentheses.

    Raises:
        ValueError: A parenthesis stands alone.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            raise ValueError(text)
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ValueError(text)
    return parts
