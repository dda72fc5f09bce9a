"""Bias objects: what they say, how they combine, and that each does what its definition says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from support.edge_inputs import close, gradients, normal
from support.reference import attend
from support.spy import ran

import attnroute
from attnroute import biases, masks
from attnroute.api import routes
from attnroute.errors import ArgumentError
from attnroute.memory import reset


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def unchanged(score, b, h, i, j):
    return score


# The objects.


def test_reprs_name_shapes_and_functions_and_no_values():
    dense, slopes = torch.zeros(2, 1, 6, 9), torch.zeros(4)
    assert repr(biases.Dense(dense)) == "Dense((2, 1, 6, 9))"
    assert repr(biases.ALiBi(slopes)) == "ALiBi((4,))"
    assert repr(biases.Function(unchanged)) == "Function(unchanged)"
    assert repr(biases.Softcap(30.0)) == "Softcap(30.0)"
    assert repr(biases.ALiBi(slopes) + biases.Softcap(30.0)) == "Softcap(30.0) + ALiBi((4,))"


def test_equality_and_hash_take_tensors_by_identity():
    one, other = torch.zeros(4), torch.zeros(4)
    for kind in (biases.Dense, biases.ALiBi):
        assert kind(one) == kind(one)
        assert hash(kind(one)) == hash(kind(one))
        assert kind(one) != kind(other)
    assert biases.Dense(one) != biases.ALiBi(one)
    assert biases.Softcap(2.0) == biases.Softcap(2)
    assert biases.Softcap(2.0) != biases.Softcap(3.0)
    assert biases.Function(unchanged) == biases.Function(unchanged)
    both = biases.Dense(one) + biases.Softcap(2.0)
    assert both == biases.Softcap(2.0) + biases.Dense(one)
    assert (
        len({both, biases.Softcap(2.0) + biases.Dense(one), biases.Softcap(2.0) + biases.Dense(other)}) == 2
    )
    assert both != biases.Softcap(2.0)


def test_a_sum_has_its_softcap_first():
    both = biases.Function(unchanged) + biases.Softcap(2.0)
    assert both.parts == (biases.Softcap(2.0), biases.Function(unchanged))


DENSE, ALIBI, CAP = biases.Dense(torch.zeros(6, 9)), biases.ALiBi(torch.zeros(4)), biases.Softcap(30.0)
ONE_OF_EACH = "+ of biases requires at most one Softcap and one of ALiBi, Dense and Function; got "
BOTH_SIDES = "+ of biases requires bias objects on both sides (ALiBi, Dense, Function, Softcap); got "
REFUSED = {
    "two softcaps": (lambda: CAP + CAP, ONE_OF_EACH + "Softcap(30.0) and Softcap(30.0); add the tensors"),
    "two tensors": (lambda: DENSE + DENSE, ONE_OF_EACH + "Dense((6, 9)) and Dense((6, 9)); add"),
    "a tensor and slopes": (
        lambda: (CAP + DENSE) + ALIBI,
        ONE_OF_EACH + "Dense((6, 9)) and ALiBi((4,)); add",
    ),
    "a bare tensor": (
        lambda: CAP + torch.zeros(6, 9),
        BOTH_SIDES + "Tensor; put a tensor into biases.Dense.",
    ),
    "a bare tensor first": (lambda: torch.zeros(6, 9) + CAP, BOTH_SIDES + "Tensor; put"),
    "a mask": (lambda: CAP + masks.Causal(), BOTH_SIDES + "Causal; put"),
    "a number first": (lambda: sum([CAP, DENSE]), BOTH_SIDES + "int; put"),
    "integers": (
        lambda: biases.Dense(torch.zeros(6, 9, dtype=torch.int64)),
        "bias Dense requires a floating-point tensor; got torch.int64; pass a bool tensor as mask.",
    ),
    "a list": (lambda: biases.Dense([[0.0]]), "bias Dense requires a floating-point tensor; got list; pass"),
    "whole slopes": (
        lambda: biases.ALiBi(torch.zeros(4, dtype=torch.int32)),
        "bias ALiBi slopes requires a floating-point tensor; got torch.int32; pass one number per query",
    ),
    "slopes as a list": (
        lambda: biases.ALiBi([0.5]),
        "bias ALiBi slopes requires a floating-point tensor; got l",
    ),
    "no function": (lambda: biases.Function(0.5), "bias Function requires a function; got float; pass"),
    "a negative softcap": (
        lambda: biases.Softcap(-1.0),
        "bias Softcap requires a finite Python number of at least 0; got -1.0; pass 0.0 to switch it off.",
    ),
    "an endless softcap": (
        lambda: biases.Softcap(float("inf")),
        "bias Softcap requires a finite .*; got inf",
    ),
    "a softcap that is no number": (
        lambda: biases.Softcap(float("nan")),
        "bias Softcap requires .*; got nan",
    ),
    "a softcap of None": (lambda: biases.Softcap(None), "bias Softcap requires a finite Python .*; got None"),
    "a softcap as a tensor": (
        lambda: biases.Softcap(torch.ones(())),
        "bias Softcap requires .*; got Tensor; pass",
    ),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
def test_what_means_nothing_is_refused_in_one_sentence(make, said):
    with pytest.raises(ArgumentError) as raised:
        make()
    text = str(raised.value)
    assert re.match(said if ".*" in said else re.escape(said), text), text
    assert re.fullmatch(r".+ requires .+; got .+; .+\.", text), text


def test_importing_the_module_leaves_torch_out():
    code = "import attnroute.biases, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


# What they do.

OBJECTS = {
    "dense": lambda: biases.Dense(torch.randn(4, 1, 9).unsqueeze(0).requires_grad_()),
    "alibi": lambda: biases.ALiBi(torch.rand(4).requires_grad_()),
    "alibi per row": lambda: biases.ALiBi(torch.rand(2, 4).requires_grad_()),
    "softcap": lambda: biases.Softcap(2.0),
    "dense and softcap": lambda: biases.Dense(torch.randn(6, 9).requires_grad_()) + biases.Softcap(2.0),
    "softcap and alibi": lambda: biases.Softcap(2) + biases.ALiBi(torch.rand(4).requires_grad_()),
}


def spelled_out(bias):
    """Return the same as arguments of the reference, and the tensors in it."""
    found = {}
    for part in bias.parts:
        if isinstance(part, biases.Softcap):
            found["softcap"] = part.value
        elif isinstance(part, biases.ALiBi):
            found["alibi_slopes"] = part.slopes
        else:
            found["bias"] = part.tensor
    return found, [t for t in found.values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_an_object_is_what_its_definition_says_and_what_the_arguments_say(make):
    inputs = [t.requires_grad_() for t in normal()]
    bias = make()
    meaning, tensors = spelled_out(bias)
    backend = attnroute.explain(*inputs, bias=bias).selected
    assert backend == attnroute.explain(*inputs, **meaning).selected
    with ran(backend):
        out = attnroute.attention(*inputs, bias=bias)
    want, _ = attend(*inputs, **meaning)
    close(out, want)
    trained = [*inputs, *tensors]
    for got, wanted in zip(gradients(out, trained), gradients(want, trained), strict=True):
        close(got, wanted, floor=5.0)
    assert torch.equal(out, attnroute.attention(*inputs, **meaning))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_objects_in_either_layout_beside_a_mask_and_a_float_mask(layout):
    query, key, value = normal(seqlen_kv=6)
    given = [t.transpose(1, 2) if layout == "bshd" else t for t in (query, key, value)]
    tensor, floats = torch.randn(6, 6), torch.randn(2, 1, 1, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    out = attnroute.attention(*given, masks.Causal(), bias=biases.Dense(tensor), layout=layout)
    close(
        out if layout == "bhsd" else out.transpose(1, 2),
        attend(query, key, value, allowed=causal, bias=tensor)[0],
    )
    out = attnroute.attention(*given, floats, bias=biases.Dense(tensor), layout=layout)
    close(
        out if layout == "bhsd" else out.transpose(1, 2), attend(query, key, value, bias=tensor + floats)[0]
    )


def test_a_softcap_of_nothing_is_off():
    inputs = normal()
    assert torch.equal(attnroute.attention(*inputs), attnroute.attention(*inputs, bias=biases.Softcap(0.0)))
    assert attnroute.explain(*inputs, bias=biases.Softcap(0.0)) == attnroute.explain(*inputs)


def test_autocast_casts_a_dense_object():
    inputs, bias = normal(), torch.randn(6, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = attnroute.explain(*inputs, bias=biases.Dense(bias)).call
    assert (call.dtype, call.bias.dtype) == ("bfloat16", "bfloat16")


# Functions.


def damped(strength):
    def score_mod(score, b, h, i, j):
        return score * torch.cos(0.1 * (i - j)) - strength[h] * (b + 1) * (i - j).abs()

    return score_mod


def damped_scores(query, key, strength, softcap=0.0):
    """Return what is to be added to the scaled scores so that they become those of `damped`."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    rows = torch.arange(1, query.shape[0] + 1)[:, None, None, None]
    changed = capped * torch.cos(0.1 * distance) - strength.double()[:, None, None] * rows * distance.abs()
    return changed - capped


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("trained", [False, True])
def test_a_score_function_with_its_gradients(trained, softcap):
    inputs = [t.requires_grad_() for t in normal(dtype=torch.float64)]
    strength = torch.rand(4, dtype=torch.float64).requires_grad_(trained)
    bias = biases.Function(damped(strength))
    arguments = {"is_causal": True, "causal_alignment": "bottom_right", "backend": "chunked"}
    with ran("chunked"):
        out = attnroute.attention(*inputs, bias=bias, softcap=softcap, **arguments)
    allowed = torch.ones(6, 9, dtype=torch.bool).tril(3)
    added = damped_scores(inputs[0], inputs[1], strength, softcap)
    want, _ = attend(*inputs, allowed=allowed, softcap=softcap, bias=added)
    close(out, want, torch.float64)
    wished = [*inputs, strength] if trained else inputs
    for got, wanted in zip(gradients(out, wished), gradients(want, wished), strict=True):
        close(got, wanted, torch.float64, floor=5.0)


