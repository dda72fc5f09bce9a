"""Where shapes vary, a backend that plans each new shape is chosen only if the calls of a step repay a plan.

The card is an H200 that is not there: what ran is read off the route, before any kernel is launched.
"""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute.api import lengths, repeats, routes
from attnroute.api.records import Problem, RouteKey
from attnroute.engine.decide import decide, explain_why_not
from attnroute.masks import KeyPadding
from attnroute.memory import Memory, reset
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.report.json import decision_json
from attnroute.report.why_not import render_why_not
from attnroute.tables.load import load

HOST = Host(
    arch="sm_90",
    device_name="NVIDIA H200",
    versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"},
)
LAYERS = 3


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """Return the backends of the calls that ran."""
    seen = []

    def execute(route, problem, _keeper=None):
        seen.append(route.choice.backend)
        return problem.query * problem.value.mean(), None

    reset()
    monkeypatch.setattr(routes, "host_of", lambda *_: HOST)
    monkeypatch.setattr(routes, "free_memory", lambda *_: None)
    monkeypatch.setattr(routes, "execute", execute)
    monkeypatch.setattr(repeats, "bind", lambda *_: None)
    # One way for all masks of a form; where it gives nothing, the route is executed.
    monkeypatch.setattr(repeats, "bind_form", lambda *_: lambda *_: None)
    monkeypatch.setattr(Problem, "device", property(lambda _: ("cuda", 0)))
    yield seen
    reset()


def tensors(seqlen_kv, seqlen_q=1, *, batch=2, heads=8, train=False):
    sizes = ((heads, seqlen_q), (2, seqlen_kv), (2, seqlen_kv))
    made = (torch.randn(batch, *size, 128, dtype=torch.bfloat16) for size in sizes)
    return [t.requires_grad_(train) for t in made]


def padded(seqlen_kv, batch=2):
    """Return what the two backends are far apart for, whatever a small difference of two fits says."""
    return {"mask": KeyPadding(keep=torch.ones(batch, seqlen_kv, dtype=torch.bool), finite=True)}


def step(*args, given=None, **sizes):
    query, key, value = tensors(*args, **sizes)
    given = padded(args[0], len(query)) if given is None else given
    for _ in range(LAYERS):
        attnroute.attention(query, key, value, **given)


def steps(ran, *shapes, **options):
    """Run a step at each shape; return the backend of each."""
    found = []
    for shape in shapes:
        before = len(ran)
        step(*shape, **options)
        (backend,) = set(ran[before:])
        found.append(backend)
    return found


def test_a_growing_cache_runs_without_plans_from_the_third_length_on(ran):
    found = steps(ran, *((n,) for n in range(300, 310)))
    assert found == ["cudnn", "cudnn", *["efficient"] * 8]


def test_a_static_cache_keeps_its_kernel(ran):
    assert steps(ran, *[(512,)] * 9) == ["cudnn"] * 9


def test_training_with_batches_of_many_lengths(ran):
    shapes = [(n, n) for n in range(500, 511)]
    found = steps(ran, *shapes, batch=4, train=True, given={"is_causal": True})
    assert found == [*["cudnn"] * 7, *["flash"] * 4]


@pytest.mark.parametrize("seqlen_q", [17, 512])
def test_a_handful_of_lengths_is_planned_one_by_one(ran, seqlen_q):
    """As in a benchmark that compares lengths, or batches that are filled up to one of some."""
    lengths_compared = [(n, seqlen_q) for n in (512, 1024, 2048, 4096, 8192)]
    assert steps(ran, *lengths_compared * 2) == ["cudnn"] * 10


def test_16_queries_are_those_of_a_growing_cache(ran):
    assert steps(ran, *((n, 16) for n in range(300, 306))) == ["cudnn", "cudnn", *["efficient"] * 4]


def test_batch_sizes_are_planned_too(ran):
    assert steps(ran, (256,)) == ["cudnn"]
    assert [steps(ran, (256,), batch=n) for n in (3, 4, 5)] == [["cudnn"], ["efficient"], ["efficient"]]


def test_a_shape_that_was_planned_stays_where_it_is(ran):
    assert steps(ran, (300,), (301,), (302,), (300,), (302,)) == [
        "cudnn",
        "cudnn",
        "efficient",
        "cudnn",
        "efficient",
    ]


