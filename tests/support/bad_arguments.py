"""Arguments of `attention()` that mean nothing, each with what its sentence must say."""

from __future__ import annotations

import math
import warnings

import torch

from attnroute import masks


def normal(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


QUERY, KEY = normal(2, 4, 6, 8), normal(2, 2, 6, 8)
LONG = normal(2, 2, 9, 8)


CAUSAL = {"is_causal": True}


BROADCAST = r"broadcasts to \(batch, num_heads_q, seqlen_q, seqlen_kv\) = \(2, 4, 6, 6\)"


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(4, 6, 8), torch.zeros(4, 5, 8)])


def jagged():
    return torch.nested.nested_tensor([torch.zeros(6, 8), torch.zeros(5, 8)], layout=torch.jagged)


# What is given, and what the sentence must say of the argument, the requirement, what was got and what to do.
TENSORS = {
    "query is a list": (([[0.0]], KEY, KEY), "query requires a torch.Tensor; got list; convert it."),
    "value is None": ((QUERY, KEY, None), "value requires a torch.Tensor; got NoneType; convert it."),
    "key on another device": (
        (QUERY, normal(2, 2, 6, 8, device="meta"), KEY),
        r"key requires query's device \(cpu\); got meta; move it there.",
    ),
    "value on another device": (
        (QUERY, KEY, normal(2, 2, 6, 8, device="meta")),
        r"value requires query's device \(cpu\); got meta; move it there.",
    ),
    "key of another dtype": (
        (QUERY, KEY.half(), KEY),
        r"key requires query's dtype \(torch.float32\); got torch.float16; cast it.",
    ),
    "value of another dtype": (
        (QUERY, KEY, KEY.double()),
        r"value requires query's dtype \(torch.float32\); got torch.float64; cast it.",
    ),
    "integers": (
        (QUERY.int(), KEY.int(), KEY.int()),
        "query requires a dtype among float16, .*; got torch.int32; cast query, key and value.",
    ),
    "complex numbers": ((QUERY.cfloat(),) * 3, "query requires a dtype among .*; got torch.complex64; cast"),
    "3-D query": (
        (QUERY[0], KEY, KEY),
        r"query requires 4 dimensions .*; got shape \(4, 6, 8\); add the batch, query.unsqueeze\(0\), or",
    ),
    "5-D key": (
        (QUERY, KEY[None], KEY),
        r"key requires 4 dimensions .*; got shape \(1, 2, 2, 6, 8\); make .* key.flatten\(0, -4\)",
    ),
    "0-D value": ((QUERY, KEY, KEY.sum()), r"value requires 4 dimensions .*; got shape \(\); add"),
    "nested query": (
        (nested(), KEY, KEY),
        "query requires a dense strided tensor; got a nested or sparse one; pack",
    ),
    "nested key": (
        (QUERY, nested(), KEY),
        "key requires a dense strided tensor; got a nested or sparse one; pack",
    ),
    "jagged value": (
        (QUERY, KEY, jagged()),
        "value requires a dense strided tensor; got a nested or sparse one; pack",
    ),
    "sparse key": (
        (QUERY, KEY.to_sparse(), KEY),
        "key requires a dense strided tensor; got a nested or sparse one",
    ),
    "another batch": (
        (QUERY, normal(1, 2, 6, 8), normal(1, 2, 6, 8)),
        r"key requires query's batch size \(2\); got 1; expand it to the batch of the query.",
    ),
    "another batch of values": (
        (QUERY, KEY, KEY[:1]),
        r"value requires query's batch size \(2\); got 1; expand",
    ),
    "another head_dim": (
        (QUERY, normal(2, 2, 6, 4), KEY),
        r"key requires query's head_dim \(8\); got 4; check the projection sizes.",
    ),
    "values of another length": (
        (QUERY, KEY, LONG),
        r"value requires key's length \(6\); got 9; check that layout",
    ),
    "values of other heads": (
        (QUERY, KEY, normal(2, 4, 6, 8)),
        r"value requires as many heads as key \(2\); got 4; repeat heads first.",
    ),
    "heads that do not divide": (
        (QUERY, normal(2, 3, 6, 8), normal(2, 3, 6, 8)),
        "query requires a number of heads that key's 3 heads divide; got 4; repeat key/value heads, or pass",
    ),
    "no key heads": (
        (QUERY, normal(2, 0, 6, 8), normal(2, 0, 6, 8)),
        "query requires a number of heads that key's 0 heads divide; got 4; repeat",
    ),
    "no heads": (
        (normal(2, 0, 6, 8),) * 3,
        "query requires at least one head; got 0; check that layout is right.",
    ),
    "no features on one side": (
        (normal(2, 2, 6, 0), normal(2, 2, 6, 8), normal(2, 2, 6, 8)),
        r"key requires query's head_dim \(0\); got 8; check the projection sizes.",
    ),
}


