"""What the checks say does not depend on what ran before, and nothing that is given is dropped."""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest
import torch
from support.spy import Spy

import attnroute
from attnroute import biases, masks
from attnroute.errors import ArgumentError

QUERY = torch.randn(2, 4, 6, 8)
PACKED = torch.randn(12, 4, 8)
SUMS = torch.tensor([0, 5, 12])
LAYOUTS = {"bhsd": QUERY, "bshd": QUERY.transpose(1, 2), "thd": PACKED}


def call(layout, **arguments):
    tensor = LAYOUTS[layout]
    if layout == "thd":
        arguments["cu_seqlens_q"] = SUMS
    return attnroute.attention(tensor, tensor, tensor, layout=layout, **arguments)


NUMBER = "requires a Python number; got"
# What is given, an equal value that is right, and what is said.
EQUAL = {
    "a window of floats": ("window", (2.0, 0), (2, 0), r"requires a tuple .*; got \(2.0, 0\)"),
    "a window of a float": ("window", (2, 0.0), (2, 0), r"requires a tuple .*; got \(2, 0.0\)"),
    "a window of bools": ("window", (True, False), (1, 0), r"requires a tuple .*; got \(True, False\)"),
    "a float32 scale": ("scale", np.float32(0.5), 0.5, f"{NUMBER} float32"),
    "a float16 scale": ("scale", np.float16(0.5), 0.5, f"{NUMBER} float16"),
    "an int64 scale": ("scale", np.int64(2), 2, f"{NUMBER} int64"),
    "a fraction as scale": ("scale", fractions.Fraction(1, 2), 0.5, f"{NUMBER} Fraction"),
    "a scale that is true": ("scale", True, 1, f"{NUMBER} bool"),
    "a complex scale": ("scale", 0.5 + 0j, 0.5, f"{NUMBER} complex"),
    "a scale as a tensor": ("scale", torch.tensor(0.5), 0.5, f"{NUMBER} Tensor"),
    "a large scale": ("scale", 1e39, 0.5, r"requires a number of float32, at most 3.4e\+38; got 1e\+39"),
    "a large negative scale": ("scale", -1e300, -0.5, "requires a number of float32, at most"),
    "a scale of 400 digits": (
        "scale",
        10**400,
        2,
        r"requires a number of float32.*got 10*... \(401 characters\); pass None",
    ),
    "a scale of 9,000 digits": ("scale", 10**9000, 2, "requires a number .*got an int of more digits than"),
    "an endless scale": ("scale", math.inf, 0.5, "requires a finite number; got inf"),
    "a scale that is none": ("scale", math.nan, 0.5, "requires a finite number; got nan"),
    "a float32 softcap": ("softcap", np.float32(2), 2.0, f"{NUMBER} float32"),
    "a fraction as softcap": ("softcap", fractions.Fraction(2), 2.0, f"{NUMBER} Fraction"),
    "a large softcap": ("softcap", 1e39, 2.0, r"requires 0.0, or a number from 1.18e-38 to .*; got 1e\+39"),
    "a tiny softcap": ("softcap", 1e-40, 2.0, "requires 0.0, or a number from 1.18e-38 to .*; got 1e-40"),
    "a softcap of 400 digits": ("softcap", 10**400, 2, "requires 0.0, or a number from"),
    "a softcap of False": ("softcap", False, 0, f"{NUMBER} bool"),
    "a float32 probability": ("dropout_p", np.float32(0), 0.0, f"{NUMBER} float32"),
    "a fraction as probability": ("dropout_p", fractions.Fraction(0), 0.0, f"{NUMBER} Fraction"),
    "a probability of False": ("dropout_p", False, 0, f"{NUMBER} bool"),
    "causal as a number": ("is_causal", 1, True, r"requires True or False; got 1 \(int\); pass a bool"),
    "causal as a word": ("is_causal", "no", True, r"requires True or False; got 'no' \(str\)"),
    "causal of numpy": ("is_causal", np.True_, True, "requires True or False; got .*True"),
    "causal as nothing": ("is_causal", None, False, "requires True or False; got None"),
    "causal as a tensor": (
        "is_causal",
        torch.tensor(True),
        True,
        r"requires True or False; got tensor\(True\)",
    ),
    "lse as a number": ("return_lse", 1, True, r"requires True or False; got 1 \(int\)"),
    "deterministic as a word": ("deterministic", "yes", False, "requires True or False, or None; got 'yes'"),
    "deterministic as a number": (
        "deterministic",
        0,
        False,
        r"requires True or False, or None; got 0 \(int\)",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "bad", "good", "said"), EQUAL.values(), ids=EQUAL)
