"""FA2 with the package's functions written in float64: what every release is given, and what comes of it."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import cudnn_checks, flash_attn_cases
from support.cuda_operators import weights_kept
from support.cudnn_checks import check, inputs_of, plan_of, ragged_request, request_of, sinks
from support.flash_attn_math import Attention
from support.flash_attn_package import RECORDED, Package
from support.reference import attend

from attnroute import masks
from attnroute.errors import KernelRefusedError
from attnroute.executors.packages import fa2
from attnroute.executors.packages.request import Launched
from attnroute.executors.prepare.apply import run_repaired

RELEASES = ("2.5.6", "2.6.3", "2.8.3")
"""Padded log-sum-exp and no softcap; a window of one argument and eight results; custom operators."""


def use(monkeypatch, release):
    torch.manual_seed(0)
    package = Package(release)
    fa2._parameters.cache_clear()
    monkeypatch.setattr(fa2, "_module", lambda: package)
    return package


@pytest.fixture(params=RELEASES)
def package(request, monkeypatch):
    yield use(monkeypatch, request.param)
    fa2._parameters.cache_clear()


@pytest.fixture
def newest(monkeypatch):
    yield use(monkeypatch, "2.8.3")
    fa2._parameters.cache_clear()


def test_the_functions_are_found_in_their_module(monkeypatch):
    fa2._module.cache_clear()
    name = "flash_attn.flash_attn_interface"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, name, module)
    assert fa2._module() is module
    fa2._module.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        fa2._module()
    fa2._module.cache_clear()


def test_the_parameters_of_a_custom_operator_are_those_of_its_schema(monkeypatch):
    def function(q: torch.Tensor, dropout_p: float, window_size_left: int = -1) -> torch.Tensor:
        return q.clone()

    wrapped = torch.library.custom_op("attnroute_test::fa2_function", function, mutates_args=())
    monkeypatch.setattr(fa2, "_module", lambda: SimpleNamespace(_flash_attn_forward=wrapped))
    fa2._parameters.cache_clear()
    assert fa2._parameters("_flash_attn_forward") == {"q", "dropout_p", "window_size_left"}
    fa2._parameters.cache_clear()


def test_releases_are_recorded():
    minors = {tuple(release.split(".")[:2]) for release in RECORDED}
    assert minors == {("2", n) for n in "5678"}
    assert {"2.5.0", "2.6.3", "2.7.4.post1", "2.8.3.post2"} <= RECORDED.keys()


@pytest.mark.parametrize("release", RECORDED)
def test_every_release_takes_the_calls(monkeypatch, release):
    package = use(monkeypatch, release)
    kernel = fa2._Kernel()
    for request in (request_of(right=0), ragged_request(left=2, right=0)):
        ran = kernel.forward(request)
        kernel.backward(request, ran, torch.randn_like(ran.out))
    padded, ragged = ("_flash_attn_forward", "_flash_attn_varlen_forward")
    names = [name.replace("backward", "forward") for name, _ in package.calls]
    assert names == [padded, padded, ragged, ragged]
    assert [name.endswith("backward") for name, _ in package.calls] == [False, True] * 2
    fa2._parameters.cache_clear()


def test_a_renamed_parameter_fails(newest, monkeypatch):
    newest._flash_attn_forward._opoverload._schema.arguments[4].name = "scale"
    with pytest.raises(TypeError, match="_flash_attn_forward to take softmax_scale; got a release that"):
        fa2._Kernel().forward(request_of())
    assert not newest.calls


@pytest.mark.parametrize(
    ("release", "change", "name"),
    [("2.5.9", {"softcap": 3.0}, "softcap"), ("2.6.1", {"used_kv": True}, "seqused_k")],
)
def test_what_a_release_lacks_is_never_dropped(monkeypatch, release, change, name):
    use(monkeypatch, release)
    if "used_kv" in change:
        change = {"used_kv": torch.tensor([3, 1, 2], dtype=torch.int32), "training": False}
    with pytest.raises(TypeError, match=f"to take {name}"):
        fa2._Kernel().forward(ragged_request(([1, 1, 1], [4, 4, 4]), **change))
    fa2._parameters.cache_clear()


@pytest.mark.parametrize("case", flash_attn_cases.SIDES)
def test_sides_of_windows(newest, case):
    (left, right), lengths, want = flash_attn_cases.SIDES[case]
    request = request_of(None, *(min(n, 40) for n in lengths), left=left, right=right)
    request = request._replace(max_seqlen_q=lengths[0], max_seqlen_kv=lengths[1])
    sides = fa2.sides_of(request)
    assert sides == want
    given = fa2._settings(request, sides)
    assert (given["window_size_left"], given["window_size_right"]) == want
    assert given["causal"] is (want == (-1, 0))


@pytest.mark.parametrize(("left", "right"), [(-1, None), (None, -3), (4, -1)])
def test_a_negative_side_is_no_open_one(newest, left, right):
    for request in (request_of(left=left, right=right), ragged_request(left=left, right=right)):
        with pytest.raises(ValueError, match="window requires sides that are not negative from the bottom"):
            fa2._Kernel().forward(request)
    assert not newest.calls


def test_padded_tensors_are_passed_without_a_copy(newest):
    query, key, value = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in "qkv")
    fa2.executor.run(cudnn_checks.Inputs(query, key, value, scale=0.3), plan_of("fa2", training=False))
    ((name, given),) = newest.calls
    assert name == "_flash_attn_forward"
    for short, tensor in (("q", query), ("k", key), ("v", value)):
        assert given[short].data_ptr() == tensor.data_ptr()
        assert given[short].shape == (2, 5, 4, 8)
    assert (given["softmax_scale"], given["dropout_p"], given["alibi_slopes"]) == (0.3, 0.0, None)


def test_ragged_tensors_and_sums_are_passed_as_they_are(newest):
    request = ragged_request(left=2, right=0, scale=0.7, softcap=5.0)
    fa2._Kernel().forward(request)
    ((name, given),) = newest.calls
    assert name == "_flash_attn_varlen_forward"
    for short, tensor in (("q", request.query), ("k", request.key), ("v", request.value)):
        assert given[short] is tensor
    assert given["cu_seqlens_q"] is request.cu_seqlens_q
    assert given["cu_seqlens_k"] is request.cu_seqlens_kv
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (5, 6)
    assert (given["softmax_scale"], given["softcap"]) == (0.7, 5.0)


def test_a_bound_of_one_query_is_raised_where_a_sequence_has_none(package):
    kernel = fa2._Kernel()
    kernel.forward(ragged_request(([1, 1, 1], [4, 2, 1])))
    assert package.calls[-1][1]["max_seqlen_q"] == 1
    kernel.forward(ragged_request(([1, 0, 1], [4, 2, 1])))
    assert package.calls[-1][1]["max_seqlen_q"] == 2


@pytest.mark.parametrize("lengths", [(9, 5), (5, 5), (5, 9)])
@pytest.mark.parametrize("sides", [(2, None), (None, 6), (None, 2), (None, 0), (1, 6), (None, None)])
def test_rows_become_sequences_only_where_the_padded_function_misses_keys(newest, lengths, sides):
    left, right = sides
    fa2._Kernel().forward(request_of(None, *lengths, left=left, right=right))
    is_cut = lengths == (9, 5) and sides in ((2, None), (None, 6), (1, 6))
    assert newest.calls[-1][0] == ("_flash_attn_varlen_forward" if is_cut else "_flash_attn_forward")


def test_the_keys_in_use_are_passed(newest):
    used = torch.tensor([3, 0, 6], dtype=torch.int32)
    request = ragged_request(([1, 1, 1], [6, 6, 6]), used_kv=used, training=False)
    ran = fa2._Kernel().forward(request)
    assert newest.calls[-1][1]["seqused_k"] is used
    assert (ran.out[1] == 0).all()
    with pytest.raises(ValueError, match="fa2's backward requires that every key is in use"):
        fa2._Kernel().backward(request, ran, torch.randn_like(ran.out))


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_backward_is_given_the_same_call(newest, deterministic):
    mask = masks.Window(3, 0, "bottom_right")
    inputs = inputs_of(mask, 5, 9, scale=0.2)
    out, _ = fa2.executor.run(inputs, plan_of("fa2", deterministic=deterministic))
    torch.autograd.grad(out, [inputs.query, inputs.key, inputs.value], torch.randn_like(out))
    (_, forward), (name, backward) = newest.calls
    assert name == "_flash_attn_backward"
    same = forward.keys() - {"q", "k", "v", "return_softmax"}
    assert {n: backward[n] for n in same} == {n: forward[n] for n in same}
    assert backward["deterministic"] is deterministic
    assert torch.equal(backward["out"], out.transpose(1, 2))
    assert backward["dk"].shape == (2, 9, 2, 8)


@pytest.mark.parametrize("form", ["expanded", "slice", "whole"])
def test_gradients_of_any_strides_are_read(newest, form):
    request = request_of(right=0)
    ran = fa2._Kernel().forward(request)
    grads = {
        "expanded": torch.ones((), dtype=torch.float64).expand(ran.out.shape),
        "slice": torch.randn(*ran.out.shape[:-1], 11, dtype=torch.float64)[..., 1:9],
        "whole": torch.randn_like(ran.out),
    }
    fa2._Kernel().backward(request, ran, grads[form])
    given = newest.calls[-1][1]["dout"]
    assert torch.equal(given, grads[form])
    assert (given is grads[form]) == (form == "whole")


@pytest.mark.parametrize("shift", flash_attn_cases.ADVERSARIAL)
@pytest.mark.parametrize("form", cudnn_checks.FORMS)
@pytest.mark.parametrize("case", flash_attn_cases.PADDED)
def test_padded_batches(newest, case, form, shift):
    mask, *lengths = flash_attn_cases.PADDED[case]
    check(fa2.executor, "fa2", mask, inputs_of(mask, *lengths, form=form, shift=shift))


@pytest.mark.parametrize("case", ["causal", "one query", "more queries, open at the right"])
def test_padded_batches_of_every_form_of_the_package(package, case):
    mask, *lengths = flash_attn_cases.PADDED[case]
    check(fa2.executor, "fa2", mask, inputs_of(mask, *lengths))


@pytest.mark.parametrize("case", cudnn_checks.SEQUENCES)
def test_rows_as_sequences(package, case):
    mask, *lengths = cudnn_checks.SEQUENCES[case]
    check(fa2.executor, "fa2", mask, inputs_of(mask, *lengths), "to_varlen")
    if package.release == "2.8.3":
        inputs = inputs_of(mask, *lengths)
        cudnn_checks.check_without_gradients(fa2.executor, "fa2", mask, inputs, "to_varlen")


@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_sequences_with_lengths_of_their_own(package, band):
    """Among them queries without keys, keys without queries and more queries than keys."""
    mask, inputs = cudnn_checks.sequences_of(*band)
    check(fa2.executor, "fa2", mask, inputs, "to_varlen")


@pytest.mark.parametrize("lengths", [([9, 2], [3, 5]), ([1, 1], [5, 0]), ([130], [7])])
@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_more_queries_than_the_longest_keys(package, band, lengths):
    mask, inputs = cudnn_checks.sequences_of(*band, lengths=lengths)
    check(fa2.executor, "fa2", mask, inputs, "to_varlen")


@pytest.mark.parametrize("case", ["causal", "documents", "padding", "more queries, causal"])
def test_a_sink_through_the_log_sum_exp(package, case):
    """The backward gets an output and a log-sum-exp that the forward did not give."""
    made = ("to_varlen",) if case in cudnn_checks.SEQUENCES else ()
    mask, *lengths = (flash_attn_cases.PADDED | cudnn_checks.SEQUENCES)[case]
    inputs = inputs_of(mask, *lengths, sink=sinks())
    runner = SimpleNamespace(run=lambda i, p: run_repaired(fa2.executor, i, p))
    check(runner, "fa2", mask, inputs, "sink_from_lse", *made)


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 9)])
@pytest.mark.parametrize("mask", [None, masks.Causal("bottom_right"), masks.Window(2, 1, "bottom_right")])
def test_softcap(newest, mask, lengths):
    flash_attn_cases.check_scores(fa2.executor, "fa2", mask, lengths, softcap=0.7)
    assert [given["softcap"] for _, given in newest.calls] == [0.7, 0.7]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("score", [{"softcap": 0.7}, {"alibi_slopes": torch.tensor([0.5, 0.3, 0.2, 0.1])}])
def test_a_sink_beside_other_changes_of_the_scores(newest, score, training):
    mask = masks.Causal("bottom_right")
    inputs = inputs_of(mask, 5, 9, sink=sinks(train=training), **score)
    tensors = (inputs.query, inputs.key, inputs.value)
    want = attend(*tensors, allowed=cudnn_checks.allowed_of(mask, inputs), sink=inputs.sink, **score)
    trained = cudnn_checks.trained(inputs)
    found = run_repaired(fa2.executor, inputs, plan_of("fa2", "sink_from_lse", training=training))
    if training:
        cudnn_checks.hold(found, want, trained)
    else:
        torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-6)


SLOPES = {
    "per head": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "per row": torch.tensor([[0.5, 0.25, 0.125, 0.0625], [0.3, 0.2, 0.1, 0.0]]),
}
ALIBI = {
    "everything": None,
    "causal": masks.Causal("bottom_right"),
    "window": masks.Window(2, 1, "bottom_right"),
    "as wide as causal": masks.Window(40, 0, "bottom_right"),
    "open at the right": masks.Window(2, None, "bottom_right"),
}


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 9)])
@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize("mask", ALIBI.values(), ids=ALIBI)
def test_alibi(package, mask, slopes, lengths):
    """The log-sum-exp too, which the kernel gives for other scores where the mask is causal."""
    flash_attn_cases.check_scores(fa2.executor, "fa2", mask, lengths, alibi_slopes=slopes)


@pytest.mark.parametrize("slopes", [SLOPES["per head"], torch.rand(6, 4)], ids=["per head", "per sequence"])
def test_alibi_of_sequences(package, slopes):
    lengths = cudnn_checks.LENGTHS
    request = ragged_request(lengths, right=0, alibi_slopes=slopes)
    ran = fa2._Kernel().forward(request)
    grad_out = torch.randn_like(ran.out)
    grads = fa2._Kernel().backward(request, Launched(ran.out, ran.lse), grad_out)
    cuts = zip(request.query.split(lengths[0]), request.key.split(lengths[1]), strict=True)
    for n, (query, key) in enumerate(cuts):
        if not len(query) * len(key):
            continue
        values = request.value.split(lengths[1])[n]
        leaves = [t.transpose(0, 1)[None].requires_grad_() for t in (query, key, values)]
        causal = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        own = slopes if slopes.dim() == 1 else slopes[n]
        want, lse = attend(*leaves, allowed=causal, alibi_slopes=own, scale=request.scale)
        seen = causal.any(-1)
        got_lse = ran.lse.split(lengths[0], 1)[n].double()
        torch.testing.assert_close(got_lse[:, seen], lse[0][:, seen].detach(), rtol=1e-5, atol=1e-5)
        wanted = torch.autograd.grad(want, leaves, grad_out.split(lengths[0])[n].transpose(0, 1)[None])
        for got, true, sizes in zip(grads, wanted, (lengths[0], *[lengths[1]] * 2), strict=False):
            torch.testing.assert_close(got.split(sizes)[n].transpose(0, 1), true[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(6, 6), (9, 5)])
def test_dropout_keeps_its_state(package, lengths):
    mask = masks.Window(2, None, "bottom_right")
    inputs = inputs_of(mask, *lengths, dropout_p=0.4)
    tensors = (inputs.query, inputs.key, inputs.value)
    out, _ = fa2.executor.run(inputs, plan_of("fa2"))
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, cotangent)
    state = package.calls[-1][1]["rng_state"]
    assert (state.shape, state.dtype) == ((2,), torch.int64)
    want = _dropped(inputs, mask, 0.4, state, ragged=lengths == (9, 5))
    torch.testing.assert_close(out, want)
    wanted = torch.autograd.grad(want, tensors, cotangent)
    for got, true in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-6)


def _dropped(inputs, mask, dropout_p, state, *, ragged):
    """Return the definition's output with the same weights dropped; a ragged batch draws row by row."""
    query, key, value = (t.double() for t in (inputs.query, inputs.key, inputs.value))
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~cudnn_checks.allowed_of(mask, inputs), -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, scores.masked_fill(empty, 0.0).softmax(-1))
    shape = (1, *weights.shape[1:]) if ragged else weights.shape
    return (weights * weights_kept(shape, dropout_p, state[0])) @ value


