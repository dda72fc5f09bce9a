"""TE with the package's functions written in float64: what they are given, and what comes of it."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from support import cudnn_checks
from support.cudnn_checks import check, inputs_of, plan_of, ragged_request, request_of, sinks
from support.fake_te import MODULE, RECORDED, Package
from support.reference import attend

from attnroute import masks
from attnroute.executors.packages import te
from attnroute.executors.prepare.apply import run_repaired

KNOWN = ("2.12.0", "2.14.1", "2.15.0", "2.16.1", "2.17.1", "2.20.2")
"""Releases from the first with `bottom_right_diagonal` on."""


def installed(monkeypatch, release="2.16.1", **how):
    """Put a release in the place of the package."""
    package = Package(release, **how)
    for name, module in package.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for cached in (te._module, te._parameters, te._dtype):
        cached.cache_clear()
    return package


@pytest.fixture(autouse=True)
def forgotten():
    torch.manual_seed(0)
    yield
    for cached in (te._module, te._parameters, te._dtype):
        cached.cache_clear()


@pytest.fixture(params=[False, True], ids=["per token", "padded"])
def package(monkeypatch, request):
    """Each form of a ragged batch's log-sum-exp."""
    return installed(monkeypatch, padded=request.param)


@pytest.fixture
def only(monkeypatch):
    return installed(monkeypatch)


def test_every_release_of_the_tables_is_recorded():
    assert set(KNOWN) <= RECORDED.keys()
    later = [
        r
        for r, functions in RECORDED.items()
        if "bottom_right_diagonal" in functions["fused_attn_fwd"].parameters
    ]
    assert later[0] == KNOWN[0]
    assert later[-1] == KNOWN[-1]


@pytest.mark.parametrize("release", [r for r in RECORDED if r not in ("2.8.0", "2.9.0", "2.10.0", "2.11.0")])
def test_calls_bind_to_every_release(monkeypatch, release):
    package = installed(monkeypatch, release)
    for case, made in (("window from the bottom right", ()), ("causal documents", ("to_varlen",))):
        mask, *lengths = (cudnn_checks.PADDED | cudnn_checks.SEQUENCES)[case]
        check(te.executor, "te", mask, inputs_of(mask, *lengths, sink=sinks()), *made)
    names = set().union(*(given for _, given in package.calls))
    has_formats = release >= "2.15"
    assert ({"o_format", "do_format", "dqkv_layout"} <= names) == has_formats
    assert ("dqkv_dtype" in names) == (not has_formats)


@pytest.mark.parametrize("release", ["2.8.0", "2.11.0"])
def test_an_argument_that_a_release_lacks_is_an_error(monkeypatch, release):
    package = installed(monkeypatch, release)
    wanted = "transformer-engine requires fused_attn_fwd to take bottom_right_diagonal; got a release that"
    with pytest.raises(TypeError, match=wanted):
        te._Kernel().forward(request_of(right=0))
    assert not package.calls


def test_a_renamed_parameter_fails(monkeypatch):
    function = RECORDED["2.16.1"]["fused_attn_fwd"]
    kept = [p for p in function.parameters.values() if p.name != "window_size"]
    monkeypatch.setitem(RECORDED["2.16.1"], "fused_attn_fwd", function.replace(parameters=kept))
    installed(monkeypatch)
    with pytest.raises(TypeError, match="to take window_size"):
        te._Kernel().forward(request_of())


