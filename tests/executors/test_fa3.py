"""FA3 with its operators written in float64: what every build is given, and what comes of it."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import cudnn_checks, flash_attn_cases, signatures
from support.cudnn_checks import check, inputs_of, plan_of, ragged_request, request_of, sinks
from support.flash_attn_math import Attention, cuts_of, ragged_backward, ragged_forward

from attnroute import masks
from attnroute.executors.packages import fa3
from attnroute.executors.prepare.apply import run_repaired
from attnroute.memory import reset

RECORDED = signatures.recorded("flash-attn-3")
BUILDS = ("3.0.0b1 of 2025-05-22", "3.0.0", "xformers 0.0.34")
"""Without defaults, a backward of five results, a backward of eight."""
SETTINGS = ("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "seqused_k")


class Operator:
    """One operator of a build: calls are held against its schema and kept."""

    def __init__(self, name, signature, run, calls, returned):
        self._name, self._signature, self._run, self._calls = name, signature, run, calls
        arguments = [
            SimpleNamespace(name=p.name, has_default_value=lambda p=p: p.default is not p.empty)
            for p in signature.parameters.values()
        ]
        self.default = SimpleNamespace(
            _schema=SimpleNamespace(arguments=arguments, returns=[None] * returned)
        )

    def __call__(self, *args, **given):
        given = self._signature.bind(*args, **given).arguments
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"):
            given.setdefault(name, None)
        _check_types(given)
        self._calls.append((self._name, given))
        return self._run(given)


class Operators:
    """The namespace `torch.ops.flash_attn_3` of one build."""

    def __init__(self, build):
        self.build = build
        self.calls = []
        self.makes_gradients = build.startswith("xformers")
        returned = 8 if self.makes_gradients else 5
        self.fwd = Operator("fwd", RECORDED[build]["fwd"], self._forward, self.calls, 4)
        self.bwd = Operator("bwd", RECORDED[build]["bwd"], self._backward, self.calls, returned)

    def _forward(self, given):
        attention, tensors, cuts = _read(given)
        run = attention.forward(*tensors) if cuts is None else ragged_forward(attention, tensors, cuts)
        out, lse = run
        return out.to(tensors[0].dtype), lse, out.new_empty(0), out.new_empty(0)

    def _backward(self, given):
        attention, tensors, cuts = _read(given)
        lse = given["softmax_lse"]
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        read = (given["out"], lse, given["dout"])
        if cuts is None:
            grads = attention.backward(*tensors, *read)
        else:
            grads = ragged_backward(attention, tensors, *read, cuts)
        made = [given[n] for n in ("dq", "dk", "dv") if n in given]
        if not made:
            assert self.makes_gradients, "nobody would see them"
            made = [torch.empty_like(t) for t in tensors]
        for place, grad in zip(made, grads, strict=True):
            assert place.is_contiguous()
            place.copy_(torch.where(grad.isnan(), place.double(), grad))
        return (*made, *[lse] * 5) if self.makes_gradients else (lse,) * 5


def _read(given):
    """Return the attention as the C++ reads it, the tensors and the sequences."""
    tensors = [given[n] for n in ("q", "k", "v")]
    is_ragged = given["cu_seqlens_q"] is not None
    assert is_ragged == (given["cu_seqlens_k"] is not None)
    assert is_ragged == (given["max_seqlen_q"] is not None) == (given["max_seqlen_k"] is not None)
    lengths = (
        [given["max_seqlen_q"], given["max_seqlen_k"]] if is_ragged else [t.shape[1] for t in tensors[:2]]
    )
    left, right = given["window_size_left"], given["window_size_right"]
    left, right = -1 if left >= lengths[1] - 1 else left, -1 if right >= lengths[0] - 1 else right
    if given["is_causal"] and lengths[0] > 1:
        right = 0
    # As set_params_fprop of the package.
    if (left, right) != (-1, 0):
        left, right = lengths[1] - 1 if left < 0 else left, lengths[0] - 1 if right < 0 else right
    attention = Attention(given["softmax_scale"], left, right, given["softcap"], empty=-math.inf)
    if not is_ragged:
        return attention, tensors, None
    cuts = cuts_of(given["cu_seqlens_q"], given["cu_seqlens_k"], given["seqused_k"])
    assert max(rows.stop - rows.start for rows, _ in cuts) <= lengths[0]
    assert max(keys.stop - keys.start for _, keys in cuts) <= lengths[1]
    return attention, tensors, cuts


def _check_types(given):
    assert isinstance(given["is_causal"], bool)
    assert isinstance(given.get("deterministic", False), bool)
    for name in ("window_size_left", "window_size_right", "num_splits"):
        assert type(given.get(name, 0)) is int
    for name in ("softmax_scale", "softcap"):
        assert type(given[name]) is float
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        assert given[name] is None or given[name].dtype == torch.int32


def use(monkeypatch, build):
    torch.manual_seed(0)
    made = Operators(build)
    reset()
    monkeypatch.setattr(fa3, "_operators", lambda: made)
    return made


@pytest.fixture(params=BUILDS)
def every(request, monkeypatch):
    yield use(monkeypatch, request.param)
    reset()


@pytest.fixture
def operators(monkeypatch):
    yield use(monkeypatch, "3.0.0")
    reset()


@pytest.fixture
def loader(monkeypatch):
    """Forget what was loaded, and make the libraries that a test names."""
    for name in (*fa3._LIBRARIES, "flash_attn_3", "xformers", "xformers.flash_attn_3"):
        monkeypatch.setitem(sys.modules, name, None)

    def install(library):
        parts = library.split(".")
        for n in range(len(parts)):
            name = ".".join(parts[: n + 1])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))

    fa3._operators.cache_clear()
    yield install
    fa3._operators.cache_clear()


@pytest.mark.parametrize("library", fa3._LIBRARIES)
def test_either_library_registers_the_operators(loader, library):
    loader(library)
    assert fa3._operators() is torch.ops.flash_attn_3


def test_without_a_library_the_error_says_what_was_looked_for(loader):
    with pytest.raises(ImportError) as caught:
        fa3._operators()
    for library in fa3._LIBRARIES:
        assert f"{library}: " in str(caught.value)
    assert str(caught.value).endswith("install one of them.")


def test_a_broken_library_does_not_hide_the_other(loader, monkeypatch):
    imported = []

    def import_module(name):
        imported.append(name)
        if name.startswith("flash_attn_3"):
            msg = "libcudart.so.12: cannot open shared object file"
            raise OSError(msg)

    monkeypatch.setattr(fa3, "import_module", import_module)
    assert fa3._operators() is torch.ops.flash_attn_3
    assert imported == list(fa3._LIBRARIES)


def test_operators_that_are_registered_are_not_registered_again(loader, monkeypatch):
    """torch ends the process where a second library defines an operator."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define("fwd(Tensor q, Tensor? k_new, Tensor? out=None, int num_splits=0) -> Tensor")
    library.impl("fwd", lambda q, *rest: q * rest[-1], "CPU")
    monkeypatch.setattr(fa3, "import_module", lambda _: pytest.fail("imported"))
    reset()
    try:
        assert fa3._arguments("fwd") == {"q": True, "k_new": True, "out": False, "num_splits": False}
        with pytest.raises(TypeError, match=r"its operator fwd to take k, v, .*; got a build that does not"):
            fa3._Kernel().forward(request_of())
    finally:
        library._destroy()
        reset()
        if "fwd" in torch.ops.flash_attn_3.__dict__:
            del torch.ops.flash_attn_3.fwd


