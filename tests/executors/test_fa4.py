"""FA4 on the CPU: every release's signatures, what is passed, and the results of a package that computes."""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from support import cudnn_checks, fa4_package, flash_attn_cases
from support.cudnn_checks import check, inputs_of, plan_of, ragged_request, request_of, sinks
from support.fa4_hosts import RELEASES
from support.fa4_package import BACKWARD, FORWARD, LENGTHS, RECORDED, SIDES, Package

from attnroute import masks
from attnroute.executors.packages import fa4
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.protocol import Inputs
from attnroute.memory import reset

NEWEST = "4.0.0b36"
WITH_SINK_GRADIENT = ("4.0.0b26", NEWEST)
ARITIES = {"4.0.0b3": 2, "4.0.0b18": 2, "4.0.0b19": 4, "4.0.0b32": 4, "4.0.0b33": 5, NEWEST: 5}
"""How many values the forward returns."""
CAUSAL_AND_BANDS = {
    "everything": ((None, None), (False, None, None)),
    "causal": ((None, 0), (True, None, None)),
    "window": ((3, 2), (False, 3, 2)),
    "causal window": ((4095, 0), (False, 4095, 0)),
    "the diagonal alone": ((0, 0), (False, 0, 0)),
    "open at the left": ((None, 2), (False, None, 2)),
    "open at the right": ((1, None), (False, 1, None)),
}
"""Left and right of a request; the causal flag and the sides that are passed, None = left out."""


def use(monkeypatch, release):
    """Put one release in the place of the package."""
    torch.manual_seed(0)
    made = Package(release)
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    reset()
    return made


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    reset()


@pytest.fixture
def package(monkeypatch):
    return use(monkeypatch, NEWEST)


@pytest.fixture(params=ARITIES)
def every(request, monkeypatch):
    return use(monkeypatch, request.param)


@pytest.fixture(params=WITH_SINK_GRADIENT)
def with_sinks(request, monkeypatch):
    return use(monkeypatch, request.param)


def launch(request):
    """Run both functions, and return what they were given."""
    ran = fa4._Kernel().forward(request)
    fa4._Kernel().backward(request, ran, torch.randn_like(ran.out))
    return ran


def test_every_release_is_recorded():
    assert [fa4_package.beta_of(release) for release in RECORDED] == list(RELEASES)


@pytest.mark.parametrize("release", RECORDED)
def test_every_release_takes_every_call(monkeypatch, release):
    package = use(monkeypatch, release)
    used = torch.tensor([3, 0, 6], dtype=torch.int32)
    requests = (
        request_of(right=0, softcap=2.0, deterministic=True),
        request_of(left=2, right=1, options="pack_gqa=False,num_splits=3"),
        ragged_request(left=2, right=0),
        ragged_request(([1, 1, 1], [6, 6, 6]), used_kv=used, sink=torch.zeros(4, dtype=torch.bfloat16)),
    )
    for request in requests:
        launch(request)
    assert [name for name, _ in package.calls] == [FORWARD, BACKWARD] * len(requests)


@pytest.mark.parametrize("release", ARITIES)
def test_releases_return_different_numbers_of_values(monkeypatch, release):
    package = use(monkeypatch, release)
    fa4._Kernel().forward(request_of())
    assert len(fa4._interface()._flash_attn_fwd(**package.only(FORWARD))) == ARITIES[release]


@pytest.mark.parametrize("function", [FORWARD, BACKWARD])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "causal"])
def test_a_renamed_parameter_fails_before_the_call(package, function, name):
    found = getattr(fa4._interface(), function)
    parameters = (
        p.replace(name="renamed") if p.name == name else p for p in found.__signature__.parameters.values()
    )
    found.__signature__ = found.__signature__.replace(parameters=list(parameters))
    message = f"backend fa4 requires {function} to take {name} for this call; got a release of flash-attn-4"
    with pytest.raises(TypeError, match=re.escape(message)):
        launch(request_of())
    assert function not in [name for name, _ in package.calls]


def test_the_signature_is_read_once_for_each_function(package, monkeypatch):
    read = []
    of = fa4.inspect.signature
    monkeypatch.setattr(fa4.inspect, "signature", lambda f: read.append(f) or of(f))
    for _ in range(3):
        launch(request_of())
    assert len(read) == 2


@pytest.mark.parametrize("kind", [request_of, ragged_request])
@pytest.mark.parametrize("case", CAUSAL_AND_BANDS)
def test_sides_of_windows(every, kind, case):
    """An open side is left out, never -1, which releases read in different ways."""
    (left, right), want = CAUSAL_AND_BANDS[case]
    launch(kind(left=left, right=right))
    for _, given in every.calls:
        assert (given["causal"], *(given.get(n) for n in SIDES)) == want


