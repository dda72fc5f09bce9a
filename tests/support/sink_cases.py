"""Calls with sinks for the CUDA kernels of torch: mask, repairs, sizes, and the operators that run."""

from __future__ import annotations

import torch

from attnroute import masks
from attnroute.executors.protocol import Plan

FLASH = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
LOWER = ("_flash_attention_forward", "_flash_attention_backward")
CUDNN = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
EFFICIENT = ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward")
CORNER = ("_efficient_attention_forward", "_efficient_attention_backward")
DENSE = ("materialize_mask", "cast_mask")
EMPTY_ROWS = masks.Dense(torch.ones(9, 9, dtype=torch.bool).tril(-2))
PADDING = masks.KeyPadding(lengths=[9, 0])
LEFT = masks.KeyPadding(left=[2, 8])
DOCUMENTS = masks.Documents(lengths=[4, 0, 1, 4])
CASES = {
    "flash": ("flash", FLASH, None, (), {}),
    "flash causal": ("flash", FLASH, masks.Causal("bottom_right"), (), {"seqlen_q": 5}),
    "flash causal, leading rows without a key": (
        "flash",
        FLASH,
        masks.Causal("bottom_right"),
        (),
        {"seqlen_kv": 5},
    ),
    "flash window": ("flash", LOWER, masks.Window(3, 1), (), {}),
    "flash window, corner": ("flash", LOWER, masks.Window(2, 0, "bottom_right"), (), {"seqlen_q": 5}),
    "flash window, rows without a key": (
        "flash",
        LOWER,
        masks.Window(1, 0, "bottom_right"),
        (),
        {"seqlen_kv": 5},
    ),
    "flash window, open at the right": (
        "flash",
        LOWER,
        masks.Window(2, None, "bottom_right"),
        (),
        {"seqlen_kv": 5},
    ),
    "flash documents": ("flash", LOWER, DOCUMENTS, ("to_varlen",), {}),
    "flash causal documents": ("flash", LOWER, DOCUMENTS & masks.Causal(), ("to_varlen",), {}),
    "flash documents, window": ("flash", LOWER, DOCUMENTS & masks.Window(1, 0), ("to_varlen",), {"batch": 1}),
    "flash padding": ("flash", LOWER, PADDING, ("to_varlen",), {}),
    "flash causal padding": ("flash", LOWER, LEFT & masks.Causal(), ("to_varlen",), {}),
    "flash padding, one query": ("flash", LOWER, PADDING, ("to_varlen",), {"seqlen_q": 1}),
    "flash padding at the left, one query": ("flash", LOWER, LEFT, ("to_varlen",), {"seqlen_q": 1}),
    "flash, narrow heads": ("flash", FLASH, None, ("pad_head_dim",), {"head_dims": (5, 5)}),
    "cudnn": ("cudnn", CUDNN, None, (), {}),
    "cudnn causal": ("cudnn", CUDNN, masks.Causal(), (), {}),
    "cudnn mask": ("cudnn", CUDNN, EMPTY_ROWS, DENSE, {"head_dims": (8, 16)}),
    "cudnn, one query": ("cudnn", CUDNN, None, (), {"seqlen_q": 1}),
    "cudnn, empty rows set right": ("cudnn", CUDNN, EMPTY_ROWS, (*DENSE, "zero_empty_rows"), {}),
    "efficient": ("efficient", EFFICIENT, None, ("expand_kv",), {}),
    "efficient causal": ("efficient", EFFICIENT, masks.Causal(), ("expand_kv",), {"seqlen_q": 33}),
    "efficient corner": ("efficient", CORNER, masks.Causal("bottom_right"), ("expand_kv",), {"seqlen_q": 5}),
    "efficient mask": ("efficient", EFFICIENT, EMPTY_ROWS, ("expand_kv", *DENSE), {}),
    "efficient padding": (
        "efficient",
        EFFICIENT,
        PADDING,
        ("expand_kv", *DENSE, "pad_head_dim"),
        {"head_dims": (5, 3)},
    ),
}


def plan(backend, made, **rest):
    fields = {"training": True, "return_lse": True, "device_type": "cuda", **rest}
    return Plan(backend=backend, repairs=made, **fields)
