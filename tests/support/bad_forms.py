"""Packed sequences, bias objects and torch's masks that mean nothing, each with what is said of it."""

from __future__ import annotations

import math

import torch
from support.bad_arguments import KEY, QUERY, normal
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

from attnroute import biases, masks


def unchanged(score, b, h, i, j):
    return score


def causal(b, h, i, j):
    return i >= j


# Layout thd.

PACKED = (normal(7, 4, 8), normal(7, 2, 8), normal(7, 2, 8))
CROSS = (normal(7, 4, 8), normal(9, 2, 8), normal(9, 2, 8))
SUMS, SUMS_KV = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 4, 9])
SUM_WORDS = "requires a 1-D int32 or int64 tensor of at least two prefix sums"
RISE = "requires prefix sums that rise from 0 to the"

THD = {
    "no sums": ({"cu_seqlens_q": None}, rf"cu_seqlens_q {SUM_WORDS}; got None; pass \[0, end"),
    "sums as a list": ({"cu_seqlens_q": [0, 3, 7]}, f"cu_seqlens_q {SUM_WORDS}; got list; pass"),
    "sums of halves": (
        {"cu_seqlens_q": SUMS.float()},
        rf"cu_seqlens_q {SUM_WORDS}; got torch.float32 of shape \(3,\); pass",
    ),
    "sums of bytes": ({"cu_seqlens_q": SUMS.to(torch.int8)}, f"cu_seqlens_q {SUM_WORDS}; got torch.int8 of"),
    "2-D sums": ({"cu_seqlens_q": SUMS[None]}, rf"cu_seqlens_q {SUM_WORDS}; got .* of shape \(1, 3\)"),
    "one sum": ({"cu_seqlens_q": SUMS[:1]}, rf"cu_seqlens_q {SUM_WORDS}; got torch.int32 of shape \(1,\)"),
    "sums on another device": (
        {"cu_seqlens_q": SUMS.to("meta")},
        r"cu_seqlens_q requires query's device \(cpu\) or the CPU; got meta; move it there.",
    ),
    "sums that end too early": (
        {"cu_seqlens_q": torch.tensor([0, 3, 6])},
        rf"cu_seqlens_q {RISE} 7 tokens there are; got \[0, 3, 6\]; pass 0 and then",
    ),
    "sums that start late": (
        {"cu_seqlens_q": torch.tensor([1, 3, 7])},
        rf"cu_seqlens_q {RISE} 7 tokens there are; got \[1, 3, 7\]; pass 0 and then",
    ),
    "sums that fall": (
        {"cu_seqlens_q": torch.tensor([0, 5, 3, 7])},
        rf"cu_seqlens_q {RISE} 7 tokens there are; got \[0, 5, 3, 7\]; pass 0 and then",
    ),
    "more keys than queries": (
        {"tensors": CROSS},
        r"key requires query's total length \(7\) where cu_seqlens_kv is not given; got 9; pass",
    ),
    "more keys and the same sums": (
        {"tensors": CROSS, "cu_seqlens_kv": SUMS},
        "key requires query's total length",
    ),
    "key sums that end too early": (
        {"tensors": CROSS, "cu_seqlens_kv": torch.tensor([0, 3, 7])},
        rf"cu_seqlens_kv {RISE} 9 tokens there are; got \[0, 3, 7\]; pass 0 and then",
    ),
    "key sums as a list": (
        {"tensors": CROSS, "cu_seqlens_kv": [0, 4, 9]},
        f"cu_seqlens_kv {SUM_WORDS}; got list; pass",
    ),
    "fewer key sequences": (
        {"tensors": CROSS, "cu_seqlens_kv": torch.tensor([0, 9])},
        r"cu_seqlens_kv requires as many sequences as cu_seqlens_q has \(2\); got 1; give a sequence without",
    ),
    "causal without a corner": (
        {"tensors": CROSS, "cu_seqlens_kv": SUMS_KV, "is_causal": True},
        (
            r'causal_alignment requires "bottom_right" \(as flash-attn\) or "top_left" for is_causal and '
            "window beside a cu_seqlens_kv of its own; got None; state which corner each diagonal ends in."
        ),
    ),
    "a window without a corner": (
        {"cu_seqlens_kv": SUMS.clone(), "window": (2, 0)},
        'causal_alignment requires "bottom_right" .*; got None; state',
    ),
    "a nonsense corner": (
        {"is_causal": True, "causal_alignment": "middle"},
        'causal_alignment requires one of "top_left" and "bottom_right"; got \'middle\'; state',
    ),
    "a negative window": ({"window": (-1, 0)}, r"window requires a tuple .*; got \(-1, 0\); pass"),
    "a bound that is too small": (
        {"max_seqlen_q": 3},
        r"max_seqlen_q requires at least the longest sequence \(4\); got 3; correct it, or leave it out",
    ),
    "a bound of the keys that is too small": (
        {"tensors": CROSS, "cu_seqlens_kv": SUMS_KV, "max_seqlen_kv": 4},
        r"max_seqlen_kv requires at least the longest sequence \(5\); got 4; correct it",
    ),
    "a bound as a tensor": (
        {"max_seqlen_q": torch.tensor(4)},
        "max_seqlen_q requires a Python int of at least 0, or None; got Tensor; pass",
    ),
    "a bound of a half": ({"max_seqlen_kv": 4.5}, "max_seqlen_kv requires a Python int .*; got 4.5; pass"),
    "a negative bound": ({"max_seqlen_q": -1}, "max_seqlen_q requires a Python int of at .*; got -1;"),
    "a mask tensor": (
        {"mask": normal(7, 7).bool()},
        "mask requires no mask beside layout thd; got Tensor; pass is_causal or window, which hold in each",
    ),
    "a float mask": ({"mask": normal(7, 7)}, "mask requires no mask beside layout thd; got Tensor; pass"),
    "a mask object": ({"mask": masks.Causal()}, "mask requires no mask beside layout thd; got Causal; pass"),
    "torch's causal mask": (
        {"mask": causal_upper_left(7, 7)},
        "mask requires no mask beside layout thd; got Causal; pass",
    ),
    "a bias": (
        {"bias": normal(7, 7)},
        "bias requires no dense bias beside layout thd; got Tensor; pad the batch and pass masks.KeyPadding",
    ),
    "a bias object": (
        {"bias": biases.Dense(normal(7, 7))},
        "bias requires no dense bias beside layout thd; got Tensor; pad",
    ),
    "a score function": (
        {"bias": biases.Function(unchanged)},
        "bias requires no score function beside layout thd; got function; pad the batch, so that",
    ),
    "slopes beside keys of their own": (
        {"tensors": CROSS, "cu_seqlens_kv": SUMS_KV, "alibi_slopes": normal(4)},
        "alibi_slopes requires queries and keys of the same sequences beside layout thd; got a cu_seqlens_kv",
    ),
    "slopes of other heads": (
        {"bias": biases.ALiBi(normal(2))},
        r"alibi_slopes requires a floating-point tensor of shape \(4,\)",
    ),
    "a sink of other heads": ({"sink": normal(2)}, r"sink requires a floating-point tensor of shape \(4,\)"),
    "padded tensors": (
        {"tensors": (QUERY, KEY, KEY)},
        r"query requires 3 dimensions \(total, num_heads, head_dim\); got shape \(2, 4, 6, 8\); flatten",
    ),
    "a padded value": (
        {"tensors": (*PACKED[:2], KEY)},
        r"value requires 3 dimensions \(total, num_heads, head_dim\); got shape \(2, 2, 6, 8\); flatten",
    ),
    "a value of another length": (
        {"tensors": (*PACKED[:2], normal(6, 2, 8))},
        r"value requires key's length \(7\); got 6; check",
    ),
    "heads that do not divide": (
        {"tensors": (normal(7, 3, 8), *PACKED[1:])},
        "query requires a number of heads that key's 2 heads divide; got 3; repeat",
    ),
    "another head_dim": (
        {"tensors": (normal(7, 4, 16), *PACKED[1:])},
        r"key requires query's head_dim \(16\); got 8; check",
    ),
}