@pytest.mark.parametrize(("left", "right"), [(-1, None), (None, -3), (4, -1), (-1, 2), (-2, -2)])
def test_a_negative_side_is_no_open_one(package, left, right):
    for request in (request_of(left=left, right=right), ragged_request(left=left, right=right)):
        with pytest.raises(ValueError, match="window requires sides that are not negative from the bottom"):
            fa4._Kernel().forward(request)
    assert not package.calls


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ("", {"num_splits": 1}),
        ("pack_gqa=False", {"num_splits": 1, "pack_gqa": False}),
        ("pack_gqa=True,num_splits=4", {"num_splits": 4, "pack_gqa": True}),
        ("num_splits=0", {"num_splits": 0}),
    ],
)
def test_options_of_the_tables_reach_the_forward_alone(package, options, want):
    launch(request_of(options=options))
    given = {n: v for n, v in package.only(FORWARD).items() if n in ("num_splits", "pack_gqa")}
    assert given == want
    assert not {"num_splits", "pack_gqa"} & package.only(BACKWARD).keys()


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_backward_is_given_the_same_call(package, deterministic):
    inputs = inputs_of(masks.Window(3, 0, "bottom_right"), 5, 9, scale=0.2, softcap=0.9)
    out, _ = fa4.executor.run(inputs, plan_of("fa4", deterministic=deterministic))
    grads = torch.autograd.grad(out, [inputs.query, inputs.key, inputs.value], torch.randn_like(out))
    forward, backward = package.only(FORWARD), package.only(BACKWARD)
    shared = ("causal", "softmax_scale", "softcap", *SIDES)
    assert {n: backward[n] for n in shared} == {n: forward[n] for n in shared}
    assert [forward[n] for n in shared] == [False, 0.2, 0.9, 3, 0]
    assert backward["deterministic"] is deterministic
    assert "deterministic" not in forward
    assert torch.equal(backward["out"], out.transpose(1, 2))
    for grad, tensor in zip(grads, (inputs.query, inputs.key, inputs.value), strict=True):
        assert grad.shape == tensor.shape


def test_padded_tensors_are_passed_without_a_copy(package):
    query, key, value = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    fa4.executor.run(Inputs(query, key, value), plan_of("fa4", training=False))
    given = package.only(FORWARD)
    assert given["softmax_scale"] == 8**-0.5
    for short, tensor in (("q", query), ("k", key), ("v", value)):
        assert given[short].data_ptr() == tensor.data_ptr()
        assert given[short].shape == (2, 5, tensor.shape[1], 8)
        assert given[short].stride(-1) == 1
    assert not {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "learnable_sink", *LENGTHS} & given.keys()


def test_ragged_tensors_and_sums_are_passed_as_they_are(package):
    request = ragged_request(left=2, right=0)
    launch(request)
    for _, given in package.calls:
        for short, tensor in (("q", request.query), ("k", request.key), ("v", request.value)):
            assert given[short] is tensor
        assert given["cu_seqlens_q"] is request.cu_seqlens_q
        assert given["cu_seqlens_k"] is request.cu_seqlens_kv
        assert tuple(given[n] for n in LENGTHS) == (5, 6)
        assert "seqused_k" not in given


def test_keys_that_are_not_in_use_are_told(package):
    used = torch.tensor([3, 0, 6], dtype=torch.int32)
    request = ragged_request(([1, 1, 1], [6, 6, 6]), used_kv=used)
    ran = launch(request)
    assert all(given["seqused_k"] is used for _, given in package.calls)
    assert (ran.out[1] == 0).all()
    assert (ran.lse[:, 1] == -math.inf).all()


@pytest.mark.parametrize("form", ["expanded", "transposed", "shifted", "row gap of 3"])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_and_outputs_are_made_readable(package, form, ragged):
    request = ragged_request() if ragged else request_of()
    ran = fa4._Kernel().forward(request)
    whole = torch.randn(ran.out.shape, dtype=torch.bfloat16)
    made = {
        "expanded": lambda: torch.ones((), dtype=whole.dtype).expand(whole.shape),
        "transposed": lambda: whole.transpose(-1, -2).contiguous().transpose(-1, -2),
        "shifted": lambda: torch.empty(whole.numel() + 1, dtype=whole.dtype)[1:].view_as(whole).copy_(whole),
        "row gap of 3": lambda: torch.cat([whole, whole[..., :3]], -1)[..., : whole.shape[-1]],
    }[form]()
    lse = ran.lse.transpose(0, 1).contiguous().transpose(0, 1)
    fa4._Kernel().backward(request, ran._replace(out=made, lse=lse), made)
    given = package.only(BACKWARD)
    assert torch.equal(given["lse"], lse)
    for name in ("out", "dout"):
        assert given[name].data_ptr() != made.data_ptr()
        assert torch.equal(given[name], made)


@pytest.mark.parametrize("shift", flash_attn_cases.ADVERSARIAL)
@pytest.mark.parametrize("form", cudnn_checks.FORMS)
@pytest.mark.parametrize("case", flash_attn_cases.PADDED)
def test_padded_batches(package, case, form, shift):
    mask, *lengths = flash_attn_cases.PADDED[case]
    check(fa4.executor, "fa4", mask, inputs_of(mask, *lengths, form=form, shift=shift))