def test_an_equal_value_that_is_cached_changes_nothing(layout, name, bad, good, said):
    for _ in range(2):
        with Spy() as spy, pytest.raises(ArgumentError, match=rf"^{name} {said}") as raised:
            call(layout, **{name: bad})
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 700
        assert spy.backends == set()
        call(layout, **{name: good})


@pytest.mark.parametrize(("name", "bad", "good", "said"), EQUAL.values(), ids=EQUAL)
def test_explain_says_the_same(name, bad, good, said):
    attnroute.explain(QUERY, QUERY, QUERY, **{name: good})
    with pytest.raises(ArgumentError, match=rf"^{name} {said}"):
        attnroute.explain(QUERY, QUERY, QUERY, **{name: bad})


ALONE = {"nothing": {}, "an object": {"mask": masks.Causal()}, "a tensor": {"mask": torch.ones(6, 6).bool()}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beside", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("corner", ["top_left", "bottom_right", "middle"])
def test_a_corner_without_a_diagonal_is_refused(layout, beside, corner):
    if beside and layout == "thd":
        beside = {}
    said = r"^causal_alignment requires is_causal=True or window= beside it.*masks.Causal\(alignment\)\.$"
    for _ in range(2):
        call(layout, **beside)
        with pytest.raises(ArgumentError, match=said):
            call(layout, **beside, causal_alignment=corner)
    call(layout, **beside, is_causal=True, causal_alignment="top_left")


def kept(b, h, i, j):
    return i >= j


ONE = {
    "causal": masks.Causal(),
    "window": masks.Window(3),
    "dense": masks.Dense(torch.ones(6, 6).bool()),
    "function": masks.Function(kept),
    "all": masks.Causal() & masks.Window(3),
    "either": masks.Causal() | masks.Window(3),
    "not": ~masks.Causal(),
    "empty": masks.All(()),
    "softcap": biases.Softcap(2.0),
    "alibi": biases.ALiBi(torch.ones(4)),
    "sum": biases.Softcap(2.0) + biases.ALiBi(torch.ones(4)),
}


@pytest.mark.parametrize("value", ONE.values(), ids=ONE)
@pytest.mark.parametrize(
    "use",
    [bool, lambda m: m and masks.Window(3), lambda m: m or None, lambda m: not m, lambda m: 1 if m else 2],
    ids=["bool", "and", "or", "not", "if"],
)
def test_words_between_masks_and_biases_drop_nothing(value, use):
    with pytest.raises(ArgumentError, match=r"^bool\((mask|bias)\) requires .*; combine (masks|biases) with"):
        use(value)


WRONG = {
    "a class": (masks.Window, r"got the class Window; .*make one of it, masks\.Window\(\.\.\.\)"),
    "a class of another kind": (dict, r"got the class dict; see attnroute\.masks\."),
    "a function": (kept, r"got function; .*wrap it, masks\.Function\("),
    "an array": (np.ones((6, 6), dtype=bool), "got ndarray; .*convert it with torch.from_numpy"),
    "a list": ([[True] * 6] * 6, "got list; .*convert it with torch.tensor"),
    "a bias": (biases.Softcap(2.0), "got Softcap; pass it as bias"),
    "a bias class": (biases.Softcap, r"got the class Softcap; see attnroute\.masks\."),
    "a sparse tensor": (
        torch.ones(6, 6).bool().to_sparse(),
        r"got a nested or sparse one; call to_dense\(\)",
    ),
    "a sparse bias": (torch.ones(6, 6).to_sparse(), r"got a nested or sparse one; call to_dense\(\)"),
}


@pytest.mark.parametrize(("mask", "said"), WRONG.values(), ids=WRONG)
def test_what_is_no_mask_says_how_to_make_one(mask, said):
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"^mask requires .*{said}"):
            attnroute.attention(QUERY, QUERY, QUERY, mask)
        attnroute.attention(QUERY, QUERY, QUERY, torch.ones(6, 6).bool())


WRONG_BIASES = {
    "a class": (biases.ALiBi, r"got the class ALiBi; .*make one of it, biases\.ALiBi\(\.\.\.\)"),
    "a function": (kept, r"got function; .*wrap it, biases\.Function\("),
    "an array": (np.ones((6, 6)), "got ndarray; .*convert it with torch.from_numpy"),
    "a mask": (masks.Causal(), "got Causal; pass it as mask"),
    "a sparse tensor": (torch.ones(6, 6).to_sparse(), r"got a nested or sparse one; call to_dense\(\)"),
}