def packed(arguments, said):
    given = {"layout": "thd", "cu_seqlens_q": SUMS, **arguments}
    return given.pop("tensors", PACKED), given, said


# Bias objects, and torch's mask objects.

FUNCTION = biases.Function(unchanged)

FORMS = {
    "softcap twice": (
        {"bias": biases.Softcap(30.0), "softcap": 20.0},
        r"softcap requires 0.0 beside the bias Softcap\(30.0\); got both; pass one of them.",
    ),
    "softcap as a tensor beside a bias object": (
        {"bias": biases.Softcap(30.0), "softcap": torch.zeros(())},
        r"softcap requires 0.0 beside the bias Softcap\(30.0\); got both",
    ),
    "slopes twice": (
        {"bias": biases.ALiBi(normal(4)), "alibi_slopes": normal(4)},
        r"alibi_slopes requires None beside the bias ALiBi\(\(4,\)\); got both; pass one of them.",
    ),
    "slopes beside a dense bias object": (
        {"bias": biases.Softcap(1.0) + biases.Dense(normal(6, 6)), "alibi_slopes": normal(4)},
        r"alibi_slopes requires None beside the bias Dense\(\(6, 6\)\); got both",
    ),
    "slopes beside a function": (
        {"bias": FUNCTION, "alibi_slopes": normal(4)},
        r"alibi_slopes requires None beside the bias Function\(unchanged\); got both; pass",
    ),
    "a function beside a float mask": (
        {"bias": FUNCTION, "mask": normal(6, 6)},
        "bias Function requires no float mask beside it; got both; add the mask inside of the function.",
    ),
    "an ALiBi object beside a float mask": (
        {"bias": biases.ALiBi(normal(4)), "mask": normal(6, 6)},
        "alibi_slopes requires no bias and no float mask beside it; got both; add",
    ),
    "an ALiBi object of other heads": (
        {"bias": biases.ALiBi(normal(2))},
        r"alibi_slopes requires a floating-point tensor of shape \(4,\) or \(2, 4\) on cpu; got .* \(2,\) on",
    ),
    "a dense object that does not broadcast": (
        {"bias": biases.Dense(normal(6, 5))},
        r"bias requires a shape that broadcasts to .* = \(2, 4, 6, 6\); got \(6, 5\); reshape it.",
    ),
    "a list of biases": (
        {"bias": [biases.Softcap(1.0)]},
        "bias requires .* or a bias object; got list; see attnroute.biases: convert it with torch.tensor.",
    ),
    "a bias class without arguments": (
        {"bias": biases.ALiBi},
        "bias requires .* or a bias object; got the class ALiBi; see .*: make one of it, biases.ALiBi",
    ),
    "a bias function without its object": (
        {"bias": math.exp},
        "bias requires .* or a bias object; got builtin_function_or_method; see .*: wrap it, biases.F",
    ),
    "a mask object as bias": (
        {"bias": masks.Causal()},
        "bias requires a floating-point tensor or a bias object; got Causal; pass it as mask.",
    ),
    "a bias object as mask": (
        {"mask": biases.Softcap(1.0)},
        "mask requires a bool tensor, a float tensor or a mask object; got Softcap; pass it as bias.",
    ),
    "torch's causal mask as bias": (
        {"bias": causal_upper_left(6, 6)},
        "bias requires a floating-point tensor or a bias object; got CausalBias; pass it as mask.",
    ),
    "torch's causal mask of other lengths": (
        {"mask": causal_lower_right(4, 6)},
        "mask requires a CausalBias made for seqlen_q = 6 and seqlen_kv = 6; got (4, 6); make one".replace(
            "(4, 6)", r"\(4, 6\)"
        ),
    ),
    "a BlockMask as bias": (
        {"bias": create_block_mask(causal, None, None, 6, 6, device="cpu")},
        "bias requires a floating-point tensor or a bias object; got BlockMask; pass it as mask.",
    ),
    "a BlockMask of other lengths": (
        {"mask": create_block_mask(causal, None, None, 6, 7, device="cpu")},
        r"mask requires a BlockMask made for seqlen_q = 6, seqlen_kv = 6; got \(6, 7\); make",
    ),
    "a BlockMask of another batch": (
        {"mask": create_block_mask(causal, 3, None, 6, 6, device="cpu")},
        r"mask requires a BlockMask for 1 or 2 batch rows and 1 or 4 heads; got \(3, 1\); make",
    ),
    "a mask_mod without its object": (
        {"mask": causal},
        "mask requires .* or a mask object; got function; see attnroute.masks: wrap it, masks.Function",
    ),
}

CASES = {
    **{f"thd: {name}": packed(*case) for name, case in THD.items()},
    **{name: ((QUERY, KEY, KEY), arguments, said) for name, (arguments, said) in FORMS.items()},
}
