"""CUDNN_FE with the package's operators written in float64: what they are given, and what comes of it."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import cudnn_checks
from support.cudnn_checks import check, inputs_of, plan_of, ragged_request, request_of, sinks
from support.cudnn_graph import Graph
from support.cudnn_operators import RECORDED, Operators
from support.reference import attend

import attnroute
from attnroute import masks
from attnroute.executors.packages import cudnn_fe
from attnroute.executors.prepare.apply import run_repaired
from attnroute.memory import reset


@pytest.fixture
def operators(monkeypatch):
    torch.manual_seed(0)
    made = Operators()
    monkeypatch.setattr(cudnn_fe, "_operators", lambda: made)
    reset()
    return made


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    reset()


def test_the_operators_are_registered_by_their_module(monkeypatch):
    cudnn_fe._operators.cache_clear()
    name = "cudnn.sdpa.fwd.torch_op"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert cudnn_fe._operators() is torch.ops.cudnn
    monkeypatch.setitem(sys.modules, name, None)
    assert cudnn_fe._operators() is torch.ops.cudnn, "asked once"
    cudnn_fe._operators.cache_clear()
    with pytest.raises(ImportError):
        cudnn_fe._operators()
    cudnn_fe._operators.cache_clear()


def test_every_release_of_the_tables_is_recorded():
    assert list(RECORDED) == ["1.29.0", "1.29.1", "1.30.0", "1.31.0", "1.32.0"]


def test_a_renamed_parameter_fails(operators, monkeypatch):
    parameters = [p for p in RECORDED["1.32.0"]["sdpa_fwd"].parameters.values() if p.name != "window_left"]
    renamed = RECORDED["1.32.0"]["sdpa_fwd"].replace(parameters=parameters)
    monkeypatch.setitem(RECORDED, "1.33.0", {"sdpa_fwd": renamed})
    with pytest.raises(TypeError, match="window_left"):
        cudnn_fe._Kernel().forward(request_of())


CAUSAL = {"is_causal": True, "window_left": -1, "window_right": -1}
BANDS = {
    "everything": ((None, None), (5, 7), {"is_causal": False, "window_left": -1, "window_right": -1}, False),
    "causal, equal": ((None, 0), (7, 7), CAUSAL, False),
    "causal, bottom right": ((None, 0), (5, 7), CAUSAL, True),
    "causal, top left": ((None, -2), (5, 7), CAUSAL, False),
    "causal, top left, more queries": ((None, 2), (7, 5), CAUSAL, False),
    "the window of a model": ((4095, 0), (5000, 5000), CAUSAL | {"window_left": 4096}, False),
    "bottom right": ((3, 0), (5, 7), CAUSAL | {"window_left": 4}, True),
    "top left": ((5, -2), (5, 7), CAUSAL | {"window_left": 4}, False),
    "diagonal alone": ((0, 0), (7, 7), CAUSAL | {"window_left": 1}, False),
    "both sides": ((3, 2), (7, 7), {"is_causal": False, "window_left": 4, "window_right": 2}, False),
    "top left, both sides": (
        (5, -1),
        (5, 7),
        {"is_causal": False, "window_left": 4, "window_right": 1},
        False,
    ),
    "left open": ((None, 2), (7, 7), {"is_causal": False, "window_left": -1, "window_right": 2}, False),
    "right open": ((1, None), (5, 7), {"is_causal": False, "window_left": 2, "window_right": -1}, True),
    "one query": ((None, 0), (1, 7), {"is_causal": False, "window_left": -1, "window_right": -1}, False),
    "one query, window": ((2, 0), (1, 7), {"is_causal": False, "window_left": 3, "window_right": -1}, True),
    "one query, top left": ((None, -6), (1, 7), CAUSAL, False),
}


@pytest.mark.parametrize("case", BANDS)
def test_bands_are_counted_as_the_operator_counts(case):
    (left, right), (seqlen_q, seqlen_kv), want, bottom_right = BANDS[case]
    request = request_of(None, seqlen_q, seqlen_kv, left=left, right=right)
    got = cudnn_fe._settings(request, is_ragged=False)._asdict()
    assert {n: got[n] for n in want} == want
    assert got["causal_bottom_right"] is bottom_right


def test_a_band_with_a_negative_side_from_both_corners_is_an_error(operators):
    request = request_of(None, 5, 7, left=3, right=-3)
    with pytest.raises(ValueError, match="window requires sides that are not negative from one corner"):
        cudnn_fe._Kernel().forward(request)
    with pytest.raises(ValueError, match="got 3 keys to the left and -1 to the right"):
        cudnn_fe._Kernel().forward(ragged_request(left=3, right=-1))
    assert not operators.calls


def test_padded_tensors_are_passed_with_their_strides(operators):
    """Layout bhsd goes in as it lies in memory, and the output takes the query's layout."""
    query, key, value = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in "qkv")
    cudnn_fe.executor.run(
        cudnn_checks.Inputs(query, key, value, scale=0.3), plan_of("cudnn_fe", training=False)
    )
    given = operators.forward
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        assert given[name].data_ptr() == tensor.data_ptr()
        assert (given[name].shape, given[name].stride()) == (tensor.shape, tensor.stride())
    assert given["attn_scale"] == 0.3
    assert "sinks" not in given


