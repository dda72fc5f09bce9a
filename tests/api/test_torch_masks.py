"""torch's own mask objects: a BlockMask of FlexAttention and a CausalBias mean what they mean to torch."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from support.edge_inputs import close, gradients, normal
from support.reference import attend
from support.spy import ran
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

import attnroute
from attnroute import masks


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


SIZES = [(6, 6), (5, 9), (1, 9)]
BIASES = [(causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("make", "alignment"), BIASES, ids=["upper left", "lower right"])
def test_a_causal_bias_is_causal_with_its_alignment(make, alignment, sizes, layout):
    inputs = normal(heads_kv=4, seqlen_q=sizes[0], seqlen_kv=sizes[1])
    given = [t.transpose(1, 2) if layout == "bshd" else t for t in inputs]
    bias = make(*sizes)
    call = attnroute.explain(*given, bias, layout=layout).call
    assert call == attnroute.explain(*given, masks.Causal(alignment), layout=layout).call
    out = attnroute.attention(*given, bias, layout=layout)
    want = scaled_dot_product_attention(*(t.double() for t in inputs), attn_mask=bias)
    close(out.transpose(1, 2) if layout == "bshd" else out, want)


def test_a_causal_bias_of_more_queries_than_keys_gives_zeros_where_torch_gives_nan():
    inputs = normal(heads_kv=4, seqlen_q=9, seqlen_kv=6)
    with warnings.catch_warnings(action="ignore"):
        bias = causal_lower_right(9, 6)
    out = attnroute.attention(*inputs, bias)
    assert not out[:, :, :3].any()
    close(out, attend(*inputs, allowed=torch.ones(9, 6, dtype=torch.bool).tril(-3))[0])


def test_a_causal_bias_trains_nothing_and_takes_the_route_of_causal():
    inputs = normal(seqlen_kv=6)
    assert attnroute.explain(*inputs, causal_upper_left(6, 6)).call.phase == "inference"
    out = attnroute.attention(*inputs, causal_upper_left(6, 6))
    assert torch.equal(out, attnroute.attention(*inputs, masks.Causal()))


def blockwise(b, h, i, j):
    return (i >= j) & ((i // 7 + j // 7 + h + b) % 3 != 0)


def shared(b, h, i, j):
    return (i >= j) & ((i + j) % 3 != 0)


def thirds(b, h, i, j):
    return (i + j) % 3 != 0


@pytest.mark.parametrize("sizes", [(6, 9), (150, 150), (130, 300)], ids=str)
@pytest.mark.parametrize("shape", [(None, None), (2, None), (None, 4), (2, 4)], ids=str)
def test_a_block_mask_allows_what_its_function_allows(shape, sizes):
    inputs = [t.requires_grad_() for t in normal(seqlen_q=sizes[0], seqlen_kv=sizes[1])]
    function = shared if shape == (None, None) else blockwise
    if shape == (2, None):
        function = lambda b, h, i, j: blockwise(b, h * 0, i, j)  # noqa: E731
    if shape == (None, 4):
        function = lambda b, h, i, j: blockwise(b * 0, h, i, j)  # noqa: E731
    block_mask = create_block_mask(function, *shape, *sizes, device="cpu")
    allowed = create_mask(function, *shape, *sizes, device="cpu")
    backend = attnroute.explain(*inputs, block_mask).selected
    with ran(backend):
        out = attnroute.attention(*inputs, block_mask)
    want, _ = attend(*inputs, allowed=allowed)
    close(out, want)
    for got, wanted in zip(gradients(out, inputs), gradients(want, inputs), strict=True):
        close(got, wanted, floor=5.0)


def test_a_block_mask_beside_causal_and_in_a_conjunction():
    inputs = normal(seqlen_q=9)
    block_mask = create_block_mask(thirds, None, None, 9, 9, device="cpu")
    distance = torch.arange(9)[:, None] + torch.arange(9)
    allowed = (distance % 3 != 0) & torch.ones(9, 9, dtype=torch.bool).tril()
    want, _ = attend(*inputs, allowed=allowed)
    close(attnroute.attention(*inputs, block_mask, is_causal=True), want)
    close(attnroute.attention(*inputs, masks.Blocks(block_mask) & masks.Causal()), want)


def test_a_block_mask_in_the_question():
    inputs = normal(seqlen_q=9)
    call = attnroute.explain(*inputs, create_block_mask(shared, 2, None, 9, 9, device="cpu")).call
    assert [node.kind for node in call.mask] == ["function"]
    assert (call.mask[0].block_mask_shape, call.mask[0].per_batch, call.mask[0].per_head) == (
        (9, 9),
        True,
        False,
    )


def test_a_call_without_them_loads_neither_module():
    code = (
        "import sys, torch, attnroute\n"
        "names = ('torch.nn.attention.flex_attention', 'torch.nn.attention.bias')\n"
        "before = {name for name in names if name in sys.modules}\n"
        "query = torch.zeros(1, 2, 4, 8)\n"
        "attnroute.attention(query, query, query, torch.ones(4, 4, dtype=torch.bool))\n"
        "attnroute.attention(query, query, query, is_causal=True)\n"
        "print(len({name for name in names if name in sys.modules} - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


@pytest.mark.parametrize(
    "combine",
    [lambda dense: dense, lambda dense: ~dense, lambda dense: masks.Causal() & (dense | masks.Window(3))],
    ids=["alone", "negated", "in a disjunction"],
)
def test_a_tensor_on_another_device_is_refused_wherever_it_stands(combine):
    inputs = normal(seqlen_q=9)
    elsewhere = masks.Dense(torch.ones(9, 9, dtype=torch.bool, device="meta"))
    with pytest.raises(attnroute.AttnRouteError, match=r"query's device \(cpu\); got meta; move it there"):
        attnroute.attention(*inputs, combine(elsewhere))
