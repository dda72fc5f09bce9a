"""How a call is said to stock attention, and what that then runs."""

from __future__ import annotations

import pytest

from attnroute.engine.stock import Stock, predict, score_bytes
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.load import load

H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cudnn": "9.19.0"})
RTX = Host(arch="sm_120", versions={"torch": "2.11.0+cu130", "cudnn": "9.19.0"})
CPU = Host(arch="cpu", versions={"torch": "2.13.0+cpu"})
CAUSAL = {"kind": "causal"}
WINDOW = {"kind": "window", "left": 31, "right": 0}
DENSE = {"kind": "dense", "shape": [256, 256]}
FLOAT_BIAS = {"kind": "dense", "dtype": "float32", "shape": [1, 1, 256, 256]}


def call(**changes):
    base = {
        "dtype": "bfloat16",
        "batch": 2,
        "num_heads_q": 8,
        "num_heads_kv": 8,
        "seqlen_q": 256,
        "seqlen_kv": 256,
        "head_dim_qk": 64,
        "head_dim_v": 64,
    }
    return Call.model_validate({**base, **changes})


def stock(host=H100, **changes):
    return predict(call(**changes), host, load())


@pytest.mark.parametrize(
    ("mask", "bias", "form"),
    [
        ([], None, "none"),
        ([CAUSAL], None, "is_causal"),
        ([{"kind": "causal", "alignment": "bottom_right"}], None, "is_causal"),
        ([WINDOW], None, "dense_mask"),
        ([CAUSAL, WINDOW], None, "dense_mask"),
        ([DENSE], None, "dense_mask"),
        ([CAUSAL, DENSE], None, "dense_mask"),
        ([{"kind": "documents", "lengths": [100, 156]}], None, "dense_mask"),
        ([{"kind": "key_padding", "lengths": [256, 3]}], None, "dense_mask"),
        ([], FLOAT_BIAS, "dense_bias"),
        ([CAUSAL], FLOAT_BIAS, "dense_bias"),
        ([DENSE], FLOAT_BIAS, "dense_bias"),
    ],
)
def test_how_the_mask_is_said(mask, bias, form):
    assert stock(mask=mask, bias=bias).mask_form == form


def test_bottom_right_with_unequal_lengths_becomes_a_tensor():
    said = stock(seqlen_q=128, mask=[{"kind": "causal", "alignment": "bottom_right"}])
    assert said.mask_form == "dense_mask"


def test_one_query_at_the_bottom_right_needs_no_mask():
    said = stock(seqlen_q=1, mask=[{"kind": "causal", "alignment": "bottom_right"}])
    assert (said.mask_form, said.backend) == ("none", "cudnn")


def test_a_recognised_tensor_is_a_tensor_for_stock_attention():
    seen = {**DENSE, "recognized": [CAUSAL]}
    assert stock(RTX, mask=[seen]) == Stock(backend="efficient", mask_form="dense_mask", order="default")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"sink": True}, "sink"),
        ({"bias": {"kind": "alibi"}}, "alibi"),
        ({"bias": {"kind": "function"}}, "function_bias"),
        ({"mask": [{"kind": "function"}]}, "function_mask"),
        ({"layout": "thd"}, "varlen"),
        ({"return_lse": True}, "return_lse"),
    ],
)
def test_what_stock_attention_cannot_say(changes, part):
    assert stock(**changes) == Stock(backend="none", inexpressible=(part,))


def test_a_window_costs_the_fast_kernel():
    assert stock(RTX).backend == "flash"
    assert stock(RTX, mask=[WINDOW]).backend == "efficient"


def test_grouped_heads_with_a_mask_fall_to_math_and_say_their_bytes():
    said = stock(RTX, num_heads_kv=2, mask=[DENSE])
    assert said.backend == "math"
    assert said.score_bytes == 2 * 8 * 256 * 256 * 4
    assert stock(RTX).score_bytes == 0


def test_score_bytes_of_a_long_call():
    assert (
        score_bytes(call(batch=1, num_heads_q=32, num_heads_kv=32, seqlen_q=65536, seqlen_kv=65536)) == 2**39
    )


@pytest.mark.parametrize(("cudnn", "backend"), [("9.15.0", "flash"), ("9.15.1", "cudnn"), (None, "flash")])
def test_cudnn_comes_first_above_9_15_0(cudnn, backend):
    assert stock(H100.with_versions({"cudnn": cudnn})).backend == backend


def test_a_mixed_bias_and_mask_takes_the_querys_dtype():
    """Said as one bfloat16 bias the call meets no check on its dtype, whatever dtype the bias had."""
    assert stock(mask=[DENSE], bias=FLOAT_BIAS) == Stock(
        backend="cudnn", mask_form="dense_bias", order="cudnn-first"
    )


def test_faults_are_set_aside():
    """Stock attention runs cuDNN into its NaN gradients: torch 2.11 checks for nothing of the kind."""
    assert stock(phase="training", seqlen_q=192, seqlen_kv=192).backend == "cudnn"


def test_strict_determinism_keeps_stock_attention_from_cudnn_even_without_a_backward():
    assert stock(deterministic=True).backend == "flash"


@pytest.mark.parametrize(
    ("changes", "backend"),
    [({}, "flash"), ({"mask": [DENSE]}, "flash"), ({"dropout_p": 0.1}, "math"), ({"head_dim_v": 32}, "math")],
)
def test_the_cpu_has_flash_and_math(changes, backend):
    assert stock(CPU, **changes).backend == backend


@pytest.mark.parametrize("versions", [{}, {"torch": "2.4.1"}, {"torch": "2.99.0"}])
def test_an_unknown_torch_is_unknown(versions):
    assert stock(Host(arch="sm_90", versions=versions)).backend == "unknown"


def test_what_surrounds_the_call_does_not_matter_to_torchs_selector():
    context = {"compiled": True, "transform": "double_backward"}
    assert stock(context=context) == stock()
