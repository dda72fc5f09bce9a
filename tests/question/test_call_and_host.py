"""The question and the machine as data: they survive JSON, and refuse what they do not know."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.strategies import calls, hosts

from attnroute.errors import ArgumentError
from attnroute.question.call import Call, Context, Strides
from attnroute.question.host import Host, arch_of, sort_key
from attnroute.question.nodes import DenseBias, KeyPaddingNode, WindowNode
from attnroute.question.policy import Policy

# The examples of the design, word for word.
CALL = """
{"dtype": "bfloat16", "batch": 2, "num_heads_q": 32, "num_heads_kv": 8, "seqlen_q": 4096, "seqlen_kv": 4096,
 "head_dim_qk": 128, "head_dim_v": 128, "layout": "bhsd", "phase": "inference",
 "mask": [], "bias": null,
 "softcap": 0.0, "sink": false, "dropout_p": 0.0, "deterministic": false, "return_lse": false,
 "strides": {"last_dim_contiguous": true, "packed": true, "tokens_contiguous": true,
 "aligned_16": true, "kv_heads_expanded": false},
 "context": {"compiled": false, "cuda_graph": false, "dispatch_mode": false, "shapes_vary": false,
 "dynamic": [], "transform": null, "distributed": null}}
"""
HOST = """
{"arch": "sm_90", "device_name": "NVIDIA H100 80GB HBM3",
 "versions": {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "flash-attn-4": "4.0.0b36"}}