def test_a_function_reads_tensors_as_they_are_at_each_call():
    inputs, strength = normal(), torch.zeros(4)
    bias = biases.Function(damped(strength))
    for value in (0.0, 1.0, 3.0):
        strength.fill_(value)
        want, _ = attend(*inputs, bias=damped_scores(inputs[0], inputs[1], strength))
        close(attnroute.attention(*inputs, bias=bias, backend="chunked"), want)


# The question as data, and the routes.


def call_of(*inputs, bias):
    return attnroute.explain(*inputs, bias=bias).call


def test_what_a_bias_object_is_in_the_question():
    inputs = normal()
    slopes = torch.zeros(4).requires_grad_()
    assert call_of(*inputs, bias=biases.ALiBi(torch.zeros(4))).bias.model_dump() == {
        "kind": "alibi",
        "requires_grad": False,
        "per_batch": False,
    }
    assert call_of(*inputs, bias=biases.ALiBi(torch.zeros(2, 4))).bias.per_batch
    trained = call_of(*inputs, bias=biases.ALiBi(slopes))
    assert (trained.bias.requires_grad, trained.phase, trained.qkv_requires_grad) == (True, "training", False)
    assert call_of(*inputs, bias=biases.Softcap(3.0)).softcap == 3.0
    assert call_of(*inputs, bias=biases.Dense(torch.zeros(6, 9))).bias.shape == (6, 9)
    with torch.no_grad():
        frozen = call_of(*inputs, bias=biases.ALiBi(slopes))
    assert (frozen.bias.requires_grad, frozen.phase) == (False, "inference")