@pytest.mark.parametrize("kind", ["inference", "train"])
def test_a_call_that_is_long_enough_repays_its_plan(kind):
    phase = "" if kind == "inference" else kind
    for length, selected in ((500, False), (16000, True)):
        line = f"bf16 b4 hq64 sq{length} d128 causal {phase}"
        assert decide(parse(line), HOST).selected == "cudnn"
        assert (decide(parse(f"{line} shapes_vary"), HOST).selected == "cudnn") is selected


def test_what_is_no_other_length_of_one_call_is_no_shape_of_it(ran):
    """The prompt before decoding, layers of other widths, other masks, and what trains."""
    for n in (300, 301):
        step(n, given={})
        step(n, n, given={})
        step(n, heads=16, given={})
        step(n, train=True, given={})
        step(n, given={"softcap": 20.0})
        step(n, given={"mask": KeyPadding(lengths=torch.tensor([9, n]), finite=True)})
    assert len(lengths._FAMILIES) == 6
    assert not any(route.choice.call.context.shapes_vary for route in routes._ROUTES.values())


def test_families_are_few_and_remember_few_shapes(monkeypatch, ran):
    monkeypatch.setattr(lengths, "_FAMILIES", Memory(2))
    for heads in (8, 16, 8, 32):
        for n in range(300, 310):
            attnroute.attention(*tensors(n, heads=heads))
    assert len(lengths._FAMILIES) == 2
    assert {len(shapes) for shapes in lengths._FAMILIES.values()} == {lengths.VARIED_FEW}
    assert len(ran) == 40


def explained(n):
    return attnroute.explain(*tensors(n), **padded(n))


def test_explain_says_what_attention_does_and_notes_nothing():
    for n in (300, 301):
        assert explained(n).selected == "cudnn"
        attnroute.attention(*tensors(n), **padded(n))
    for n in range(302, 306):
        found = explained(n)
        assert (found.selected, found.call.context.shapes_vary) == ("efficient", True)
    assert [len(shapes) for shapes in lengths._FAMILIES.values()] == [2]
    assert explained(300).selected == "cudnn"


def test_explain_shows_what_a_plan_takes_and_who_shares_it():
    step(300)
    text = explained(300).text(verbose=True)
    plan = explained(300).verdict("cudnn").plan_ms
    assert f"plans each new shape in {plan:.3g} ms, shared by 1,000,000 calls\n" in text
    for n in (301, 302):
        step(n)
    found = explained(303)
    verdict = found.verdict("cudnn")
    assert verdict.plan_share_ms == plan / 32
    assert math.isclose(verdict.ranked_ms, verdict.predicted_ms + plan / 32)
    shared = f"shared by 32 calls as shapes vary: {plan / 32:.3g} ms of each"
    assert f"- plans each new shape in {plan:.3g} ms, {shared}" in " ".join(found.text(verbose=True).split())
    assert " shapes_vary\n" in str(found)
    data = json.loads(decision_json(found, verbose=True))
    assert data["call"]["context"]["shapes_vary"] is True
    assert data["policy"]["calls_per_step"] == 32
    assert next(v for v in data["verdicts"] if v["backend"] == "cudnn")["plan_share_ms"] == plan / 32


def test_few_expected_calls_and_many_layers_are_heard():
    line = "bf16 b8 hq32 hkv8 sq1 skv300 d128 keys:finite"
    # Padded decoding stated finite: flash takes lengths, and plans nothing.
    assert decide(parse(line), HOST, policy=Policy(expected_calls=4)).selected == "flash"
    varying = parse(f"{line} shapes_vary")
    assert decide(varying, HOST, policy=Policy(calls_per_step=10**6)).selected == "cudnn"
    few = decide(varying, HOST, policy=Policy(expected_calls=4)).verdict("cudnn")
    assert few.plan_share_ms == few.plan_ms / 4


