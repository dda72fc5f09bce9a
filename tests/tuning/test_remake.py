"""A recorded call that is made again is the call that was recorded."""

from __future__ import annotations

import pytest
import torch

import attnroute
from attnroute.api.recording import TracedCall
from attnroute.question.line import parse, render
from attnroute.tuning.remake import parts, remake

LINES = [
    "bf16 b2 hq4 sq64 d32",
    "fp32 b2 hq4 hkv2 sq64 d32/16 causal train",
    "fp16 b2 hq4 hkv1 sq33 skv65 d32 causal=bottom_right",
    "bf16 b1 hq4 sq512 d32 window=127,0 train sink",
    "bf16 b1 hq4 sq64 skv90 d32 causal=bottom_right window=20,5,bottom_right",
    "bf16 b1 hq4 sq64 skv90 d32 causal=bottom_right window=20,5,top_left",
    "bf16 b1 hq4 sq512 d32 causal documents=100,412 train",
    "bf16 b1 hq4 sq512 d32 causal documents",
    "bf16 b2 hq4 sq512 d32 causal documents=x5",
    "bf16 b2 hq4 sq512 d32 causal documents:scattered",
    "bf16 b2 hq4 sq40 skv80 d32 keys",
    "bf16 b2 hq4 sq40 skv80 d32 keys=40,70",
    "bf16 b2 hq4 sq40 skv80 d32 keys-left=40,70:finite causal=bottom_right",
    "bf16 b2 hq4 sq40 skv80 d32 keys-left",
    "bf16 b2 hq4 sq40 skv80 d32 keys-any",
    "bf16 b2 hq4 sq80 d32 prefix",
    "bf16 b2 hq4 sq80 d32 prefix=10,20",
    "bf16 b2 hq4 sq100 d32 dense=2x1x100x100:unaligned",
    "bf16 b2 hq4 sq104 d32 dense=104x104 train",
    "bf16 b2 hq4 sq104 d32 dense=2x1x1x104:strided",
    "bf16 b2 hq4 sq512 d32 dense=1x1x512x512:empty=none:recognized=causal",
    "bf16 b2 hq4 sq512 d32 dense=2x1x1x512:empty=none:recognized=keys=100,37",
    "bf16 b2 hq4 sq512 d32 dense=2x1x512x512:empty=some",
    "bf16 b2 hq4 sq512 d32 dense=2x1x512x512:empty=none",
    "bf16 b2 hq4 sq512 d32 function",
    "bf16 b2 hq4 sq512 d32 function:no_batch:no_head train",
    "bf16 b2 hq4 sq512 d32 function=512x512:no_batch:no_head",
    "bf16 b2 hq4 sq512 d32 any(causal+window=3,0|prefix)",
    "bf16 b2 hq4 sq512 d32 not(causal+documents)",
    "bf16 b2 hq4 sq64 d32 bias=bf16:1x4x64x64:grad train qkv_grad",
    "bf16 b2 hq4 sq64 d32 bias=fp32:1x4x64x64:grad train no_qkv_grad",
    "bf16 b2 hq4 sq64 d32 bias=bf16:64x64 train",
    "bf16 b2 hq4 sq63 d32 bias=bf16:1x4x63x63:unaligned",
    "bf16 b2 hq4 sq63 d32 bias=bf16:1x4x63x63",
    "bf16 b2 hq4 sq64 d32 bias=bf16:1x4x64x64:strided",
    "bf16 b2 hq4 sq64 d32 alibi train",
    "bf16 b2 hq4 sq64 d32 alibi:grad train qkv_grad",
    "bf16 b2 hq4 sq64 d32 function_bias:grad train qkv_grad",
    "bf16 b2 hq4 sq64 d32 function_bias",
    "bf16 b2 hq4 sq64 d32 scale=negative lse softcap=30",
    "bf16 b2 hq4 sq64 d32 scale=zero dropout=0.1 deterministic",
    "bf16 b2 hq4 sq64 d32 last_dim_strided unpacked",
    "bf16 b2 hq4 sq64 d32 unpacked train",
    "bf16 b2 hq4 sq64 d32 misaligned",
    "bf16 b2 hq4 hkv2 sq64 d32 kv_expanded unpacked",
    "bf16 b2 hq4 sq64 d32 bshd causal",
    "bf16 b1 hq4 sq300 d32 thd documents=x3",
    "bf16 b1 hq4 sq300 d32 thd documents=x3 causal train",
    "bf16 b1 hq4 sq300 skv400 d32 thd documents=x3:cross causal=bottom_right",
    "bf16 b1 hq4 sq300 d32 thd documents=x3 window=10,0",
    "fp64 b2 hq4 sq64 d32",
]


@pytest.mark.parametrize("line", LINES)
def test_it_is_the_call_that_was_recorded(line):
    problem = remake(TracedCall(line=line, device="cpu", backend="math"))
    assert render(attnroute.explain(**problem.given._asdict()).call) == render(parse(line))


@pytest.mark.parametrize("line", [line for line in LINES if "train" in line.split()])
def test_what_trains_is_a_leaf_with_a_name(line):
    leaves = remake(TracedCall(line=line, device="cpu", backend="math")).leaves
    assert set(leaves) == {
        *(() if "no_qkv_grad" in line else ("query", "key", "value")),
        *(["sink"] if "sink" in line else []),
        *(["alibi_slopes"] if "alibi:grad" in line else []),
        *(["bias"] if "bias" in line and ":grad" in line else []),
    }
    assert all(leaf.is_leaf for leaf in leaves.values())


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd", "hbsd"])
def test_dimensions_lie_in_memory_as_they_were_recorded(order):
    orders = (order, "bhsd", order)
    traced = TracedCall(line="bf16 b2 hq4 hkv2 sq24 d32", device="cpu", backend="math", memory=orders)
    query, key, value = remake(traced).given[:3]
    for tensor, want in ((query, order), (key, "bhsd"), (value, order)):
        strides = dict(zip("bhsd", tensor.stride(), strict=True))
        assert "".join(sorted("bhsd", key=lambda name: -strides[name])) == want
        assert tensor.numel() == tensor.untyped_storage().nbytes() // tensor.element_size()


def test_a_packed_batch_has_as_many_sequences():
    line = "bf16 b1 hq4 sq300 d32 thd documents=x7 causal"
    given = remake(TracedCall(line=line, device="cpu", backend="math")).given
    assert given.query.shape == (300, 4, 32)
    assert given.cu_seqlens_q.shape == (8,)
    assert given.max_seqlen_q == int(given.cu_seqlens_q.diff().max())


def test_a_mask_that_was_recognized_says_the_same_again():
    line = "bf16 b2 hq4 sq512 d32 dense=2x1x1x512:empty=none:recognized=keys=100,37"
    mask = remake(TracedCall(line=line, device="cpu", backend="math")).given.mask.tensor
    want = torch.arange(512) < torch.tensor([100, 37])[:, None]
    assert torch.equal(mask, want[:, None, None])


@pytest.mark.parametrize(("total", "count"), [(100, 3), (3, 7), (0, 2), (1, 1)])
def test_parts_sum_to_the_whole(total, count):
    assert (sum(parts(total, count)), len(parts(total, count))) == (total, count)
    assert min(parts(total, count)) >= 0
