"""Remembered routes: found again by what a decision depends on, and by nothing less."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import TOLERANCE, attend, error
from support.spy import Spy, decided_calls
from support.variations import OTHER, tensors

import attnroute
from attnroute import masks
from attnroute.api import choices, routes
from attnroute.errors import QuadraticAttentionWarning
from attnroute.memory import Memory, reset
from attnroute.tables.load import load

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def made(monkeypatch):
    """Collect the calls for which a route had to be made."""
    found = []
    make = routes.make

    def counted(args, policy, key, **options):
        found.append(key)
        return make(args, policy, key, **options)

    monkeypatch.setattr(routes, "make", counted)
    return found


@pytest.fixture
def decided(monkeypatch):
    """Collect the calls that were decided."""
    return decided_calls(monkeypatch)


def test_a_layer_decides_once_for_all_its_calls(made, decided):
    for _ in range(5):
        attnroute.attention(*tensors(), is_causal=True)
    assert (len(made), len(decided)) == (1, 1)


def test_values_of_tensors_and_numbers_that_no_kernel_cares_about_change_nothing(made):
    bias = torch.randn(6, 6)
    for scale in (0.1, 0.5, 2.0):
        attnroute.attention(*tensors(), bias=bias * scale, scale=scale)
    assert len(made) == 1


def test_a_float_mask_is_a_bias_and_shares_its_route(made):
    attnroute.attention(*tensors(), bias=torch.zeros(6, 6))
    attnroute.attention(*tensors(), torch.zeros(6, 6))
    assert len(made) == 1


def test_everything_that_a_decision_may_depend_on_has_a_route_of_its_own(made):
    attnroute.attention(*tensors())
    for n, (make, arguments) in enumerate(OTHER.values(), start=1):
        for _ in range(2):
            attnroute.attention(*make(), **arguments)
        assert len(made) == n + 1, list(OTHER)[n - 1]
    attnroute.attention(*tensors())
    assert len(made) == len(set(made)) == len(OTHER) + 1


def test_what_override_says_has_a_route_of_its_own(made):
    attnroute.attention(*tensors())
    for wish in (
        {"backend": "math"},
        {"prefer": "chunked"},
        {"ban": "flash"},
        {"strict": True},
        {"double_backward": True},
    ):
        for _ in range(2):
            with attnroute.override(**wish):
                attnroute.attention(*tensors())
    assert len(made) == 6


def test_forget_forgets(made, decided):
    attnroute.attention(*tensors())
    reset()
    attnroute.attention(*tensors())
    assert (len(made), len(decided)) == (2, 2)


def test_memory_of_routes_keeps_those_that_are_used(monkeypatch, made):
    monkeypatch.setattr(routes, "_ROUTES", Memory(3))
    for length in (2, 3, 2, 4, 2, 5, 2, 6, 2):
        attnroute.attention(*tensors(seqlen_q=length, seqlen_kv=length))
        assert len(routes._ROUTES) <= 3
    assert len(made) == 5


def test_a_route_keeps_no_findings_and_can_say_its_decision_again(decided):
    tensors_, mask = tensors(), masks.KeyPadding(lengths=[6, 2])
    want = attnroute.explain(*tensors_, mask)
    attnroute.attention(*tensors_, mask)
    (route,) = routes._ROUTES.values()
    assert len(pickle.dumps(route.choice)) < 8000
    found = route.choice.decision()
    assert (found.selected, found.verdicts, found.order) == (want.selected, want.verdicts, want.order)


def test_explain_remembers_nothing_and_runs_nothing(decided):
    with Spy() as spy:
        attnroute.explain(*tensors())
        attnroute.explain(*tensors())
    assert len(decided) == 2
    assert (len(routes._ROUTES), spy.backends) == (0, set())


def test_a_failed_call_is_not_remembered(decided):
    for _ in range(2):
        with pytest.raises(attnroute.NoBackendError):
            attnroute.attention(*tensors(), softcap=1.0, backend="flash")
    assert len(decided) == 2
    assert len(routes._ROUTES) == 0


def test_the_slow_tier_warns_with_its_bytes_once_per_route():
    query = torch.randn(1, 1, 64, 8)
    with attnroute.override(double_backward=True):
        attnroute.attention(query, query, query)
    large = torch.zeros(1, 2, 6000, 1)  # 2 * 6000 * 6000 scores of 4 bytes.
    with attnroute.override(backend="math"):
        with pytest.warns(QuadraticAttentionWarning, match="math holds 275 MiB of scores") as caught:
            attnroute.attention(large, large, large)
        attnroute.attention(large, large, large)
    assert len(caught) == 1
    assert caught[0].filename == __file__


# Masks of one shape that say different things.


def test_counts_that_the_host_knows_are_not_those_that_the_device_knows():
    query, key, value = tensors(batch=1, seqlen_q=3, seqlen_kv=1)
    full, empty = masks.KeyPadding(lengths=(1,)), masks.KeyPadding(lengths=torch.tensor([0]))
    for _ in range(2):
        assert attnroute.attention(query, key, value, full).any()
        assert not attnroute.attention(query, key, value, empty).any()


def test_a_mask_that_says_nothing_is_not_one_that_does():
    query, key, value = tensors()
    for lengths in ((6, 6), (6, 3), (6, 6), (1, 6)):
        allowed = torch.arange(6) < torch.tensor(lengths)[:, None, None, None]
        out = attnroute.attention(query, key, value, masks.KeyPadding(lengths=lengths))
        assert error(out, attend(query, key, value, allowed=allowed)[0]) <= TOLERANCE[torch.float32]


def test_a_dense_mask_changed_in_place_is_read_again():
    query, key, value = tensors()
    dense = torch.ones(6, 6, dtype=torch.bool)
    kept = masks.Dense(dense)
    for wrap in (
        lambda mask: mask,
        lambda _: kept,
        masks.Dense,
    ):
        for hidden in (0, 3, 5):
            dense.fill_(value=True)
            dense[:, hidden] = False
            out = attnroute.attention(query, key, value, wrap(dense))
            assert error(out, attend(query, key, value, allowed=dense)[0]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", ["flash", "chunked", "math"])
def test_a_mask_object_whose_tensor_changed_is_read_again(backend):
    query, key, value = tensors()
    counts, ids = torch.tensor([6, 6]), torch.zeros(6, dtype=torch.int64)
    padding, documents = masks.KeyPadding(lengths=counts), masks.Documents(ids=ids)
    both = padding & masks.Causal()
    for n in (6, 2, 4):
        counts[1] = n
        ids[n:] = n
        keys = torch.arange(6) < counts[:, None, None, None]
        same = ids[:, None] == ids
        cases = ((padding, keys), (documents, same), (both, keys & torch.ones(6, 6).tril().bool()))
        for mask, allowed in cases:
            out = attnroute.attention(query, key, value, mask, backend=backend)
            assert error(out, attend(query, key, value, allowed=allowed)[0]) <= TOLERANCE[torch.float32]


def test_documents_that_became_wrong_are_refused_on_a_known_route_too():
    query, key, value = tensors()
    sums = torch.tensor([0, 2, 6])
    mask = masks.Documents(cu_seqlens=sums)
    attnroute.attention(query, key, value, mask)
    sums[2] = 5
    with pytest.raises(attnroute.AttnRouteError, match=r"cu_seqlens requires .* got \[0, 2, 5\]"):
        attnroute.attention(query, key, value, mask)


LENGTHS = st.sampled_from([1, 2, 5])


@st.composite
def small_calls(draw):
    """Draw a call from a space so small that later calls meet the routes of earlier ones."""
    batch, seqlen_q, seqlen_kv = draw(st.sampled_from([1, 2])), draw(LENGTHS), draw(LENGTHS)
    kind = draw(st.sampled_from(["none", "full", "causal", "ends", "ints", "device", "left", "bias"]))
    dense = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    counts = draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch))
    keys = torch.arange(seqlen_kv) < torch.tensor(counts)[:, None, None, None]
    ends = dense.tril(seqlen_kv - seqlen_q)
    forms = {
        "none": (None, dense),
        "full": (dense, dense),
        "causal": (dense.tril(), dense.tril()),
        "ends": (masks.Causal("bottom_right"), ends),
        "ints": (masks.KeyPadding(lengths=counts), keys),
        "device": (masks.KeyPadding(lengths=torch.tensor(counts)), keys),
        "left": (masks.KeyPadding(left=counts), ~keys),
        "bias": (torch.zeros(seqlen_q, seqlen_kv).masked_fill(~ends, -torch.inf), ends),
    }
    return (
        (batch, seqlen_q, seqlen_kv),
        *forms[kind],
        draw(st.sampled_from([{}, {"scale": -1.0}, {"layout": "bshd"}])),
    )


@given(st.lists(small_calls(), min_size=3, max_size=6))
@settings(max_examples=30)
def test_no_call_goes_the_way_of_another(sequence):
    for (batch, seqlen_q, seqlen_kv), mask, allowed, arguments in sequence:
        given_tensors = tensors(batch=batch, heads=2, heads_kv=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
        turned = arguments.get("layout") == "bshd"
        passed = [t.transpose(1, 2) for t in given_tensors] if turned else given_tensors
        with Spy() as spy:
            out = attnroute.attention(*passed, mask, **arguments)
        assert spy.backends == {attnroute.explain(*passed, mask, **arguments).selected}
        want, _ = attend(*given_tensors, allowed=allowed, scale=arguments.get("scale"))
        assert error(out.transpose(1, 2) if turned else out, want) <= TOLERANCE[torch.float32]


def test_threads_share_routes_without_harm(monkeypatch):
    monkeypatch.setattr(routes, "_ROUTES", Memory(4))
    wrong, barrier = [], threading.Barrier(4)

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        barrier.wait(timeout=60)
        for n in range(30):
            length = 2 + (n + seed) % 5
            query = torch.randn(1, 2, length, 8, generator=generator)
            mask = masks.KeyPadding(lengths=[1 + n % length])
            with attnroute.override(backend=("math", "chunked")[n % 2]):
                out = attnroute.attention(query, query, query, mask)
            want, _ = attend(query, query, query, allowed=mask.materialize(length, length))
            if error(out, want) > TOLERANCE[torch.float32]:
                wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_backend_that_stays_selected_is_asked_for_its_package_once_more_and_then_run(monkeypatch):
    """What its import complains of may be nothing that the tables know it to need."""
    asked = []
    said = "importing it raises"
    monkeypatch.setattr(choices.imports, "mark_if_broken", lambda *given: asked.append(given) or said)
    query, key, value = tensors()
    with Spy() as spy:
        out = attnroute.attention(query, key, value)
    assert asked == [((), load().providers)] * 2
    assert spy.backends == {"flash"}
    want, _ = attend(query, key, value)
    assert error(out, want) <= TOLERANCE[out.dtype]