def test_why_not_counts_the_plan():
    found = explain_why_not(
        parse("bf16 b8 hq32 hkv8 sq1 skv300 d128 keys:finite shapes_vary"), HOST, load(), Policy(), "cudnn"
    )
    assert found.behind == "time"
    assert "without shapes_vary" in [change.change for change in found.changes]
    times = [found.decision.verdict(backend).ranked_ms for backend in ("cudnn", "flash")]
    shown = f"as long as flash ({times[0]:.3g} ms, {times[1]:.3g} ms), plans included"
    assert shown in " ".join(render_why_not(found).split())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_recompute_runs_what_its_forward_ran(ran, is_reentrant):
    """Between forward and recompute it turns out that shapes vary."""
    inputs = tensors(300, 300, train=True)
    out = checkpoint(partial(attnroute.attention, **padded(300)), *inputs, use_reentrant=is_reentrant)
    for n in range(301, 309):
        step(n, n, train=True)
        step(n, n)
    before = len(ran)
    out.sum().backward()
    assert ran[0] == ran[before] == "cudnn"


def lengths_vary():
    for n in (300, 301, 302):
        step(n)
    route = routes._ROUTES.values()[-1]
    assert route.choice.backend == "efficient"
    return route.choice.repaid_after


def test_a_shape_that_comes_back_often_is_planned(ran, monkeypatch):
    """Between two others, as lengths of batches are; calls with another mask do not end a row."""
    monkeypatch.setattr(repeats, "STEPS_IN_A_ROW", 10**6)
    calls, planned = lengths_vary(), explained(302).verdict("cudnn")
    slower = explained(302).verdict("efficient").ranked_ms - planned.predicted_ms
    assert math.isclose(calls, planned.plan_ms / slower, rel_tol=0.01)
    step(303)
    found, masks = [], {n: padded(n) for n in (302, 303)}
    for _ in range(calls + 4):
        attnroute.attention(*tensors(302), **masks[302])
        found.append(ran[-1])
        attnroute.attention(*tensors(303), **masks[303])
    # Calls are counted for each form of a mask, from the second layer of the first step on.
    counted = LAYERS - 1
    assert found == ["efficient"] * (calls - counted) + ["cudnn"] * (4 + counted)
    assert explained(302).selected == "cudnn"
    assert steps(ran, (304,), (302,), (305,)) == ["efficient", "cudnn", "efficient"]


def test_a_shape_that_is_called_in_a_row_is_planned(ran):
    """As in a benchmark, and as no step of a model does."""
    lengths_vary()
    step(303)
    most = repeats.STEPS_IN_A_ROW * Policy().calls_per_step
    before = len(ran)
    for _ in range(most + 3):
        attnroute.attention(*tensors(302), **padded(302))
    # The step of that length counts but for its first layer; that of a length without repeats ends no row.
    counted = LAYERS - 1
    assert ran[before:] == ["efficient"] * (most - counted) + ["cudnn"] * (3 + counted)


def test_near_a_checkpoint_a_shape_keeps_its_route(monkeypatch, ran):
    """A recompute saves what its forward saved."""
    monkeypatch.setattr(lengths, "VARIED", 1)
    inputs = tensors(300, 300, train=True)
    out = checkpoint(attnroute.attention, *inputs, use_reentrant=False)
    (route,) = routes._ROUTES.values()
    for _ in range(route.choice.repaid_after + 3):
        attnroute.attention(*tensors(300, 300, train=True))
    assert (ran[0], ran[-1]) == (route.choice.backend, "cudnn")
    out.sum().backward()
    assert ran[-1] == ran[0] != "cudnn"


def test_where_a_plan_would_win_nothing_calls_are_not_counted():
    lengths_vary()
    step(2, 2, heads=2)
    with attnroute.override(ban="cudnn"):
        for n in (300, 301, 302):
            step(n)
    assert [r.choice.repaid_after for r in routes._ROUTES.values() if r.choice.policy.ban] == [None] * 3


def test_a_family_is_told_by_fields_that_are_named():
    """A key that gets another field must not move what a family reads of it."""
    around, settings = RouteKey._fields[lengths._KIND], RouteKey._fields[lengths._NUMBERS]
    assert around[0] == "dtypes"
    assert {"devices", "training", "transform", "dispatch_mode", "distributed"} <= {*around}
    assert settings == ("trains_function", "scale", "deterministic", "arguments")
    assert "mask" not in {*around, *settings, *RouteKey._fields[lengths._BESIDE_MASK]}
    assert {"bias", "sink", "policy"} <= {*RouteKey._fields[lengths._BESIDE_MASK]}