@pytest.mark.parametrize("build", RECORDED)
def test_every_build_takes_the_calls(monkeypatch, build):
    made = use(monkeypatch, build)
    for request in (request_of(right=0), ragged_request(left=2, right=0)):
        ran = fa3._Kernel().forward(request)
        fa3._Kernel().backward(request, ran, torch.randn_like(ran.out))
    assert [name for name, _ in made.calls] == ["fwd", "bwd"] * 2
    reset()


def test_builds_are_recorded():
    assert set(BUILDS) <= RECORDED.keys()
    assert len(RECORDED) == 10


def test_a_renamed_parameter_fails(operators):
    arguments = operators.fwd.default._schema.arguments
    next(a for a in arguments if a.name == "softcap").name = "cap"
    with pytest.raises(TypeError, match="operator fwd to take softcap; got a build that does not"):
        fa3._Kernel().forward(request_of())
    assert not operators.calls


@pytest.mark.parametrize("case", flash_attn_cases.SIDES)
def test_sides_of_windows(operators, case):
    (left, right), lengths, want = flash_attn_cases.SIDES[case]
    request = request_of(None, 5, 7, left=left, right=right)
    given = fa3._settings(
        request._replace(max_seqlen_q=lengths[0], max_seqlen_kv=lengths[1]), is_ragged=False
    )
    assert (given["window_size_left"], given["window_size_right"]) == want
    assert given["is_causal"] is (want == (-1, 0))


