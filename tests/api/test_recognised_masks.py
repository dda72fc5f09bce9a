"""Dense masks through `attention()`: what was recognised is said, runs without the tensor, and is right."""

from __future__ import annotations

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.spy import Spy, ran

import attnroute
from attnroute import masks
from attnroute.api import routes
from attnroute.masks import Causal, Documents, KeyPadding, PrefixLM, Window
from attnroute.memory import reset

N = 300
IDS = torch.arange(N) // torch.tensor([[70], [90]])
SAID = {
    "causal": (Causal(), ("causal",)),
    "window": (Window(20, 5), ("window",)),
    "key padding": (KeyPadding(lengths=[N, 70]), ("key padding",)),
    "nothing": (KeyPadding(lengths=[0, 0]), ("no key at all",)),
    "prefix": (PrefixLM([30, 0]), ("prefix",)),
    "documents": (Documents(lengths=[100, 200]), ("documents",)),
    "documents per row": (Documents(ids=IDS), ("documents",)),
    "causal & documents": (Causal() & Documents(lengths=[100, 200]), ("causal", "documents")),
    "causal & left padding": (Causal() & KeyPadding(left=[0, 70]), ("causal", "key padding")),
    "window & right padding": (Window(20, 0) & KeyPadding(lengths=[N, 70]), ("window", "key padding")),
    "causal & documents & padding": (
        Causal() & Documents(lengths=[100, 200]) & KeyPadding(lengths=[N, 270]),
        ("causal", "documents", "key padding"),
    ),
}


def inputs(batch=2, heads=2):
    return torch.randn(3, batch, heads, N, 16).unbind()


def dense(mask, batch=2):
    return mask.materialize(N, N, batch=batch)


@pytest.fixture
def lowered(monkeypatch):
    """Collect the masks that executors are given."""
    found = []
    real = routes.run_repaired

    def run(executor, given, plan):
        found.append(given.mask)
        return real(executor, given, plan)

    monkeypatch.setattr(routes, "run_repaired", run)
    return found


@pytest.mark.parametrize("name", SAID)
def test_what_was_recognised_runs_without_the_tensor(name, lowered):
    query, key, value = inputs()
    mask = dense(SAID[name][0])
    with ran("chunked"):
        out, lse = attnroute.attention(query, key, value, mask, backend="chunked", return_lse=True)
    assert [m.dense for m in lowered] == [None]
    want, want_lse = attend(query, key, value, allowed=mask)
    assert error(out, want) <= TOLERANCE[torch.float32]
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)


@pytest.mark.parametrize("name", SAID)
def test_what_was_recognised_runs_on_the_backend_that_is_named(name):
    query, key, value = inputs()
    mask = dense(SAID[name][0])
    with ran(attnroute.explain(query, key, value, mask).selected):
        out = attnroute.attention(query, key, value, mask)
    assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", SAID)