def test_ragged_tensors_and_sums_are_passed_as_they_are(operators):
    request = ragged_request(left=2, right=0)
    cudnn_fe._Kernel().forward(request)
    given = operators.forward
    for name, tensor in (("q", request.query), ("k", request.key), ("v", request.value)):
        assert given[name] is tensor
    assert given["cu_seqlens_q"] is request.cu_seqlens_q
    assert given["cu_seqlens_kv"] is request.cu_seqlens_kv
    assert (given["max_seqlen_q"], given["max_seqlen_kv"]) == (5, 6)
    assert (given["window_left"], given["is_causal"], given["causal_bottom_right"]) == (3, True, True)


def test_keys_that_are_left_out_become_sequences_without_a_query(operators):
    used = torch.tensor([3, 0, 6], dtype=torch.int32)
    request = ragged_request(([1, 1, 1], [6, 6, 6]), used_kv=used, training=False)
    ran = cudnn_fe._Kernel().forward(request)
    given = operators.forward
    assert given["cu_seqlens_q"].tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert given["cu_seqlens_kv"].tolist() == [0, 3, 6, 6, 12, 18, 18]
    assert (ran.out[1] == 0).all()
    assert (ran.lse[:, 1] == -math.inf).all()


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_backward_is_given_the_same_call(operators, deterministic):
    inputs = inputs_of(masks.Window(3, 0, "bottom_right"), 5, 9, scale=0.2)
    out, _ = cudnn_fe.executor.run(inputs, plan_of("cudnn_fe", deterministic=deterministic))
    torch.autograd.grad(out, [inputs.query, inputs.key, inputs.value], torch.randn_like(out))
    forward, backward = operators.forward, operators.backward
    same = forward.keys() - {"q", "k", "v", "sinks", "return_lse"}
    assert {n: backward[n] for n in same} == {n: forward[n] for n in same}
    assert backward["is_deterministic"] is deterministic
    assert torch.equal(backward["o"], out)
    assert "sinks" not in backward


@pytest.mark.parametrize("shift", cudnn_checks.ADVERSARIAL)
@pytest.mark.parametrize("form", cudnn_checks.FORMS)
@pytest.mark.parametrize("case", cudnn_checks.PADDED)
def test_padded_batches(operators, case, form, shift):
    mask, *lengths = cudnn_checks.PADDED[case]
    check(cudnn_fe.executor, "cudnn_fe", mask, inputs_of(mask, *lengths, form=form, shift=shift))


@pytest.mark.parametrize("case", cudnn_checks.SEQUENCES)
def test_rows_as_sequences(operators, case):
    mask, *lengths = cudnn_checks.SEQUENCES[case]
    check(cudnn_fe.executor, "cudnn_fe", mask, inputs_of(mask, *lengths), "to_varlen")
    inputs = inputs_of(mask, *lengths)
    cudnn_checks.check_without_gradients(cudnn_fe.executor, "cudnn_fe", mask, inputs, "to_varlen")


PACKED_CAUSAL = masks.Causal() & masks.Documents(lengths=[4, 5])