@pytest.mark.parametrize("case", flash_attn_cases.NEGATIVE)
def test_a_negative_side_is_no_open_one(operators, case):
    mask, *lengths = cudnn_checks.PADDED[case]
    with pytest.raises(ValueError, match=r"got -\d keys to the right of the diagonal"):
        fa3._Kernel().forward(_request(mask, lengths))
    assert not operators.calls


def _request(mask, lengths):
    from attnroute.executors.packages.request import request_of as ours

    return ours(inputs_of(mask, *lengths), plan_of("fa3"))


def test_padded_tensors_are_passed_without_a_copy(operators):
    query, key, value = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in "qkv")
    fa3.executor.run(
        cudnn_checks.Inputs(query, key, value, scale=0.3, softcap=2.0), plan_of("fa3", training=False)
    )
    ((name, given),) = operators.calls
    assert name == "fwd"
    for short, tensor in (("q", query), ("k", key), ("v", value)):
        assert given[short].data_ptr() == tensor.data_ptr()
        assert given[short].shape == (2, 5, 4, 8)
    assert (given["softmax_scale"], given["softcap"]) == (0.3, 2.0)
    assert "k_new" not in given


def test_ragged_tensors_and_sums_are_passed_as_they_are(operators):
    request = ragged_request(left=2, right=0)
    fa3._Kernel().forward(request)
    ((_, given),) = operators.calls
    for short, tensor in (("q", request.query), ("k", request.key), ("v", request.value)):
        assert given[short] is tensor
    assert given["cu_seqlens_q"] is request.cu_seqlens_q
    assert given["cu_seqlens_k"] is request.cu_seqlens_kv
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (5, 6)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"training": True, "options": "num_splits=0"}, 1),
        ({"training": False, "deterministic": True, "options": "num_splits=0"}, 1),
        ({"training": False, "options": "num_splits=0"}, 0),
        ({"training": False, "options": "pack=1,num_splits=4"}, 4),
        ({"training": False}, 1),
    ],
)
def test_keys_are_split_only_where_nothing_comes_out_twice(operators, change, want):
    fa3._Kernel().forward(request_of(**change))
    assert operators.calls[-1][1]["num_splits"] == want


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_backward_is_given_the_same_call(operators, deterministic):
    inputs = inputs_of(masks.Window(3, 0, "bottom_right"), 5, 9, scale=0.2, softcap=0.9)
    out, _ = fa3.executor.run(inputs, plan_of("fa3", deterministic=deterministic))
    torch.autograd.grad(out, [inputs.query, inputs.key, inputs.value], torch.randn_like(out))
    (_, forward), (name, backward) = operators.calls
    assert name == "bwd"
    assert {n: backward[n] for n in SETTINGS} == {n: forward[n] for n in SETTINGS}
    assert backward["deterministic"] is deterministic
    assert torch.equal(backward["out"], out.transpose(1, 2))
    assert backward["dk"].shape == (2, 9, 2, 8)


