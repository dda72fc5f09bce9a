"""Calls of torch's scaled_dot_product_attention mean the same after search and replace."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attnroute

QUERY, KEY = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 9, 16)
KEEP = torch.rand(2, 1, 6, 9) > 0.3
CALLS = {
    "all of them": {
        "attn_mask": KEEP,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": 0.3,
        "enable_gqa": True,
    },
    "float mask": {"attn_mask": torch.randn(6, 9), "enable_gqa": True},
    "no mask": {"attn_mask": None, "enable_gqa": True},
}


@pytest.mark.parametrize("named", CALLS.values(), ids=CALLS)
def test_a_call_with_torchs_names_gives_what_torch_gives(named):
    want = scaled_dot_product_attention(QUERY, KEY, KEY, **named)
    torch.testing.assert_close(attnroute.attention(QUERY, KEY, KEY, **named), want)
    ours = {name: value for name, value in named.items() if name not in ("attn_mask", "enable_gqa")}
    plain = attnroute.explain(QUERY, KEY, KEY, named["attn_mask"], **ours)
    assert attnroute.explain(QUERY, KEY, KEY, **named).call == plain.call


def test_equal_heads_need_no_sharing():
    out = attnroute.attention(QUERY, QUERY, QUERY, enable_gqa=False)
    torch.testing.assert_close(out, scaled_dot_product_attention(QUERY, QUERY, QUERY, enable_gqa=False))
    bshd = attnroute.attention(*(QUERY.transpose(1, 2),) * 3, layout="bshd", enable_gqa=False)
    torch.testing.assert_close(bshd.transpose(1, 2), out)


OTHER_RANKS = {
    "no batch": (torch.randn(4, 6, 16), "query.unsqueeze(0)", lambda out: out[0]),
    "two batches": (
        torch.randn(2, 3, 4, 6, 16),
        "query.flatten(0, -4)",
        lambda out: out.unflatten(0, (2, 3)),
    ),
}


@pytest.mark.parametrize(("query", "written", "back"), OTHER_RANKS.values(), ids=OTHER_RANKS)
def test_other_ranks_are_told_what_to_write_and_it_gives_what_torch_gives(query, written, back):
    with pytest.raises(attnroute.ArgumentError, match="query requires 4 dimensions") as refused:
        attnroute.attention(query, query, query)
    assert written in str(refused.value)
    batched = eval(written, {"query": query})
    out = attnroute.attention(batched, batched, batched)
    torch.testing.assert_close(back(out), scaled_dot_product_attention(query, query, query))
