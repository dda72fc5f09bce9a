"""The closed lists of names that code, tables, command line and documents share.

One name means one thing everywhere; `docs/glossary.md` explains each.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Dtype = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
Layout = Literal["bhsd", "bshd", "thd"]
Phase = Literal["inference", "training"]
Device = Literal["cpu", "cuda"]
Alignment = Literal["top_left", "bottom_right"]
Status = Literal["eligible", "rejected", "unknown", "unavailable"]
Outcome = Literal["pass", "fail", "unknown", "not_applicable"]
RuleKind = Literal["limit", "wrong_result", "crash", "hang", "slow"]
RuleScope = Literal["call", "stock", "operator"]
EvidenceKind = Literal["source", "probe", "measured", "issue", "docs", "inferred", "own"]
Transform = Literal["double_backward", "forward_ad", "vmap", "export"]
Distributed = Literal["dtensor", "context_parallel", "ring"]
"""A call with "dtensor" is what one process computes of one on DTensors; with "ring" a step of a ring."""
ScaleSign = Literal["positive", "zero", "negative"]
EmptyRows = Literal["none", "some", "unknown"]

Feature = Literal[
    "causal",
    "bottom_right",
    "window",
    "documents",
    "key_padding",
    "prefix",
    "combined_mask",
    "dense_mask",
    "function_mask",
    "dense_bias",
    "function_bias",
    "bias_grad",
    "alibi",
    "softcap",
    "sink",
    "dropout",
    "gqa",
    "return_lse",
    "deterministic",
    "varlen",
    "fp8",
    "compiled",
    "cuda_graph",
    "context_parallel",
    "ring",
    "double_backward",
    "forward_ad",
    "vmap",
]
Repair = Literal[
    "recognize_mask",
    "clear_left_out",
    "from_varlen",
    "to_varlen",
    "sink_from_lse",
    "backward_from_chunked",
    "expand_kv",
    "pad_head_dim",
    "contiguous",
    "materialize_alibi",
    "materialize_mask",
    "cast_mask",
    "cast_bias",
    "align_bias",
    "zero_empty_rows",
    "split_batch",
    "split_heads",
]

FEATURES: Final[tuple[str, ...]] = get_args(Feature)
REPAIRS: Final[tuple[str, ...]] = get_args(Repair)
DTYPES: Final[tuple[str, ...]] = get_args(Dtype)

DTYPE_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
DTYPE_SHORT: Final[dict[str, str]] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}

SPLITS: Final[frozenset[str]] = frozenset({"split_batch", "split_heads"})
"""Repairs that run a call in pieces."""

BUILD_MASKS: Final[frozenset[str]] = frozenset(
    {"materialize_alibi", "materialize_mask", "cast_mask", "cast_bias", "align_bias"}
)
"""Repairs that build a dense mask or bias."""

MASK_DEPTH: Final = 64
"""How deep combinations of masks may nest: functions that read a mask recurse, some Python frames a level."""

GRID_LIMIT: Final = 65535
"""CUDA's limit on the y and z dimensions of a grid: what split_batch and split_heads stay below."""

HEAD_DIM_MULTIPLE: Final = 8
"""Elements: 16 bytes of a 16-bit type, what the tensor cores' loads need and pad_head_dim makes."""