def test_the_explanation_names_what_was_recognised(name):
    mask, words = SAID[name]
    text = " ".join(str(attnroute.explain(*inputs(), dense(mask))).split())
    _, _, said = text.partition("recognised as ")
    places = [said.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("name", SAID)
def test_gradients_through_what_was_recognised(name):
    mask = dense(SAID[name][0])
    tensors = [t.clone().requires_grad_() for t in inputs()]
    with ran("chunked"):
        out = attnroute.attention(*tensors, mask, backend="chunked")
        got = torch.autograd.grad(out, tensors, torch.ones_like(out))
    want, _ = attend(*tensors, allowed=mask)
    for grad, right in zip(got, torch.autograd.grad(want, tensors, torch.ones_like(want)), strict=True):
        assert error(grad, right) <= TOLERANCE[torch.float32]


def test_a_route_is_shared_by_documents_that_differ():
    """Ids are no part of the key, so each tensor must be asked what it says."""
    query, key, value = inputs()
    ids = [torch.arange(N) // torch.tensor([[length], [90]]) for length in (40, 70, 101)]
    shown = [dense(Causal() & Documents(ids=each)) for each in ids]
    reset()
    for mask in shown * 2:
        out = attnroute.attention(query, key, value, mask, backend="chunked")
        assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]
    assert len(routes._ROUTES) == 1


def test_a_recognised_mask_beside_others_keeps_them(lowered):
    query, key, value = inputs()
    mask = dense(Causal() & Documents(lengths=[100, 200]))
    hole = torch.ones(N, N, dtype=torch.bool)
    hole[200, 120] = hole[150, 130] = False
    whole = masks.Dense(mask) & masks.Dense(hole) & Window(50, None)
    out = attnroute.attention(query, key, value, whole, backend="chunked")
    assert torch.equal(lowered[0].dense[0, 0], hole)
    allowed = mask & hole & ~torch.ones(N, N, dtype=torch.bool).tril(-51)
    assert error(out, attend(query, key, value, allowed=allowed)[0]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", [(1, 1, 1, N), (2, 1, 1, N), (N,), (1, N)])
def test_one_row_of_padding_for_all_queries(shape, lowered):
    query, key, value = inputs()
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., 30:200] = True
    out = attnroute.attention(query, key, value, mask, backend="chunked")
    assert [m.dense for m in lowered] == [None]
    assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_one_query_beside_many_keys(lowered):
    query, key, value = torch.randn(2, 2, 1, 8), *torch.randn(2, 2, 2, 70_000, 8)
    window = Window(4095, 0, "bottom_right")
    for part in (KeyPadding(left=[0, 100]), KeyPadding(lengths=[70_000, 500]), window):
        mask = part.materialize(1, 70_000, batch=2)
        out = attnroute.attention(query, key, value, mask, backend="chunked")
        assert lowered.pop().dense is None
        assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


class Arguments(Spy):
    """Keep what the flash operator was called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
            names = [a.name for a in func._schema.arguments]
            self.calls.append({**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("wrap", [lambda mask: mask, masks.Dense], ids=["tensor", "object"])
def test_a_dense_causal_mask_runs_as_is_causal_without_a_tensor(wrap):
    query, key, value = inputs(batch=1)
    mask = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    with Arguments() as spy:
        out = attnroute.attention(query, key, value, wrap(mask))
    (call,) = spy.calls
    assert call["is_causal"] is True
    assert call.get("attn_mask") is None
    assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_a_full_mask_runs_without_a_tensor():
    query, key, value = inputs(batch=1)
    with Arguments() as spy:
        out = attnroute.attention(query, key, value, torch.ones(N, N, dtype=torch.bool))
    (call,) = spy.calls
    assert call.get("is_causal", False) is False
    assert call.get("attn_mask") is None
    assert error(out, attend(query, key, value)[0]) <= TOLERANCE[torch.float32]


def test_a_dense_causal_mask_beside_a_window_keeps_both():
    query, key, value = inputs(batch=1)
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    out = attnroute.attention(query, key, value, mask, window=(5, None))
    allowed = mask & ~mask.tril(-6)
    assert error(out, attend(query, key, value, allowed=allowed)[0]) <= TOLERANCE[torch.float32]


def test_masks_of_one_shape_that_say_different_things_go_different_ways():
    query, key, value = inputs(batch=1)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    full, odd = torch.ones_like(causal), causal.clone()
    odd[299, 17] = False
    for _ in range(2):
        for mask in (causal, full, odd):
            out = attnroute.attention(query, key, value, mask)
            assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_a_route_taken_inside_vmap_is_not_that_of_another_mask():
    query, key, value = torch.randn(3, 2, 1, 2, N, 8).unbind()
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    odd = causal.clone()
    odd[299, 17] = False
    for mask in (causal, odd):

        def run(q, k, v, mask=mask):
            return attnroute.attention(q, k, v, mask)

        out = torch.vmap(run)(query, key, value).flatten(0, 1)
        want, _ = attend(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), allowed=mask)
        assert error(out, want) <= TOLERANCE[torch.float32]