"""
NODES = [
    {"kind": "causal", "alignment": "top_left"},
    {"kind": "window", "left": 4095, "right": 0, "alignment": "top_left"},
    {"kind": "documents", "lengths": [1000, 3096]},
    {"kind": "key_padding", "lengths": [100, 37]},
    {"kind": "dense", "dtype": "bool", "shape": [1, 1, 704, 704], "requires_grad": False, "aligned": True},
    {"kind": "function", "block_mask_shape": [4096, 4096]},
    {"kind": "prefix", "lengths": [10, 20]},
]
BIASES = [
    {"kind": "dense", "dtype": "float16", "shape": [1, 1, 64, 64], "requires_grad": True},
    {"kind": "alibi"},
    {"kind": "function"},
]
SIZES = {
    "dtype": "bfloat16",
    "batch": 2,
    "num_heads_q": 32,
    "num_heads_kv": 8,
    "seqlen_q": 64,
    "seqlen_kv": 64,
    "head_dim_qk": 128,
    "head_dim_v": 128,
}


@given(calls())
def test_a_call_survives_json(call):
    again = Call.model_validate_json(call.model_dump_json())
    assert again == call
    assert hash(again) == hash(call)


@given(hosts())
def test_a_host_survives_json(host):
    again = Host.model_validate_json(host.model_dump_json())
    assert again == host
    assert hash(again) == hash(host)


@given(calls(), st.data())
def test_a_key_that_no_call_has_is_refused_at_every_depth(call, data):
    plain = json.loads(call.model_dump_json())
    places = [plain, plain["strides"], plain["context"], *plain["mask"]]
    places += [plain["bias"]] if plain["bias"] is not None else []
    data.draw(st.sampled_from(places))["is_fast"] = True
    with pytest.raises(ValidationError, match="is_fast"):
        Call.model_validate(plain)


@given(hosts())
def test_a_key_that_no_host_has_is_refused(host):
    with pytest.raises(ValidationError, match="driver"):
        Host.model_validate({**host.model_dump(), "driver": "580"})


def test_the_example_of_the_design_is_a_call():
    call = Call.model_validate_json(CALL)
    assert (call.num_heads_kv, call.strides, call.context) == (8, Strides(), Context())


def test_everything_but_dtype_and_sizes_has_the_default_of_the_example():
    assert Call(**{**SIZES, "seqlen_q": 4096, "seqlen_kv": 4096}) == Call.model_validate_json(CALL)


@pytest.mark.parametrize("field", SIZES)
def test_dtype_and_sizes_have_no_default(field):
    with pytest.raises(ValidationError, match=field):
        Call.model_validate({name: value for name, value in SIZES.items() if name != field})


@pytest.mark.parametrize("node", NODES, ids=lambda n: n["kind"])
def test_the_nodes_of_the_design_parse(node):
    (parsed,) = Call.model_validate({**SIZES, "mask": [node]}).mask
    assert node.items() <= json.loads(parsed.model_dump_json()).items()


@pytest.mark.parametrize("bias", BIASES, ids=lambda b: b["kind"])
def test_the_biases_of_the_design_parse(bias):
    parsed = Call.model_validate({**SIZES, "bias": bias}).bias
    assert bias.items() <= json.loads(parsed.model_dump_json()).items()


def test_tensors_are_aligned_and_contiguous_unless_said_otherwise():
    bias = DenseBias(dtype="float32", shape=(4, 4))
    assert bias.last_dim_contiguous
    assert bias.aligned
    assert bias.empty_rows == "unknown"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int32"),
        ("batch", -1),
        ("head_dim_qk", 0),
        ("head_dim_v", 0),
        ("layout", "sbhd"),
        ("phase", "backward"),
        ("softcap", -1.0),
        ("softcap", float("nan")),
        ("softcap", float("inf")),
        ("dropout_p", 1.0),
        ("dropout_p", -0.1),
        ("dropout_p", float("nan")),
        ("scale", "big"),
        ("mask", [{"kind": "window", "left": -1}]),
        ("mask", [{"kind": "causal", "alignment": "middle"}]),
        ("mask", [{"kind": "dense", "dtype": "float16", "shape": [4, 4]}]),
        ("mask", [{"kind": "block"}]),
        ("bias", {"kind": "dense", "dtype": "bool", "shape": [4, 4]}),
        ("context", {"dynamic": ["head_dim_qk"]}),
        ("context", {"transform": "jit"}),
    ],
)
def test_a_value_that_means_nothing_is_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        Call.model_validate({**SIZES, field: value})


def test_heads_that_do_not_divide_are_refused_in_a_sentence():
    with pytest.raises(ValidationError, match=r"a number of heads that key's 5 heads divide; got 32;"):
        Call.model_validate({**SIZES, "num_heads_kv": 5})
    with pytest.raises(ValidationError, match="key's 0 heads divide; got 32"):
        Call.model_validate({**SIZES, "num_heads_kv": 0})
    assert Call.model_validate({**SIZES, "num_heads_q": 0, "num_heads_kv": 0}).num_heads_q == 0


def test_with_returns_a_changed_copy_and_validates_it():
    call = Call.model_validate(SIZES)
    changed = call.with_(mask=(WindowNode(left=3),), dropout_p=0.5)
    assert (changed.mask, changed.dropout_p, call.mask, call.dropout_p) == (
        (WindowNode(left=3),),
        0.5,
        (),
        0.0,
    )
    with pytest.raises(ArgumentError, match=r"^Call window_left requires a field that exists; got 3; .*\.$"):
        call.with_(window_left=3)
    with pytest.raises(ArgumentError, match=r"^query requires a number of heads that key's 7 heads divide"):
        call.with_(num_heads_kv=7)


def test_calls_and_nodes_are_frozen():
    call = Call.model_validate({**SIZES, "mask": [{"kind": "key_padding", "lengths": [1, 2]}]})
    with pytest.raises(ValidationError, match="frozen"):
        call.batch = 3
    with pytest.raises(ValidationError, match="frozen"):
        call.mask[0].lengths = None
    assert call.mask == (KeyPaddingNode(lengths=(1, 2)),)


def test_the_host_of_the_design_parses():
    host = Host.model_validate_json(HOST)
    assert host.arch == "sm_90"
    assert host.versions["flash-attn-4"] == "4.0.0b36"


@pytest.mark.parametrize("arch", ["90", "9.0", "sm90", "sm_9", "sm_90a", "hopper", "CPU", "sm_90\n", ""])
def test_an_arch_is_a_word_and_never_a_number_or_a_name(arch):
    with pytest.raises(ArgumentError, match="Host arch requires"):
        Host(arch=arch)


@pytest.mark.parametrize(
    ("capability", "arch"), [((7, 5), "sm_75"), ((9, 0), "sm_90"), ((10, 3), "sm_103"), ((12, 1), "sm_121")]
)
def test_compute_capabilities_have_their_words(capability, arch):
    assert arch_of(capability) == arch
    assert Host(arch=arch).arch == arch


def test_archs_sort_as_numbers_with_the_cpu_last():
    archs = ["cpu", "sm_120", "sm_75", "sm_103", "sm_100", "sm_90"]
    assert sorted(archs, key=sort_key) == ["sm_75", "sm_90", "sm_100", "sm_103", "sm_120", "cpu"]


def test_versions_are_set_and_removed_in_a_copy():
    host = Host.model_validate_json(HOST)
    changed = host.with_versions(
        {"torch": "2.14.1", "flash-attn-4": None, "flash-attn": "2.8.3", "triton": None}
    )
    assert changed.versions == {"torch": "2.14.1", "cuda": "13.0", "cudnn": "9.19.0", "flash-attn": "2.8.3"}
    assert host == Host.model_validate_json(HOST)


def test_a_host_is_read_from_a_file(tmp_path):
    file = tmp_path / "h100.json"
    file.write_text(HOST, encoding="utf-8")
    assert Host.from_file(file) == Host.model_validate_json(HOST)


@pytest.mark.parametrize("text", [None, "no json", '{"arch": "sm_9000"}', '{"arch": "sm_90", "gpu": "H100"}'])
def test_a_file_that_is_no_host_is_refused_with_its_name(tmp_path, text):
    file = tmp_path / "h100.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    wanted = (
        r"^--host requires a JSON file .*; got .*h100\.json \(.+\); record one with `attnroute probe > h100"
    )
    with pytest.raises(ArgumentError, match=wanted):
        Host.from_file(file)


def test_a_file_that_is_no_text_is_refused_too(tmp_path):
    (tmp_path / "h100.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ArgumentError, match="--host requires a JSON file"):
        Host.from_file(tmp_path / "h100.json")


UNKNOWN = {**SIZES, "seqlen_k": 3}
NODE = {"kind": "causal", "alignment": "x"}
MADE_WRONGLY = {
    "a word": (Call, {**SIZES, "batch": "many"}, r"Call batch requires a valid integer.*; got 'many'"),
    "too small": (Call, {**SIZES, "seqlen_q": -1}, "Call seqlen_q requires greater than or equal to 0; got"),
    "another dtype": (Call, {**SIZES, "dtype": "int32"}, "Call dtype requires 'float16'.*; got 'int32'; see"),
    "an unknown field": (Call, UNKNOWN, "Call seqlen_k requires a field that exists; got 3; did you"),
    "a wrong node": (Call, {**SIZES, "mask": [NODE]}, "Call mask.* requires"),
    "heads": (Call, {**SIZES, "num_heads_kv": 5}, "query requires a number of heads that key's 5 heads"),
    "nothing": (Call, {}, "Call dtype requires a value; got none; pass dtype="),
    "no arch": (Host, {}, "Host arch requires a value; got none; pass arch="),
    "an int as arch": (Host, {"arch": 90}, "Host arch requires a valid string; got 90; see attnroute.Host"),
    "versions": (Host, {"arch": "cpu", "versions": [1]}, r"Host versions requires .*; got \[1\]; see"),
    "a policy": (Policy, {"ban": 3}, "Policy ban requires a valid tuple; got 3; see attnroute.Policy"),
    "a wish": (Policy, {"requires": "x"}, "Policy requires requires a field that exists; got 'x'; did"),
}


@pytest.mark.parametrize(("kind", "fields", "said"), MADE_WRONGLY.values(), ids=MADE_WRONGLY)
def test_what_is_made_wrongly_is_one_sentence(kind, fields, said):
    with pytest.raises(ArgumentError, match=f"^{said}") as raised:
        kind(**fields)
    text = str(raised.value)
    assert text.endswith(".")
    assert not any(raw in text for raw in ("pydantic", "\n", "[type="))
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    with pytest.raises(ValidationError):
        kind.model_validate(fields)