ARGUMENTS = {
    "a mask that does not broadcast": (
        {"mask": normal(6, 5).bool()},
        rf"mask requires a shape that {BROADCAST}.*\(6, 5\)",
    ),
    "a mask of other heads": (
        {"mask": normal(1, 2, 6, 6).bool()},
        rf"mask requires a shape that {BROADCAST}",
    ),
    "a 3-D mask": (
        {"mask": normal(2, 6, 6).bool()},
        (
            rf"mask requires a shape that {BROADCAST}, with 1, 2 or 4 dimensions; got 3-D shape \(2, 6, 6\); "
            r"say whether the first dimension is batch \(mask\[:, None\]\) or heads \(mask\[None\]\)."
        ),
    ),
    "a 5-D mask": ({"mask": normal(1, 1, 1, 6, 6).bool()}, "mask requires a shape that"),
    "a mask on another device": (
        {"mask": normal(6, 6, device="meta").bool()},
        r"mask requires query's device \(cpu\); got meta; move it there.",
    ),
    "a large mask on another device": (
        {"mask": torch.ones(300, 300, dtype=torch.bool, device="meta")},
        r"mask requires query's device \(cpu\); got meta; move it there.",
    ),
    "a mask object on another device": (
        {"mask": masks.Dense(normal(6, 6, device="meta").bool())},
        r"mask requires query's device \(cpu\); got meta; move it there.",
    ),
    "a mask of integers": (
        {"mask": normal(6, 6, dtype=torch.int64)},
        r"mask requires a bool or floating-point tensor; got torch.int64; convert it, e.g. mask.bool\(\).",
    ),
    "a mask of no known type": (
        {"mask": [[True]]},
        "mask requires .* or a mask object; got list; see attnroute.masks: convert it with torch.tensor.",
    ),
    "a mask class without arguments": (
        {"mask": masks.Causal},
        r"mask requires .* or a mask object; got the class Causal; .*make one of it, masks.Causal\(...\)\.",
    ),
    "documents that do not fit": (
        {"mask": masks.Documents(lengths=[3, 2])},
        "mask Documents lengths requires a sum of seqlen = 6; got .* with sum 5; add the missing tokens",
    ),
    "documents that end too early": (
        {"mask": masks.Documents(cu_seqlens=torch.tensor([0, 4]))},
        r"mask Documents cu_seqlens requires sums that rise from 0 to seqlen = 6; got \[0, 4\]; add",
    ),
    "padding of another batch": (
        {"mask": masks.KeyPadding(lengths=[1, 2, 3])},
        r"mask KeyPadding lengths requires one entry per batch row \(2\); got 3; pass one count per row.",
    ),
    "a bias of integers": (
        {"bias": normal(6, 6, dtype=torch.int32)},
        r"bias requires a floating-point tensor; got torch.int32; convert it, e.g. bias.float\(\)\.",
    ),
    "a bias of bools": (
        {"bias": normal(6, 6).bool()},
        "bias requires a floating-point tensor; got torch.bool; convert",
    ),
    "a bias that is a number": (
        {"bias": 0.5},
        "bias requires a floating-point tensor or a bias object; got float; see attnroute.biases.",
    ),
    "a bias that does not broadcast": (
        {"bias": normal(3, 1, 6, 6)},
        rf"bias requires a shape that {BROADCAST}",
    ),
    "a 3-D bias": (
        {"bias": normal(4, 6, 6)},
        r"bias requires a shape .*; got 3-D shape .*\(bias\[:, None\]\) or",
    ),
    "a bias on another device": (
        {"bias": normal(6, 6, device="meta")},
        r"bias requires query's device \(cpu\); got meta",
    ),
    "a sink of wrong shape": (
        {"sink": normal(2)},
        r"sink requires a floating-point tensor of shape \(4,\) on cpu; got torch.float32 \(2,\) on cpu",
    ),
    "a sink that is a number": (
        {"sink": 0.0},
        "sink requires a floating-point tensor .*; got float; pass one number per",
    ),
    "a sink of integers": (
        {"sink": normal(4, dtype=torch.int64)},
        "sink requires a floating-point tensor .*; got torch.int64",
    ),
    "slopes of wrong shape": (
        {"alibi_slopes": normal(4, 2)},
        r"alibi_slopes requires a floating-point tensor of shape \(4,\) or \(2, 4\) on cpu; got .* \(4, 2\)",
    ),
    "slopes on another device": (
        {"alibi_slopes": normal(4, device="meta")},
        r"alibi_slopes requires a floating-point tensor .* on cpu; got torch.float32 \(4,\) on meta",
    ),
    "slopes beside a bias": (
        {"alibi_slopes": normal(4), "bias": normal(6, 6)},
        "alibi_slopes requires no bias and no float mask beside it; got both; add the ALiBi term",
    ),
    "slopes beside a float mask": (
        {"alibi_slopes": normal(4), "mask": normal(6, 6)},
        "alibi_slopes requires no bias and no float mask beside it; got both; add the ALiBi term",
    ),
    "negative dropout": (
        {"dropout_p": -0.1},
        r"dropout_p requires a probability in \[0, 1\); got -0.1; pass 0.0 to switch it off.",
    ),
    "certain dropout": (
        {"dropout_p": 1.0},
        r"dropout_p requires a probability in \[0, 1\); got 1.0; pass 0.0 to",
    ),
    "dropout that is no number": (
        {"dropout_p": math.nan},
        r"dropout_p requires a probability in \[0, 1\); got nan",
    ),
    "dropout as a tensor": (
        {"dropout_p": normal(1)},
        "dropout_p requires a Python number; got Tensor; pass value.item()",
    ),
    "a scale that is no number": (
        {"scale": math.nan},
        r"scale requires a finite number; got nan; pass None for head_dim_qk \*\* -0.5.",
    ),
    "an endless scale": ({"scale": -math.inf}, "scale requires a finite number; got -inf; pass None for"),
    "a scale as a tensor": (
        {"scale": torch.tensor(0.1)},
        "scale requires a Python number; got Tensor; pass value.item()",
    ),
    "a scale per head": (
        {"scale": normal(4)},
        "scale requires a Python number; got Tensor; pass value.item()",
    ),
    "a scale as a word": ({"scale": "big"}, "scale requires a Python number; got str; pass value.item()"),
    "negative softcap": (
        {"softcap": -1.0},
        "softcap requires a finite number of at least 0; got -1.0; pass 0.0 to switch it off.",
    ),
    "endless softcap": (
        {"softcap": math.inf},
        "softcap requires a finite number of at least 0; got inf; pass 0.0",
    ),
    "softcap of None": ({"softcap": None}, "softcap requires a Python number; got NoneType; pass"),
    "a negative window": (
        {"window": (-1, 0)},
        r"window requires a tuple \(left, right\) of counts of at least 0 or None; got \(-1, 0\); pass \(W",
    ),
    "a window of one number": (
        {"window": 4},
        r"window requires a tuple \(left, right\) .*; got 4; pass \(W - 1, 0\)",
    ),
    "a window of one side": ({"window": (4,)}, r"window requires a tuple .*; got \(4,\); pass"),
    "a window as a list": ({"window": [4, 0]}, r"window requires a tuple .*; got \[4, 0\]; pass"),
    "a window of halves": ({"window": (2.5, 0)}, r"window requires a tuple .*; got \(2.5, 0\); pass"),
    "a nonsense layout": (
        {"layout": "sbhd"},
        "layout requires one of bhsd, bshd, thd; got 'sbhd'; pick one.",
    ),
    "a layout that is no word": (
        {"layout": ["bhsd"]},
        r"layout requires one of bhsd, bshd, thd; got \['bhsd'\]; pick one.",
    ),
    "a nonsense alignment": (
        {**CAUSAL, "causal_alignment": "bottom"},
        'causal_alignment requires one of "top_left" and "bottom_right"; got \'bottom\'; state which corner',
    ),
    **{
        name: (
            {name: torch.tensor([0, 6], dtype=torch.int32)},
            rf"{name} requires layout=\"thd\"; got layout='bhsd'; pass layout=\"thd\" with packed tensors",
        )
        for name in ("cu_seqlens_q", "cu_seqlens_kv")
    },
    **{
        name: ({name: 6}, f'{name} requires layout="thd"; got layout=\'bhsd\'; pass layout="thd" with')
        for name in ("max_seqlen_q", "max_seqlen_kv")
    },
}