@pytest.mark.parametrize("case", cudnn_checks.SEQUENCES)
def test_rows_as_sequences(every, case):
    mask, *lengths = cudnn_checks.SEQUENCES[case]
    check(fa4.executor, "fa4", mask, inputs_of(mask, *lengths), "to_varlen")
    inputs = inputs_of(mask, *lengths)
    cudnn_checks.check_without_gradients(fa4.executor, "fa4", mask, inputs, "to_varlen")


@pytest.mark.parametrize("lengths", [cudnn_checks.LENGTHS, ([9, 2], [3, 5]), ([1, 1], [5, 0]), ([130], [7])])
@pytest.mark.parametrize("band", cudnn_checks.BANDS.values(), ids=cudnn_checks.BANDS)
def test_sequences_with_lengths_of_their_own(package, band, lengths):
    """Among them queries without keys, keys without queries and more queries than keys."""
    mask, inputs = cudnn_checks.sequences_of(*band, lengths=lengths)
    check(fa4.executor, "fa4", mask, inputs, "to_varlen")


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 9)])
@pytest.mark.parametrize("mask", [None, masks.Causal("bottom_right"), masks.Window(2, 1, "bottom_right")])
def test_softcap(every, mask, lengths):
    flash_attn_cases.check_scores(fa4.executor, "fa4", mask, lengths, softcap=0.7)


@pytest.mark.parametrize("case", ["causal", "one query", "more queries, causal", "more queries, window"])
def test_sinks_of_its_own(with_sinks, case):
    """Among them a sink of -inf, and rows with no key."""
    mask, *lengths = flash_attn_cases.PADDED[case]
    check(fa4.executor, "fa4", mask, inputs_of(mask, *lengths, sink=sinks()))
    assert "learnable_sink" in with_sinks.only(FORWARD)


@pytest.mark.parametrize("band", [(None, None), (None, 0), (1, 0)], ids=str)
def test_sinks_of_ragged_batches(with_sinks, band):
    mask, inputs = cudnn_checks.sequences_of(*band, sink=sinks())
    check(fa4.executor, "fa4", mask, inputs, "to_varlen")
    assert "learnable_sink" in with_sinks.only(FORWARD)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_sink_keeps_its_digits_and_its_gradient_its_dtype(package, dtype):
    sink = torch.tensor([0.3, -1.7, 2.1, 0.01], dtype=dtype, requires_grad=True)
    inputs = inputs_of(None, 5, 7, sink=sink)
    out, _ = fa4.executor.run(inputs, plan_of("fa4"))
    (grad,) = torch.autograd.grad(out, sink, torch.randn_like(out))
    given = package.only(FORWARD)["learnable_sink"]
    assert given.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert not given.requires_grad
    assert torch.equal(given, sink.detach().to(given.dtype))
    assert grad.dtype == dtype


@pytest.mark.parametrize("case", ["causal", "documents", "padding", "more queries, causal"])
def test_a_sink_through_the_log_sum_exp(every, case):
    """The backward gets an output and a log-sum-exp that the forward did not give."""
    made = ("to_varlen",) if case in cudnn_checks.SEQUENCES else ()
    mask, *lengths = (flash_attn_cases.PADDED | cudnn_checks.SEQUENCES)[case]
    inputs = inputs_of(mask, *lengths, sink=sinks())
    runner = SimpleNamespace(run=lambda i, p: run_repaired(fa4.executor, i, p))
    check(runner, "fa4", mask, inputs, "sink_from_lse", *made)
    assert "learnable_sink" not in every.only(FORWARD)


def test_no_gradient_goes_through_the_package(package, monkeypatch):
    given = []
    run = Package._forward

    def forward(self, arguments):
        given.append(torch.is_grad_enabled())
        return run(self, arguments)

    monkeypatch.setattr(Package, "_forward", forward)
    use(monkeypatch, NEWEST)
    mask, *lengths = flash_attn_cases.PADDED["causal"]
    check(fa4.executor, "fa4", mask, inputs_of(mask, *lengths))
    assert given == [False]


@pytest.mark.parametrize("case", cudnn_checks.REQUESTS)
def test_the_custom_operators_are_what_they_say(package, case):
    cudnn_checks.check_operators("fa4", cudnn_checks.REQUESTS[case]())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_calls(package, backend):
    cudnn_checks.check_compiled(fa4.executor, "fa4", backend)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(package, use_reentrant):
    cudnn_checks.check_checkpoint(fa4.executor, "fa4", use_reentrant=use_reentrant)


@pytest.mark.parametrize("repairs", [(), ("sink_from_lse",)])
def test_what_autograd_may_ask_of_the_backward(package, repairs):
    cudnn_checks.check_backwards(fa4.executor, "fa4", *repairs)