@pytest.mark.parametrize(("bias", "said"), WRONG_BIASES.values(), ids=WRONG_BIASES)
def test_what_is_no_bias_says_how_to_make_one(bias, said):
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"^bias requires .*{said}"):
            attnroute.attention(QUERY, QUERY, QUERY, bias=bias)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (QUERY.numpy(), "ndarray; convert it with torch.from_numpy"),
        (torch.Tensor, "the class Tensor; convert it"),
    ],
)
def test_what_is_no_tensor_says_how_to_make_one(name, given, said):
    tensors = {**dict.fromkeys(("query", "key", "value"), QUERY), name: given}
    with pytest.raises(ArgumentError, match=rf"^{name} requires a torch.Tensor; got {said}"):
        attnroute.attention(**tensors)


SPARSE = torch.tensor([0, 6]).to_sparse()
MAKERS = {
    "Dense": lambda: masks.Dense(torch.ones(6, 6).bool().to_sparse()),
    "Documents": lambda: masks.Documents(cu_seqlens=SPARSE),
    "KeyPadding lengths": lambda: masks.KeyPadding(lengths=SPARSE),
    "KeyPadding keep": lambda: masks.KeyPadding(keep=torch.ones(2, 6).bool().to_sparse()),
    "PrefixLM": lambda: masks.PrefixLM(SPARSE),
    "bias Dense": lambda: biases.Dense(torch.ones(6, 6).to_sparse()),
    "bias ALiBi": lambda: biases.ALiBi(torch.ones(4).to_sparse()),
    "sink": lambda: attnroute.attention(QUERY, QUERY, QUERY, sink=torch.ones(4).to_sparse()),
    "alibi_slopes": lambda: attnroute.attention(QUERY, QUERY, QUERY, alibi_slopes=torch.ones(4).to_sparse()),
    "cu_seqlens_q": lambda: attnroute.attention(*[PACKED] * 3, layout="thd", cu_seqlens_q=SPARSE),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_sparse_tensors_are_refused_wherever_they_are_given(make):
    with pytest.raises(ArgumentError, match=r"requires a dense strided tensor; got a nested or sparse one"):
        make()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float32, torch.bool])
def test_counts_are_whole_numbers_that_torch_can_compare(dtype):
    with pytest.raises(ArgumentError, match="requires a 1-D integer tensor; got torch"):
        masks.KeyPadding(lengths=torch.ones(2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("backend", ["chunked", "flash", "math"])
def test_counts_of_every_width_beside_more_keys_than_they_can_count(dtype, backend):
    query = torch.randn(2, 1, 300, 8)
    counts = torch.tensor([100, 7], dtype=dtype)
    for name in ("lengths", "left"):
        got = attnroute.attention(query, query, query, masks.KeyPadding(**{name: counts}), backend=backend)
        same = masks.KeyPadding(**{name: counts.tolist()})
        torch.testing.assert_close(got, attnroute.attention(query, query, query, same, backend=backend))
    got = attnroute.attention(query, query, query, masks.PrefixLM(counts), backend=backend)
    want = attnroute.attention(query, query, query, masks.PrefixLM(counts.tolist()), backend=backend)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("train", [False, True])
def test_enable_grad_inside_of_inference_mode_records_nothing_as_stock(train):
    query = QUERY.clone().requires_grad_(train)
    with torch.inference_mode(), torch.enable_grad():
        for arguments in ({}, {"is_causal": True}, {"sink": torch.zeros(4)}, {"softcap": 3.0}):
            out = attnroute.attention(query, query, query, **arguments)
            assert not out.requires_grad
        stock = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        torch.testing.assert_close(attnroute.attention(query, query, query), stock)
        assert attnroute.explain(query, query, query).call.phase == "inference"
    out = attnroute.attention(query, query, query)
    assert out.requires_grad == train
    if train:
        out.sum().backward()
        assert query.grad is not None


@pytest.mark.parametrize(
    "kind", [ValueError, RuntimeError, attnroute.ArgumentError, attnroute.AttnRouteError]
)
def test_an_argument_error_is_what_stock_raises_and_a_value_error(kind):
    with pytest.raises(kind, match="key requires query's head_dim"):
        attnroute.attention(QUERY, QUERY[..., :4], QUERY)