@pytest.mark.parametrize("trained", [False, True])
def test_tensors_that_a_function_reads_count_as_trained(trained):
    strength = torch.zeros(4).requires_grad_(trained)
    call = call_of(*normal(), bias=biases.Function(damped(strength)))
    assert call.bias.model_dump() == {"kind": "function", "requires_grad": trained}
    assert call.phase == ("training" if trained else "inference")
    with torch.no_grad():
        assert call_of(*normal(), bias=biases.Function(damped(strength))).phase == "inference"


def test_routes_depend_on_the_kind_of_bias_and_on_gradients_and_on_no_identity(monkeypatch):
    made = []
    make = routes.make
    monkeypatch.setattr(routes, "make", lambda *given, **rest: made.append(given[2]) or make(*given, **rest))
    reset()
    inputs = normal()
    kinds = [
        lambda: biases.Dense(torch.zeros(6, 9)),
        lambda: biases.Dense(torch.zeros(6, 9).requires_grad_()),
        lambda: biases.ALiBi(torch.zeros(4)),
        lambda: biases.ALiBi(torch.zeros(4).requires_grad_()),
        lambda: biases.Softcap(2.0),
        lambda: biases.Softcap(2.0) + biases.ALiBi(torch.zeros(4)),
    ]
    for number, kind in enumerate(kinds, start=1):
        for _ in range(3):
            attnroute.attention(*inputs, bias=kind())
        assert len(made) == number
    attnroute.attention(*inputs, bias=torch.zeros(6, 9))
    attnroute.attention(*inputs, alibi_slopes=torch.zeros(4))
    assert len(made) == len(kinds)


