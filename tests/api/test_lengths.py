"""A call with another number of keys is described by an earlier one, and decided as if it were a new one."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref

import pytest
import torch
from support.reference import attend
from support.spy import Spy, profiled

import attnroute
from attnroute.api import lengths, repeats, routes
from attnroute.api.intake import take
from attnroute.api.keys import key_of
from attnroute.api.question import call_of
from attnroute.api.records import Given
from attnroute.api.routes import make
from attnroute.api.validate import check
from attnroute.engine.classes import Span
from attnroute.errors import ArgumentError
from attnroute.masks import Causal, KeyPadding
from attnroute.memory import KEEPER
from attnroute.question.policy import merge
from attnroute.settings import current, policy_of

LENGTHS = (1, 2, 3, 5, 64, 65, 128, 192, 193, 300)


def tensors(
    seqlen_kv, *, seqlen_q=1, heads=4, heads_kv=2, head_dim=16, dtype=torch.float32, batch=2, form=None
):
    query = torch.randn(batch, seqlen_q, heads, head_dim).transpose(1, 2).to(dtype)
    keys = [torch.randn(batch, heads_kv, seqlen_kv, head_dim).to(dtype) for _ in range(2)]
    if form == "tokens outermost":
        keys = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in keys]
    elif form == "part of a cache":
        keys = [torch.cat([t, t], 2)[:, :, :seqlen_kv] for t in keys]
    elif form == "not aligned":
        keys = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in keys]
    elif form == "one head for all":
        keys = [t[:, :1].expand(-1, heads_kv, -1, -1) for t in keys]
    return query, *keys


def padding(seqlen_kv, batch=2, **options):
    keep = torch.arange(seqlen_kv) >= torch.tensor([[0], [seqlen_kv // 2]])[:batch]
    return KeyPadding(keep=keep, **options)


def asked(given):
    problem = take(given)
    key = key_of(problem, current())
    return problem, lengths.place_of(problem, key)


VARIATIONS = {
    "form": ("tokens outermost", "part of a cache", "not aligned", "one head for all"),
    "seqlen_q": (2, 64),
    "heads": (2, 8),
    "heads_kv": (1, 4),
    "head_dim": (8,),
    "dtype": (torch.bfloat16,),
    "batch": (1,),
}
OPTIONS = (
    {},
    {"scale": 2.0},
    {"scale": -1.0},
    {"softcap": 3.0},
    {"sink": torch.randn(4)},
    {"return_lse": True},
    {"dropout_p": 0.1},
    {"is_causal": True, "causal_alignment": "bottom_right"},
    {"bias": torch.zeros(1)[None]},
    {"window": (3, None), "causal_alignment": "bottom_right"},
)
MASKS = {
    "none": lambda *_: None,
    "padding": padding,
    "finite padding": lambda n, batch: padding(n, batch, finite=True),
    "lengths": lambda n, batch: KeyPadding(lengths=torch.full((batch,), n)),
    "causal": lambda *_: Causal("bottom_right"),
    "both": lambda n, batch: Causal("bottom_right") & padding(n, batch),
    "tensor": lambda n, batch: padding(n, batch).keep[:, None, None],
}


def drawn():
    shapes = [{}, *({name: value} for name, values in VARIATIONS.items() for value in values)]
    for shape, (name, mask), grad, n in itertools.product(shapes, MASKS.items(), (False, True), LENGTHS):
        for options in OPTIONS if not shape and name in ("none", "finite padding") else OPTIONS[:1]:
            given = tensors(n, **shape)
            if grad:
                given = tuple(t.detach().requires_grad_() for t in given)
            yield Given(*given, mask(n, shape.get("batch", 2)), **options)


def test_what_calls_have_in_common_is_all_but_their_number_of_keys():
    """Every description is that of any other call of the same place, with another number."""
    seen, shared = {}, 0
    for given in drawn():
        problem, place = asked(given)
        if place is None:
            continue
        check(problem)
        call = call_of(problem, recognize=True)
        first = seen.setdefault(place, call)
        shared += first is not call
        assert first.changed(seqlen_kv=call.seqlen_kv) == call
    assert shared > 100


@pytest.mark.parametrize("name", ["lengths", "causal", "both", "tensor"])
def test_masks_in_which_the_number_takes_part_have_no_place(name):
    assert asked(Given(*tensors(64), MASKS[name](64, 2)))[1] is None


def test_what_a_check_would_refuse_has_no_place_or_is_refused():
    attnroute.reset()
    query, key, value = tensors(64)
    for n in (64, 65):
        attnroute.attention(*tensors(n), padding(n))
    for wrong in (
        (query, key, value[:, :, :-1], None),
        (query, key, value, padding(63)),
        (query, key[0], value, None),
    ):
        with pytest.raises(ArgumentError):
            attnroute.attention(*wrong)


@pytest.mark.parametrize("masked", [None, "finite", "may hold NaN"])
def test_steps_of_decoding_are_described_once_and_right(masked, monkeypatch):
    """Once before it is known that shapes vary, and once from then on; each is kept for its other layers."""
    attnroute.reset()
    described, kept, keep = [], [], repeats._kept
    monkeypatch.setattr(routes, "call_of", lambda *a, **k: described.append(1) or call_of(*a, **k))
    monkeypatch.setattr(repeats, "_kept", lambda *a: kept.append(1) or keep(*a))
    for n in range(60, 70):
        mask = padding(n, finite=masked == "finite") if masked else None
        allowed = None if mask is None else mask.keep[:, None, None]
        for _layer in range(3):
            given = tensors(n)
            want = attend(*given, allowed=allowed)[0].float()
            if masked == "may hold NaN":
                for t in given[1:]:
                    t.masked_fill_(~mask.keep[:, None, :, None], torch.nan)
            torch.testing.assert_close(attnroute.attention(*given, mask), want, rtol=1e-4, atol=1e-5)
    assert len(described) == 2
    assert len(kept) == 10


@pytest.mark.parametrize("other", ["rows", "finite", "flags", "no keeper", "counts", "causal"])
def test_padding_in_which_more_is_new_goes_the_long_way_or_is_refused(other):
    attnroute.reset()
    for n in (60, 61, 62, 63):
        attnroute.attention(*tensors(n), padding(n, finite=True))
    given, keep = tensors(64), padding(64).keep
    mask = {
        "rows": KeyPadding(keep=keep[1:], finite=True),
        "finite": KeyPadding(keep=keep),
        "flags": KeyPadding(keep=torch.cat([keep, keep], 1), finite=True),
        "no keeper": KeyPadding(keep=torch.from_numpy(keep.numpy()), finite=True),
        "counts": KeyPadding(left=torch.tensor([3, 5]), finite=True),
        "causal": Causal("bottom_right") & KeyPadding(keep=keep, finite=True),
    }[other]
    if other in ("flags", "rows"):
        with pytest.raises(ArgumentError):
            attnroute.attention(*given, mask)
        return
    allowed = keep[:, None, None]
    if other == "counts":
        allowed = torch.arange(64) >= torch.tensor([3, 5])[:, None, None, None]
    want = attend(*given, allowed=allowed)[0].float()
    for _ in range(2):
        torch.testing.assert_close(attnroute.attention(*given, mask), want, rtol=1e-4, atol=1e-5)


def calls_of(function, *args):
    count = 0

    def on_event(_frame, event, _arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("masked", "most"), [(False, 45), (True, 160)])
def test_a_step_takes_few_calls(masked, most):
    def step(n):
        given, mask = tensors(n), padding(n, finite=True) if masked else None
        return calls_of(attnroute.attention, *given, mask)

    for n in range(198, 202):
        step(n)
    assert step(203) <= most


@pytest.mark.parametrize("finite", [True, False])
def test_steps_with_padding_run_one_kernel_and_keep_nothing_alive(finite):
    """Layers of a step share a mask; after the step neither that nor what was made of it is there."""
    attnroute.reset()
    seen, wanted = [], []
    with profiled("flash") as profile:
        for n in range(60, 75):
            mask = padding(n, finite=finite)
            for _layer in range(3):
                given = tensors(n)
                out = attnroute.attention(*given, mask)
                wanted.append((out, attend(*given, allowed=mask.keep[:, None, None])[0]))
            made = [value for value in vars(mask)[KEEPER].values() if isinstance(value, torch.Tensor)]
            assert made
            seen += [weakref.ref(mask), *(weakref.ref(t.untyped_storage()) for t in (mask.keep, *made))]
            del mask, made
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)
    ran = {event.key: event.count for event in profile.key_averages()}
    assert ran["aten::_scaled_dot_product_flash_attention_for_cpu"] == len(wanted)
    for out, want in wanted:
        torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-5)
    assert len(repeats._FAMILIES) == 1


def test_flags_that_are_written_count_as_they_are():
    attnroute.reset()
    for n in range(60, 66):
        mask = padding(n, finite=True)
        for at in (None, 0, n - 1):
            if at is not None:
                mask.keep[:, at].logical_not_()
            given = tensors(n)
            want = attend(*given, allowed=mask.keep[:, None, None])[0].float()
            torch.testing.assert_close(attnroute.attention(*given, mask), want, rtol=1e-4, atol=1e-5)


def by_hand(call, *_):
    """Return the numbers between which the class below stays."""
    n = call.seqlen_kv
    return Span(range(n, 1000) if n >= 66 else range(n, 66), ())


FORMS = ("tokens outermost", "part of a cache", "not aligned", "one head for all")


@pytest.mark.parametrize("other", [*FORMS, "float64", "a gradient", "two queries", "fewer values"])
def test_what_is_new_beside_the_number_of_keys_goes_the_long_way(other, monkeypatch):
    """Its number of elements, and all else that a place has, may be that of a step."""
    attnroute.reset()
    for n in (60, 61, 62):
        attnroute.attention(*tensors(n))
    made = []
    monkeypatch.setattr(routes, "make", lambda *a, **k: made.append(1) or make(*a, **k))
    query, key, value = tensors(64, form=other if other in FORMS else None)
    if other == "float64":
        query, key, value = query.double(), key.double(), value.double()
    elif other == "a gradient":
        key.requires_grad_()
    elif other == "two queries":
        query, key, value = tensors(64, seqlen_q=2, heads=2)
    elif other == "fewer values":
        with pytest.raises(ArgumentError):
            attnroute.attention(query, key, value[:, :, :-1].contiguous())
        return
    out = attnroute.attention(query, key, value)
    assert made == [1]
    torch.testing.assert_close(out, attend(query, key, value)[0].to(out.dtype), rtol=1e-4, atol=1e-5)


def test_a_step_is_kept_for_its_other_layers_until_its_backend_fails():
    attnroute.reset()
    for n in (60, 61, 62):
        attnroute.attention(*tensors(n))
    assert len(repeats._FAMILIES) == 1
    kept = len(repeats._REPEATS)
    attnroute.attention(*tensors(63))
    assert len(repeats._REPEATS) == kept + 1
    repeats.drop("flash", lambda _: True)
    assert len(repeats._FAMILIES) == len(repeats._REPEATS) == 0
    with attnroute.override(backend="chunked"), Spy() as spy:
        attnroute.attention(*tensors(64))
    assert "attnroute::chunked" in spy.seen


@pytest.mark.parametrize("span_of", [by_hand, lambda *_: None], ids=["spans", "no spans"])
def test_a_length_for_which_another_backend_is_chosen_has_a_route_of_its_own(span_of, monkeypatch):
    """On the CPU nothing depends on a length, so something is made to."""
    attnroute.reset()
    chosen = routes.choices.chosen

    def by_length(call, host, tables, policy):
        if call.seqlen_kv >= 66:
            policy = merge(policy, policy_of("a test", prefer="chunked", tables=policy.tables))
        return chosen(call, host, tables, policy)

    monkeypatch.setattr(routes.choices, "chosen", by_length)
    monkeypatch.setattr(routes, "class_of_keys", lambda call, *_: call.seqlen_kv >= 66)
    monkeypatch.setattr(routes, "span_of", span_of)
    with Spy() as spy:
        for n in (64, 65, 66, 67, 65 + 128, 63):
            attnroute.attention(*tensors(n))
    flash, chunked = "aten::_scaled_dot_product_flash_attention_for_cpu", "attnroute::chunked"
    ran = [operator for operator in spy.seen if operator in (flash, chunked)]
    assert ran == [flash, flash, chunked, chunked, chunked, flash]