@pytest.mark.parametrize("form", [*cudnn_checks.FORMS, "shifted", "expanded"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_a_ragged_backward_is_given_tokens_one_behind_the_other(operators, layout, form):
    """cuDNN places dQ by the strides of the query: by what is decided they are those of a whole tensor."""
    batch = 1 if layout == "thd" else 2
    inputs = inputs_of(PACKED_CAUSAL, 9, 9, batch=batch, form=form)
    decision = decided((inputs.query, inputs.key, inputs.value), layout)
    assert decision.selected == "cudnn_fe", str(decision)
    runner = SimpleNamespace(run=lambda i, p: run_repaired(cudnn_fe.executor, i, p))
    check(runner, "cudnn_fe", PACKED_CAUSAL, inputs, *decision.verdict("cudnn_fe").repairs)
    assert all(operators.backward[n].is_contiguous() for n in ("q", "k", "v", "o"))


def decided(tensors, layout):
    """Return what an H200 would run for causal documents of views of these tensors in a layout."""
    views = [t if layout == "bhsd" else t.transpose(1, 2) for t in tensors]
    if layout == "thd":
        sums = torch.tensor([0, 4, 9], dtype=torch.int32)
        views = [t[0] for t in views]
        found = attnroute.explain(*views, is_causal=True, layout="thd", cu_seqlens_q=sums, max_seqlen_q=5)
    else:
        found = attnroute.explain(*views, PACKED_CAUSAL, layout=layout)
    versions = {"torch": "2.11.0", "cudnn": "9.19.0", "nvidia-cudnn-frontend": "1.32.0"}
    host = attnroute.Host(arch="sm_90", versions=versions)
    policy = attnroute.Policy(require="cudnn_fe")
    return attnroute.decide(found.call.with_(dtype="float16"), host, policy=policy)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_sequences_with_lengths_of_their_own(operators, band, with_sink):
    """Among them queries without keys, keys without queries and more queries than keys."""
    mask, inputs = cudnn_checks.sequences_of(*band, sink=sinks() if with_sink else None)
    check(cudnn_fe.executor, "cudnn_fe", mask, inputs, "to_varlen")


@pytest.mark.parametrize("case", ["everything", "causal", "window from the bottom right", "one query"])
def test_sinks(operators, case):
    mask, *lengths = cudnn_checks.PADDED[case]
    check(cudnn_fe.executor, "cudnn_fe", mask, inputs_of(mask, *lengths, sink=sinks()))
    assert operators.forward["sinks"].tolist() == sinks().tolist()


@pytest.mark.parametrize("case", ["causal", "documents", "padding"])
def test_a_sink_through_the_log_sum_exp(operators, case):
    """The backward gets an output and a log-sum-exp that the forward did not give."""
    made = ("to_varlen",) if case in cudnn_checks.SEQUENCES else ()
    mask, *lengths = (cudnn_checks.PADDED | cudnn_checks.SEQUENCES)[case]
    inputs = inputs_of(mask, *lengths, sink=sinks())
    runner = SimpleNamespace(run=lambda i, p: run_repaired(cudnn_fe.executor, i, p))
    check(runner, "cudnn_fe", mask, inputs, "sink_from_lse", *made)
    assert "sinks" not in operators.forward


def test_no_gradient_goes_through_the_package(operators):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "forward", torch.no_grad()(Graph.forward))
        mask, *lengths = cudnn_checks.PADDED["causal"]
        check(cudnn_fe.executor, "cudnn_fe", mask, inputs_of(mask, *lengths))


@pytest.mark.parametrize("case", cudnn_checks.REQUESTS)
def test_the_custom_operators_are_what_they_say(operators, case):
    cudnn_checks.check_operators("cudnn_fe", cudnn_checks.REQUESTS[case]())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_calls(operators, backend):
    cudnn_checks.check_compiled(cudnn_fe.executor, "cudnn_fe", backend)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(operators, use_reentrant):
    cudnn_checks.check_checkpoint(cudnn_fe.executor, "cudnn_fe", use_reentrant=use_reentrant)
    names = [name for name, _ in operators.calls]
    assert names == ["sdpa_fwd", "sdpa_bwd", "sdpa_fwd", "sdpa_fwd", "sdpa_bwd"]


@pytest.mark.parametrize("repairs", [(), ("sink_from_lse",)])
def test_what_autograd_may_ask_of_the_backward(operators, repairs):
    cudnn_checks.check_backwards(cudnn_fe.executor, "cudnn_fe", *repairs)


def test_a_sink_through_the_log_sum_exp_counts_once_at_inference(operators):
    inputs = inputs_of(None, 5, 7, sink=sinks(train=False))
    want, want_lse = attend(inputs.query, inputs.key, inputs.value, sink=inputs.sink)
    plan = plan_of("cudnn_fe", "sink_from_lse", training=False)
    with torch.no_grad():
        out, lse = run_repaired(cudnn_fe.executor, inputs, plan)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