TRAINED = tuple(t.clone().requires_grad_() for t in (QUERY, KEY, KEY))


ALIGNMENT = (
    r'causal_alignment requires "top_left" \(as scaled_dot_product_attention\) or "bottom_right" '
    r"\(cached decoding\) when "
    r"seqlen_q != seqlen_kv; got None with seqlen_q = 6 and seqlen_kv = 9; state it\."
)


CASES = {
    **{name: (tensors, {}, said) for name, (tensors, said) in TENSORS.items()},
    **{name: ((QUERY, KEY, KEY), arguments, said) for name, (arguments, said) in ARGUMENTS.items()},
    "both names of the mask": (
        (QUERY, KEY, KEY, torch.ones(6, 6).bool()),
        {"attn_mask": torch.ones(6, 6).bool()},
        "attn_mask requires no mask beside it, which is the same argument; got both; pass one",
    ),
    "shared heads without enable_gqa": (
        (QUERY, KEY, KEY),
        {"enable_gqa": False},
        "enable_gqa requires True where heads are shared; got False, 4 query heads and 2 key heads; leave",
    ),
    "enable_gqa as a number": (
        (QUERY, KEY, KEY),
        {"enable_gqa": 1},
        r"enable_gqa requires True or False; got 1 \(int\); pass",
    ),
    "determinism that the kernels would not heed": (
        TRAINED,
        {"deterministic": True},
        r"deterministic requires torch.use_deterministic_algorithms\(True\) where gradients .*",
    ),
    "causal without an alignment": ((QUERY, LONG, LONG), CAUSAL, ALIGNMENT),
    "a window without an alignment": ((QUERY, LONG, LONG), {"window": (3, 0)}, ALIGNMENT),
}