def test_routes_of_functions_depend_on_gradients_and_on_no_identity(monkeypatch):
    made = []
    make = routes.make
    monkeypatch.setattr(routes, "make", lambda *given, **rest: made.append(given[2]) or make(*given, **rest))
    reset()
    inputs = normal()
    for trained in (False, True):
        for _ in range(3):
            bias = biases.Function(damped(torch.zeros(4).requires_grad_(trained)))
            attnroute.attention(*inputs, bias=bias, backend="chunked")
    assert len(made) == 2


def stored(tensor, form):
    """Return equal values in other memory."""
    if form == "tokens outermost":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]] if form == "sliced" else tensor


BANDS = {
    "none": ({}, lambda _: None),
    "top_left": ({"is_causal": True, "causal_alignment": "top_left"}, lambda distance: distance >= 0),
    "bottom_right": (
        {"is_causal": True, "causal_alignment": "bottom_right"},
        lambda distance: distance >= -3,
    ),
    "window": ({"window": (2, 1), "causal_alignment": "top_left"}, lambda d: (d <= 2) & (d >= -1)),
}


@pytest.mark.parametrize("form", ["contiguous", "tokens outermost", "sliced"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("band", BANDS)
def test_small_alibi_runs_as_a_bias_of_the_kernel(band, with_sink, shape, form):
    """A small term is built for torch's kernel, which takes a fifth of chunked's time."""
    options, allowed_by = BANDS[band]
    inputs = [t.requires_grad_() for t in (stored(t, form) for t in normal())]
    slopes, sink = torch.rand(shape), torch.randn(4).requires_grad_() if with_sink else None
    allowed = allowed_by(torch.arange(6)[:, None] - torch.arange(9))
    leaves = [*inputs, sink] if with_sink else inputs
    with ran("flash"):
        out = attnroute.attention(*inputs, alibi_slopes=slopes, sink=sink, **options)
    want = attend(*inputs, allowed=allowed, alibi_slopes=slopes, sink=sink)[0]
    close(out, want)
    for got, true in zip(gradients(out, leaves), gradients(want, leaves), strict=True):
        close(got, true.double(), floor=1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
        {"train": True},
        {"seqlen_q": 2049, "seqlen_kv": 2049},
    ],
)
def test_alibi_that_a_tensor_would_round_or_that_is_large_or_trains_is_counted_in_blocks(change):
    train = change.pop("train", False)
    slopes = torch.rand(4).requires_grad_(train)
    assert attnroute.explain(*normal(**change), alibi_slopes=slopes).selected == "chunked"


def test_alibi_of_new_lengths_in_one_graph():
    run = torch.compile(attnroute.attention, backend="eager", dynamic=True, fullgraph=True)
    slopes = torch.rand(4)
    for length in (7, 40, 2100, 33):
        inputs = normal(seqlen_q=3, seqlen_kv=length)
        close(run(*inputs, alibi_slopes=slopes), attend(*inputs, alibi_slopes=slopes)[0])