def test_without_dropout_there_is_no_state(package):
    assert fa2._Kernel().forward(request_of()).state is None
    assert fa2._Kernel().forward(request_of(dropout_p=0.1)).state.shape == (2,)


@pytest.mark.parametrize("case", ["padded", "ragged"])
def test_the_custom_operators_are_what_they_say(newest, case):
    cudnn_checks.check_operators("fa2", cudnn_checks.REQUESTS[case]())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_calls(newest, backend):
    cudnn_checks.check_compiled(fa2.executor, "fa2", backend)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(newest, use_reentrant):
    cudnn_checks.check_checkpoint(fa2.executor, "fa2", use_reentrant=use_reentrant)


@pytest.mark.parametrize("repairs", [(), ("sink_from_lse",)])
def test_what_autograd_may_ask_of_the_backward(newest, repairs):
    cudnn_checks.check_backwards(fa2.executor, "fa2", *repairs)


def test_what_the_package_refuses_is_one_error(newest, monkeypatch):
    def refuse(given):
        msg = "head_dim 512 is not supported"
        raise RuntimeError(msg)

    monkeypatch.setattr(Attention, "forward", lambda *_: refuse(None))
    with pytest.raises(KernelRefusedError, match="head_dim 512 is not supported"):
        fa2.executor.run(inputs_of(None, 5, 5), plan_of("fa2"))