def test_the_package_is_imported_when_it_is_first_used(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(ImportError):
        te._Kernel().forward(request_of())


BANDS = {
    "everything": ((None, None), (5, 7), "no_mask", (-1, -1), False),
    "causal, equal": ((None, 0), (7, 7), "causal", (-1, 0), False),
    "causal, bottom right": ((None, 0), (5, 7), "causal_bottom_right", (-1, 0), True),
    "causal, top left": ((None, -2), (5, 7), "causal", (-1, 0), False),
    "the window of a model": ((4095, 0), (5000, 5000), "causal", (4095, 0), False),
    "bottom right": ((3, 0), (5, 7), "causal_bottom_right", (3, 0), True),
    "top left": ((5, -2), (5, 7), "causal", (3, 0), False),
    "diagonal alone": ((0, 0), (7, 7), "causal", (0, 0), False),
    "both sides": ((3, 2), (7, 7), "no_mask", (3, 2), False),
    "right open": ((1, None), (5, 7), "no_mask", (1, -1), True),
    "one query": ((None, 0), (1, 7), "no_mask", (-1, -1), False),
    "one query, window": ((2, 0), (1, 7), "no_mask", (2, -1), True),
}


@pytest.mark.parametrize("case", BANDS)
def test_bands_are_said_as_the_package_says_them(only, case):
    (left, right), (seqlen_q, seqlen_kv), mask_type, window, bottom_right = BANDS[case]
    got = te._settings(request_of(None, seqlen_q, seqlen_kv, left=left, right=right))
    assert (got["attn_mask_type"], got["window_size"]) == (mask_type, window)
    assert got["bottom_right_diagonal"] is bottom_right


@pytest.mark.parametrize(
    ("band", "mask_type", "window"),
    [
        ((None, None), "padding", (-1, -1)),
        ((None, 0), "padding_causal_bottom_right", (-1, 0)),
        ((3, 0), "padding_causal_bottom_right", (3, 0)),
        ((3, 2), "padding", (3, 2)),
    ],
)
def test_ragged_batches_have_a_padding_mask(only, band, mask_type, window):
    request = ragged_request(left=band[0], right=band[1])
    te._Kernel().forward(request)
    given = only.only("fused_attn_fwd")
    assert (given["attn_mask_type"], given["window_size"]) == (mask_type, window)
    assert given["bottom_right_diagonal"] is (band != (None, None))
    assert (given["qkv_layout"], given["o_format"]) == ("thd_thd_thd", "thd")
    assert given["cu_seqlens_q"] is given["cu_seqlens_q_padded"] is request.cu_seqlens_q
    assert given["cu_seqlens_kv"] is given["cu_seqlens_kv_padded"] is request.cu_seqlens_kv
    assert (given["max_seqlen_q"], given["max_seqlen_kv"]) == (5, 6)


def test_keys_that_are_left_out_lie_between_sequences(only):
    used = torch.tensor([3, 0, 6], dtype=torch.int32)
    request = ragged_request(([1, 1, 1], [6, 6, 6]), used_kv=used, training=False)
    ran = te._Kernel().forward(request)
    given = only.only("fused_attn_fwd")
    assert given["cu_seqlens_kv"].tolist() == [0, 3, 3, 9]
    assert given["cu_seqlens_kv_padded"].tolist() == [0, 6, 12, 18]
    assert given["is_training"] is False
    assert (ran.out[1] == 0).all()
    assert (ran.lse[:, 1] == -math.inf).all()


def test_tensors_that_lie_as_the_package_reads_them_are_not_copied(only):
    query, key, value = (torch.randn(2, 5, 4, 8, dtype=torch.float64) for _ in "qkv")
    views = (t.transpose(1, 2) for t in (query, key, value))
    te.executor.run(cudnn_checks.Inputs(*views, scale=0.3), plan_of("te", training=False))
    given = only.only("fused_attn_fwd")
    assert [given[n].data_ptr() for n in "qkv"] == [t.data_ptr() for t in (query, key, value)]
    assert (given["attn_scale"], given["qkv_layout"], given["o_format"]) == (0.3, "bshd_bshd_bshd", "bshd")
    assert given["cu_seqlens_q"].tolist() == [0, 5, 10]
    assert (given["is_training"], given["dropout"]) == (False, 0.0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_backward_is_given_the_same_call(only, deterministic):
    inputs = inputs_of(masks.Window(3, 0, "bottom_right"), 5, 9, scale=0.2)
    out, _ = te.executor.run(inputs, plan_of("te", deterministic=deterministic))
    torch.autograd.grad(out, [inputs.query, inputs.key, inputs.value], torch.randn_like(out))
    ahead, back = only.only("fused_attn_fwd"), only.only("fused_attn_bwd")
    same = ahead.keys() & back.keys() - {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"}
    assert {"attn_mask_type", "window_size", "bottom_right_diagonal", "attn_scale", "max_seqlen_kv"} <= same
    assert {n: back[n] for n in same} == {n: ahead[n] for n in same}
    assert back["deterministic"] is deterministic
    assert torch.equal(back["o"].transpose(1, 2), out)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_keeps_its_state_for_the_backward(only, training):
    kernel, request = te._Kernel(), request_of(dropout_p=0.25, training=training)
    for expected in ([17, 0], [17, 4]):
        ran = kernel.forward(request)
        assert ran.state.tolist() == expected
    assert all((given["dropout"], given["is_training"]) == (0.25, True) for _, given in only.calls)
    kernel.backward(request, ran, torch.randn_like(ran.out))
    back = only.only("fused_attn_bwd")
    assert back["dropout"] == 0.25
    assert back["aux_ctx_tensors"][1].tolist() == [17, 4]
    assert kernel.forward(request._replace(dropout_p=0.0)).state is None


def test_a_backward_before_any_forward_is_an_error(only):
    request = ragged_request(right=0)
    ran = te._Kernel().forward(request)
    with pytest.raises(RuntimeError, match="te's backward requires a forward before it"):
        te._Kernel().backward(request, ran, torch.randn_like(ran.out))


@pytest.mark.parametrize("shift", cudnn_checks.ADVERSARIAL)
@pytest.mark.parametrize("form", cudnn_checks.FORMS)
@pytest.mark.parametrize("case", cudnn_checks.PADDED)
def test_padded_batches(only, case, form, shift):
    mask, *lengths = cudnn_checks.PADDED[case]
    check(te.executor, "te", mask, inputs_of(mask, *lengths, form=form, shift=shift))


@pytest.mark.parametrize("case", cudnn_checks.SEQUENCES)
def test_rows_as_sequences(package, case):
    mask, *lengths = cudnn_checks.SEQUENCES[case]
    check(te.executor, "te", mask, inputs_of(mask, *lengths), "to_varlen")
    cudnn_checks.check_without_gradients(te.executor, "te", mask, inputs_of(mask, *lengths), "to_varlen")


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_sequences_with_lengths_of_their_own(package, band, with_sink):
    """Among them queries without keys, keys without queries and more queries than keys."""
    mask, inputs = cudnn_checks.sequences_of(*band, sink=sinks() if with_sink else None)
    check(te.executor, "te", mask, inputs, "to_varlen")


@pytest.mark.parametrize("case", ["everything", "causal", "window from the bottom right", "one query"])
def test_sinks(only, case):
    mask, *lengths = cudnn_checks.PADDED[case]
    check(te.executor, "te", mask, inputs_of(mask, *lengths, sink=sinks()))
    given = only.only("fused_attn_fwd")
    assert given["softmax_type"] == "learnable"
    assert given["softmax_offset"].flatten().tolist() == sinks().tolist()


@pytest.mark.parametrize("case", ["causal", "documents", "padding"])
def test_a_sink_through_the_log_sum_exp(package, case):
    """The backward gets an output and a log-sum-exp that the forward did not give."""
    made = ("to_varlen",) if case in cudnn_checks.SEQUENCES else ()
    mask, *lengths = (cudnn_checks.PADDED | cudnn_checks.SEQUENCES)[case]
    runner = SimpleNamespace(run=lambda i, p: run_repaired(te.executor, i, p))
    check(runner, "te", mask, inputs_of(mask, *lengths, sink=sinks()), "sink_from_lse", *made)
    assert package.only("fused_attn_fwd")["softmax_type"] == "vanilla"


@pytest.mark.parametrize("case", cudnn_checks.REQUESTS)
def test_the_custom_operators_are_what_they_say(only, case):
    cudnn_checks.check_operators("te", cudnn_checks.REQUESTS[case]())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_calls(only, backend):
    cudnn_checks.check_compiled(te.executor, "te", backend)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(only, use_reentrant):
    cudnn_checks.check_checkpoint(te.executor, "te", use_reentrant=use_reentrant)
    names = [name.removeprefix("fused_attn_") for name, _ in only.calls]
    assert names == ["fwd", "bwd", "fwd", "fwd", "bwd"]


@pytest.mark.parametrize("repairs", [(), ("sink_from_lse",)])
def test_what_autograd_may_ask_of_the_backward(only, repairs):
    cudnn_checks.check_backwards(te.executor, "te", *repairs)


def test_a_sink_through_the_log_sum_exp_counts_once_at_inference(only):
    inputs = inputs_of(None, 5, 7, sink=sinks(train=False))
    want, want_lse = attend(inputs.query, inputs.key, inputs.value, sink=inputs.sink)
    plan = plan_of("te", "sink_from_lse", training=False)
    with torch.no_grad():
        out, lse = run_repaired(te.executor, inputs, plan)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
