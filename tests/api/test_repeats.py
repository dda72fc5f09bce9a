"""The short way of calls that repeat an earlier one: who may take it, what runs on it, what it keeps."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields, is_dataclass
from itertools import combinations

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.spy import profiled
from support.variations import CALLS, EAGER_FACTS, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import attnroute
from attnroute import masks
from attnroute.api import dispatch, keys, repeats, routes
from attnroute.api.alike import alike, apart
from attnroute.api.intake import take
from attnroute.api.question import call_of
from attnroute.api.records import Given
from attnroute.executors.protocol import Inputs
from attnroute.question.facts import facts_of
from attnroute.question.normalize import normalize
from attnroute.settings import call_policy

pytestmark = pytest.mark.usefixtures("fresh")

STOCK = "aten::scaled_dot_product_attention"
FLAGS = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.7


def given_of(make, arguments):
    return Given(*make(), **arguments)


def warmed(given, times=2):
    """Run a call as often as it takes to be kept."""
    for _ in range(times):
        out = attnroute.attention(**given._asdict())
    return out


def policy_of(given):
    return call_policy(given.backend, given.prefer)


def key_of(given):
    return keys.key_of(take(given), policy_of(given))


def kept_for(given):
    """Return the repeat that a call finds."""
    try:
        place, found, _ = alike(*apart(given))
    except TypeError:
        return None
    kept = () if place is None else repeats._REPEATS.get(place) or ()
    return next((repeat for repeat in kept if repeat.check(*found)), None)


SIMPLE = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "window": {"window": (2, 1)},
    "bool mask": {"mask": FLAGS},
    "float mask": {"mask": torch.zeros(6, 6).masked_fill(~FLAGS, -torch.inf)},
    "bias": {"bias": torch.randn(1, 4, 6, 6)},
    "padding": {"mask": masks.KeyPadding(lengths=torch.tensor([6, 4]), finite=True)},
    "causal padding": {"mask": masks.Causal() & masks.KeyPadding(lengths=[6, 4], finite=True)},
    "causal object": {"mask": masks.Causal()},
    "window object": {"mask": masks.Window(2, 1)},
    "bshd": {"layout": "bshd"},
    "bshd with a mask": {"layout": "bshd", "mask": masks.Dense(FLAGS)},
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", SIMPLE)
def test_a_call_like_an_earlier_one_goes_the_short_way_and_is_right(name, train, ways):
    arguments = SIMPLE[name]
    turned = arguments.get("layout") == "bshd"
    for n in range(4):
        query, key, value = (t.requires_grad_(train) for t in tensors(heads_kv=2))
        passed = [t.transpose(1, 2) for t in (query, key, value)] if turned else (query, key, value)
        out = attnroute.attention(*passed, **arguments)
        want = dispatch.run(Given(*passed, **arguments))[0]
        ways.pop()
        assert error(out, want) <= TOLERANCE[torch.float32]
        if train:
            grad = torch.randn_like(out)
            for got, wanted in zip(
                *(torch.autograd.grad(o, (query, key, value), grad) for o in (out, want)), strict=True
            ):
                assert error(got, wanted) <= TOLERANCE[torch.float32]
        assert ways[-1] == ("short" if n else "long")


def test_torch_runs_what_it_would_select_itself():
    """Only its own function, so that its own gradient is all that autograd has."""
    inputs = tensors()
    warmed(Given(*inputs, is_causal=True))
    with profiled("flash") as profile:
        attnroute.attention(*inputs, is_causal=True)
    assert STOCK in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("name", ["plain", "causal", "bool mask", "window", "bias", "bshd"])
def test_the_kernel_that_was_decided_runs_whatever_torch_would_select_later(name):
    given = given_of(tensors, SIMPLE[name])
    want = warmed(given)
    with sdpa_kernel([SDPBackend.MATH]), profiled("flash") as profile:
        out = attnroute.attention(**given._asdict())
    assert STOCK not in {event.key for event in profile.key_averages()}
    assert torch.equal(out, want)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with profiled("flash"):
            out = attnroute.attention(**given._asdict())
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert torch.equal(out, want)
    with profiled("flash") as profile:
        attnroute.attention(**given._asdict())
    assert STOCK in {event.key for event in profile.key_averages()}


def test_a_kernel_that_torch_would_not_select_is_called_itself():
    given = given_of(tensors, {})
    with sdpa_kernel([SDPBackend.MATH]):
        warmed(given, 3)
        with profiled("flash") as profile:
            attnroute.attention(**given._asdict())
    assert STOCK not in {event.key for event in profile.key_averages()}
    with profiled("flash"):
        attnroute.attention(**given._asdict())


def test_a_backend_that_is_no_kernel_of_torch_goes_the_short_way_too(ways):
    for _ in range(3):
        out = attnroute.attention(*tensors(), softcap=2.0, backend="chunked")
    assert ways == ["long", "short", "short"]
    assert out.isfinite().all()


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


SURROUNDINGS = {
    "a dispatch mode": Nothing,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "an override": lambda: attnroute.override(backend="chunked"),
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "forward-mode gradients": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_surrounds_a_call_takes_it_off_the_short_way(name, ways):
    given = given_of(tensors, {})
    warmed(given, 3)
    with SURROUNDINGS[name]():
        attnroute.attention(**given._asdict())
    assert ways == ["long", "short", "short", "long"]


@pytest.mark.parametrize("name", SIMPLE)
def test_a_dispatch_mode_sees_the_operators_of_every_kind_of_call(name, ways):
    given = given_of(tensors, SIMPLE[name])
    turned = given.layout == "bshd"
    if turned:
        given = given._replace(**{n: getattr(given, n).transpose(1, 2) for n in ("query", "key", "value")})
    warmed(given, 3)
    with Nothing():
        for arguments in (given, given._replace(key=given.key.clone())):
            attnroute.attention(**arguments._asdict())
    assert ways[2:] == ["short", "long", "long"]


def test_a_dispatch_mode_takes_a_call_with_a_new_mask_off_the_short_way(ways):
    query, key, value = tensors()
    for n in (6, 5):
        attnroute.attention(query, key, value, masks.KeyPadding(lengths=torch.tensor([6, n])))
    with Nothing():
        attnroute.attention(query, key, value, masks.KeyPadding(lengths=torch.tensor([6, 3])))
    assert ways == ["long", "short", "long"]


@pytest.mark.parametrize(
    "same",
    [{"softcap": 0.0, "dropout_p": 0.0}, {"layout": "BHSD".lower()}, {"scale": None, "backend": None}],
    ids=lambda same: next(iter(same)),
)
def test_a_default_that_is_stated_makes_no_other_call(same, ways):
    for stated in ({}, same, {}, same):
        attnroute.attention(*tensors(), **stated)
    assert ways == ["long", *["short"] * 3]


def test_no_address_of_a_tensor_of_a_tracer_is_read(ways):
    """torch warns of that, and such warnings are errors here."""
    with FakeTensorMode() as mode:
        for _ in range(3):
            attnroute.attention(*map(mode.from_tensor, tensors()))
    assert ways == ["long"] * 3


def test_determinism_and_transforms_take_a_call_off_the_short_way(ways):
    query, key, value = tensors()
    for _ in range(3):
        attnroute.attention(query, key, value)
    torch.use_deterministic_algorithms(True)
    try:
        attnroute.attention(query, key, value)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.vmap(lambda x: attnroute.attention(query, key, value) + x)(torch.zeros(2))
    assert ways == ["long", "short", "short", "long", "long"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_causal": 0},
        {"return_lse": 0},
        {"softcap": False},
        {"dropout_p": False},
        {"max_seqlen_q": 6},
        {"scale": "1"},
        {"window": (2.0, 1)},
        {"window": (2, True)},
        {"window": [2, 1]},
    ],
    ids=lambda wrong: "-".join(map(str, next(iter(wrong.items())))),
)
def test_a_wrong_argument_that_equals_a_right_one_is_refused_every_time(wrong):
    inputs = tensors()
    warmed(Given(*inputs), 3)
    warmed(Given(*inputs, window=(2, 1)), 3)
    for _ in range(2):
        with pytest.raises(attnroute.ArgumentError):
            attnroute.attention(*inputs, **wrong)


# Everything that a decision may depend on.


def test_the_short_way_leads_to_the_route_of_the_key():
    """Whatever the short way compares, it finds no other route than the whole key does."""
    calls = {name: given_of(*call) for name, call in CALLS.items()}
    for given in calls.values():
        warmed(given, 3)
    kept = 0
    for name, given in calls.items():
        repeat = kept_for(given)
        if repeat is not None:
            kept += 1
            assert repeat.route is routes.lookup(key_of(given)), name
    assert kept >= len(calls) // 2


def question_of(given):
    problem = take(given)
    return normalize(call_of(problem, recognize=True))


def test_calls_with_equal_keys_are_equal_questions():
    """Each fact that a row may ask about differs in some pair of calls, and then so do their keys."""
    made = [(name, given_of(*call)) for name, call in CALLS.items()]
    asked = {name: (key_of(given), facts_of(question_of(given))) for name, given in made}
    differs = set()
    for (one, (key, facts)), (other, (key_2, facts_2)) in combinations(asked.items(), 2):
        found = {name for name in facts if facts[name] != facts_2[name]}
        assert not found or key != key_2, (one, other, found)
        differs |= found
    assert EAGER_FACTS - differs == set()


def shown(value):
    """Return what a part of the inputs says, tensors by place and form."""
    if isinstance(value, torch.Tensor):
        return (value.data_ptr(), value.shape, value.stride(), value.dtype)
    if is_dataclass(value):
        return tuple((field.name, shown(getattr(value, field.name))) for field in fields(value))
    return tuple(map(shown, value)) if isinstance(value, tuple) else value


def test_executors_get_the_same_on_both_ways(monkeypatch):
    got, real = [], routes.run_repaired

    def run(executor, inputs, plan):
        # Before anything is prepared in place.
        got.append(({field.name: shown(getattr(inputs, field.name)) for field in fields(Inputs)}, plan))
        return real(executor, inputs, plan)

    monkeypatch.setattr(routes, "run_repaired", run)
    monkeypatch.setattr(repeats, "bind", lambda *_: None)
    monkeypatch.setattr(repeats, "bind_form", lambda *_: None)
    compared = 0
    for name, call in CALLS.items():
        given = given_of(*call)
        warmed(given, 2)
        if kept_for(given) is not None:
            dispatch.run(given)
            repeats.run(*apart(given))
            assert got[-1] == got[-2], name
            compared += 1
    assert compared >= len(CALLS) // 2


# Masks.


def test_a_mask_that_changed_is_read_anew(ways):
    query, key, value = tensors()
    mask = FLAGS.clone()
    for hidden in (0, 3):
        mask[:] = True
        mask[:, hidden] = False
        for _ in range(3):
            out = attnroute.attention(query, key, value, mask)
            assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]
    assert ways == ["long", *["short"] * 5]


def test_memory_that_others_write_is_read_in_each_call(ways):
    query, key, value = tensors()
    shared = FLAGS.numpy().copy()
    mask = torch.from_numpy(shared)
    for hidden in (0, 1, 2, 3):
        shared[:] = True
        shared[:, hidden] = False
        out = attnroute.attention(query, key, value, mask)
        assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]
    assert ways == ["long", *["short"] * 3]


def test_masks_of_one_form_do_not_share_what_was_made_of_them():
    query, key, value = tensors()
    several = [torch.rand(6, 6) < 0.6 for _ in range(3)]
    for _ in range(3):
        for mask in several:
            out = attnroute.attention(query, key, value, mask)
            assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_neither_mask_nor_what_was_made_of_it_outlives_the_user(ways):
    query, key, value = tensors()
    mask, padding = FLAGS.clone(), masks.KeyPadding(lengths=torch.tensor([6, 4]), finite=True)
    for _ in range(3):
        attnroute.attention(query, key, value, mask)
        attnroute.attention(query, key, value, padding)
    assert ways[-2:] == ["short", "short"]
    gone = [weakref.ref(mask.untyped_storage()), weakref.ref(padding)]
    del mask, padding
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_mask_that_is_a_known_pattern_runs_as_that(ways):
    query, key, value = torch.randn(3, 1, 2, 300, 16).unbind()
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    for _ in range(4):
        with profiled("flash"):
            out = attnroute.attention(query, key, value, mask)
        assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]
    assert ways[-1] == "short"


# What ends it.


def test_a_backend_that_is_dropped_is_not_found_again(ways):
    given = given_of(tensors, {})
    warmed(given, 3)
    repeats.drop("flash", lambda _: True)
    warmed(given, 1)
    assert ways == ["long", "short", "short", "long"]


def test_layers_that_differ_in_what_trains_all_go_the_short_way(ways):
    frozen, trained = tensors(), [t.requires_grad_() for t in tensors()]
    for _ in range(5):
        attnroute.attention(*frozen)
        attnroute.attention(*trained)
    assert ways[-6:] == ["short"] * 6