def test_keys_that_are_not_in_use_get_no_gradient(operators):
    used = torch.tensor([3, 0, 6], dtype=torch.int32)
    request = ragged_request(([1, 1, 1], [6, 6, 6]), used_kv=used)
    ran = fa3._Kernel().forward(request)
    assert operators.calls[-1][1]["seqused_k"] is used
    assert (ran.out[1] == 0).all()
    grads = fa3._Kernel().backward(request, ran, torch.randn_like(ran.out))
    seen = torch.arange(18) % 6 < used.repeat_interleave(6)
    for grad in (grads.key, grads.value):
        assert (grad[~seen] == 0).all()
        assert (grad[seen] != 0).any(-1).all()


@pytest.mark.parametrize("shift", flash_attn_cases.ADVERSARIAL)
@pytest.mark.parametrize("form", cudnn_checks.FORMS)
@pytest.mark.parametrize("case", flash_attn_cases.PADDED)
def test_padded_batches(operators, case, form, shift):
    mask, *lengths = flash_attn_cases.PADDED[case]
    check(fa3.executor, "fa3", mask, inputs_of(mask, *lengths, form=form, shift=shift))


@pytest.mark.parametrize("case", cudnn_checks.SEQUENCES)
def test_rows_as_sequences(every, case):
    mask, *lengths = cudnn_checks.SEQUENCES[case]
    check(fa3.executor, "fa3", mask, inputs_of(mask, *lengths), "to_varlen")
    inputs = inputs_of(mask, *lengths)
    cudnn_checks.check_without_gradients(fa3.executor, "fa3", mask, inputs, "to_varlen")


@pytest.mark.parametrize("lengths", [cudnn_checks.LENGTHS, ([9, 2], [3, 5]), ([1, 1], [5, 0]), ([130], [7])])
@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_sequences_with_lengths_of_their_own(operators, band, lengths):
    """Among them queries without keys, keys without queries and more queries than keys."""
    mask, inputs = cudnn_checks.sequences_of(*band, lengths=lengths)
    check(fa3.executor, "fa3", mask, inputs, "to_varlen")


@pytest.mark.parametrize("case", ["causal", "documents", "padding", "more queries, causal"])
def test_a_sink_through_the_log_sum_exp(operators, case):
    """The backward gets an output and a log-sum-exp that the forward did not give."""
    made = ("to_varlen",) if case in cudnn_checks.SEQUENCES else ()
    mask, *lengths = (flash_attn_cases.PADDED | cudnn_checks.SEQUENCES)[case]
    inputs = inputs_of(mask, *lengths, sink=sinks())
    runner = SimpleNamespace(run=lambda i, p: run_repaired(fa3.executor, i, p))
    check(runner, "fa3", mask, inputs, "sink_from_lse", *made)


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 9)])
@pytest.mark.parametrize("mask", [None, masks.Causal("bottom_right"), masks.Window(2, 1, "bottom_right")])
def test_softcap(every, mask, lengths):
    flash_attn_cases.check_scores(fa3.executor, "fa3", mask, lengths, softcap=0.7)


def test_no_gradient_goes_through_the_package(operators, monkeypatch):
    monkeypatch.setattr(Attention, "forward", torch.no_grad()(Attention.forward))
    mask, *lengths = flash_attn_cases.PADDED["causal"]
    check(fa3.executor, "fa3", mask, inputs_of(mask, *lengths))


@pytest.mark.parametrize("case", ["padded", "ragged"])
def test_the_custom_operators_are_what_they_say(operators, case):
    cudnn_checks.check_operators("fa3", cudnn_checks.REQUESTS[case]())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_calls(operators, backend):
    cudnn_checks.check_compiled(fa3.executor, "fa3", backend)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(operators, use_reentrant):
    cudnn_checks.check_checkpoint(fa3.executor, "fa3", use_reentrant=use_reentrant)


@pytest.mark.parametrize("repairs", [(), ("sink_from_lse",)])
def test_what_autograd_may_ask_of_the_backward(operators, repairs):
    cudnn_checks.check_backwards(fa3.executor, "fa3", *repairs)
