"""What holds for every decision, whatever the call, the machine and the tables."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.strategies import calls, hosts

from attnroute.engine.decide import decide
from attnroute.engine.decision import Decision
from attnroute.question.call import Call
from attnroute.question.facts import FACTS
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.tables.rows import RuleRow
from attnroute.tables.schema import Evidence, Rule

BACKENDS = tuple(load().backends)
SLOW_TIER = load().slow_tier
SOME = st.lists(st.sampled_from(BACKENDS), max_size=3, unique=True).map(tuple)
H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"})
PREFILL = Call(
    dtype="bfloat16",
    batch=2,
    num_heads_q=32,
    num_heads_kv=8,
    seqlen_q=4096,
    seqlen_kv=4096,
    head_dim_qk=128,
    head_dim_v=128,
    mask=({"kind": "causal"},),
)


def policies():
    return st.builds(
        Policy,
        require=st.none() | st.sampled_from(BACKENDS),
        prefer=SOME,
        allow=st.none() | SOME,
        ban=SOME,
        strict=st.booleans(),
        allow_unknown=st.booleans(),
        transform=st.sampled_from([None, None, "double_backward"]),
    )


def statuses(decision):
    return {verdict.backend: verdict.status for verdict in decision.verdicts}


def judged(decision):
    """Everything but the order in which findings are listed."""
    return {
        v.backend: (v.status, v.repairs, v.extra_bytes, v.missing, frozenset(v.findings))
        for v in decision.verdicts
    }


@given(calls(), hosts(), policies())
@settings(max_examples=120)
def test_every_backend_has_one_verdict_and_the_first_candidate_is_selected(call, host, policy):
    decision = decide(call, host, policy=policy)
    assert sorted(v.backend for v in decision.verdicts) == sorted(BACKENDS)
    assert decision.selected == (decision.order[0] if decision.order else None)
    assert len(set(decision.order)) == len(decision.order)
    usable = {"eligible", "unknown"} if policy.allow_unknown and not policy.strict else {"eligible"}
    for verdict in decision.verdicts:
        may_run = verdict.status in usable and verdict.excluded is None
        assert (verdict.backend in decision.order) is may_run


@given(calls(), hosts(), policies())
def test_a_status_is_the_worst_that_was_found(call, host, policy):
    for verdict in decide(call, host, policy=policy).verdicts:
        outcomes = {finding.outcome for finding in verdict.blocking}
        if "fail" in outcomes:
            assert verdict.status == "rejected"
        elif outcomes:
            assert (verdict.status, outcomes) == ("unknown", {"unknown"})
        else:
            assert verdict.status == ("unavailable" if verdict.missing else "eligible")


@given(calls(), hosts(), policies())
def test_only_what_is_not_rejected_has_options_and_each_names_its_row(call, host, policy):
    for verdict in decide(call, host, policy=policy).verdicts:
        assert len(verdict.options) == len(verdict.option_rows)
        assert len(dict(verdict.options)) == len(verdict.options)
        if verdict.status == "rejected":
            assert (verdict.options, verdict.first_call_seconds) == ((), None)


@given(calls(), hosts(), policies())
def test_every_finding_says_both_sides(call, host, policy):
    for verdict in decide(call, host, policy=policy).verdicts:
        for finding in verdict.findings:
            assert finding.requires
            if finding.outcome in ("fail", "unknown"):
                assert finding.got
            assert (
                finding.repaired_by is None
                or finding.repaired_by in verdict.repairs
                or verdict.status == "rejected"
            )
        assert len({finding.rule for finding in verdict.findings}) == len(verdict.findings)


@given(calls(), hosts(), policies())
def test_wishes_hold(call, host, policy):
    decision = decide(call, host, policy=policy)
    assert not set(policy.ban) & set(decision.order)
    if policy.require is not None:
        assert decision.selected in (policy.require, None)
    elif policy.allow is not None:
        assert set(decision.order) <= set(policy.allow)
    if policy.strict:
        assert not SLOW_TIER & set(decision.order)
    wished = [b for b in (*policy.prefer, *(policy.allow or ())) if b in decision.order]
    assert decision.order[:1] == tuple(dict.fromkeys(wished))[:1] or not wished


@given(calls(), hosts(), policies())
def test_what_policy_keeps_out_is_said_and_changes_no_verdict(call, host, policy):
    free, bound = (
        decide(call, host, policy=Policy(transform=policy.transform)),
        decide(call, host, policy=policy),
    )
    assert judged(free) == judged(bound)
    for verdict in bound.verdicts:
        if verdict.backend in policy.ban:
            assert verdict.excluded.reason == "banned"
        elif verdict.status == "eligible" and verdict.backend not in bound.order:
            assert verdict.excluded.reason in ("not_required", "not_allowed", "strict")


@given(calls(), hosts())
def test_the_slow_tier_is_selected_only_where_nothing_else_may_run(call, host):
    decision = decide(call, host)
    if decision.selected in SLOW_TIER:
        assert set(decision.order) <= SLOW_TIER


@given(calls(), hosts(), policies())
@settings(max_examples=40)
def test_a_decision_survives_json(call, host, policy):
    decision = decide(call, host, policy=policy, advise=True)
    assert Decision.model_validate_json(decision.model_dump_json()) == decision


@given(calls(), hosts(), policies())
@settings(max_examples=40)
def test_the_same_question_gets_the_same_answer(call, host, policy):
    first = decide(call, host, policy=policy, advise=True)
    again = decide(
        Call.model_validate_json(call.model_dump_json()),
        Host.model_validate_json(host.model_dump_json()),
        Tables((shipped_folder(),)),
        Policy.model_validate_json(policy.model_dump_json()),
        advise=True,
    )
    assert again == first


def test_nothing_of_the_machine_that_decides_is_read(monkeypatch):
    before = decide(PREFILL, H100)
    monkeypatch.setenv("ATTNROUTE_BACKEND", "math")
    monkeypatch.setenv("ATTNROUTE_STRICT", "1")
    monkeypatch.setattr("time.time", lambda: pytest.fail("the clock was read"))
    assert decide(PREFILL, H100) == before


class Changed(Tables):
    """The shipped tables with every backend's rows put through a function."""

    def __init__(self, change):
        super().__init__((shipped_folder(),))
        object.__setattr__(self, "change", change)

    def rules(self, arch, backend):
        rows = load().rules(arch, backend)
        return None if rows is None else tuple(self.change(backend, list(rows)))


@given(calls(), hosts(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_the_order_of_rows_does_not_matter(call, host, random):
    def shuffled(backend, rows):
        random.shuffle(rows)
        return rows

    assert judged(decide(call, host, Changed(shuffled))) == judged(decide(call, host, load()))


NUMBERS, BOOLS, WORDS = (
    sorted(name for name, fact in FACTS.items() if fact.kind == kind) for kind in ("number", "bool", "word")
)


@st.composite
def added_rows(draw):
    """Draw a row about anything, without a repair."""

    def box():
        number = st.tuples(
            st.sampled_from([">=", "<=", "==", "!=", "%"]), st.sampled_from([1, 2, 8, 64, 128, 256])
        )
        words = st.sampled_from(WORDS).flatmap(
            lambda f: st.tuples(
                st.just(f), st.lists(st.sampled_from(FACTS[f].words), min_size=1, unique=True)
            )
        )
        numbers = st.tuples(st.sampled_from(NUMBERS), number.map(lambda pair: f"{pair[0]}{pair[1]}"))
        bools = st.tuples(st.sampled_from(BOOLS), st.booleans())
        return st.lists(words | numbers | bools, max_size=2).map(dict)

    return Rule(
        name="added",
        kind=draw(st.sampled_from(["limit", "limit", "slow"])),
        versions=draw(
            st.sampled_from([{}, {"torch": ">=2.9"}, {"cudnn": "<9.19"}, {"flash-attn-4": ">=4.0.0b1"}])
        ),
        phase=draw(st.sampled_from([None, "training", "inference"])),
        when=draw(box()),
        requires=draw(st.just("never") | box()),
        because="of this test",
        evidence=[Evidence(kind="own", ref="this test")],
        recheck_after="2100-01-01",
    )


@given(calls(), hosts(), added_rows())
@settings(max_examples=120)
def test_one_more_row_makes_nothing_more_acceptable(call, host, rule):
    """A row without a repair. One that names a repair can help: what it prepares may suit other rows too."""

    def more(backend, rows):
        return [*rows, RuleRow(f"any/{backend}/added", rule, shipped_folder())]

    rank = {"eligible": 0, "unavailable": 1, "unknown": 2, "rejected": 3}
    before, after = statuses(decide(call, host, load())), statuses(decide(call, host, Changed(more)))
    for backend in BACKENDS:
        # A fault that may be there is worse than none, but no better than a limit that is.
        assert rank[after[backend]] >= rank[before[backend]] or {before[backend], after[backend]} == {
            "eligible"
        }


@given(calls(), hosts(), st.data())
@settings(max_examples=120)
def test_what_nobody_stated_makes_nothing_more_acceptable(call, host, data):
    """Leaving out a version, or whether the inputs train, never makes a rejected backend eligible."""
    known = (
        call if call.qkv_requires_grad is not None else call.with_(qkv_requires_grad=data.draw(st.booleans()))
    )
    lost = data.draw(st.sampled_from([None, *sorted(host.versions)]))
    silent_host = host if lost is None else host.with_versions({lost: None})
    # The CUDA version may still be read off torch's own, and then it was not left out.
    assume(lost != "cuda" or "+cu" not in host.versions.get("torch", ""))
    stated = statuses(decide(known, host))
    silent = statuses(decide(known.with_(qkv_requires_grad=None), silent_host))
    for backend in BACKENDS:
        if stated[backend] == "rejected":
            assert silent[backend] != "eligible"


@given(calls(), hosts())
def test_what_the_tables_do_not_know_is_never_eligible(call, host):
    future = host.with_versions({"torch": "99.0", "cuda": "13.0", "cudnn": "9.19.0"})
    for verdict in decide(call, future).verdicts:
        if "torch" in load().backends[verdict.backend].versions_known and verdict.backend != "chunked":
            assert verdict.status in ("unknown", "rejected")


@given(calls(), hosts())
def test_a_backend_that_no_table_describes_here_is_unknown(call, host):
    for verdict in decide(call, host).verdicts:
        if load().rules(host.arch, verdict.backend) is None:
            assert verdict.status == "unknown"
            (finding,) = verdict.findings
            assert finding.rule == f"{host.arch}/{verdict.backend}/no-table"


def test_a_provider_that_is_missing_or_broken_is_unavailable_and_still_judged():
    broken = H100.model_copy(update={"broken": {"cudnn": "ImportError: libcudnn.so.9"}})
    for host in (broken, H100.with_versions({"cudnn": None})):
        verdict = decide(PREFILL, host).verdict("cudnn")
        assert (verdict.status, verdict.missing) == ("unavailable", ("cudnn",))
        assert decide(PREFILL.with_(softcap=30.0), host).verdict("cudnn").status == "rejected"
    assert decide(PREFILL, H100).verdict("cudnn").status == "eligible"


def test_a_guard_of_an_unknown_version_blocks_only_what_its_requirement_would_stop():
    """Whether the row applies is not known; where its requirement holds, that does not matter."""

    def more(backend, rows):
        guard = {"flash-attn-4": ">=4.0.0b1"}
        wide = Rule(
            name="added",
            versions=guard,
            requires={"head_dim_qk": "<=64"},
            because="of this test",
            evidence=[Evidence(kind="own", ref="this test")],
        )
        return (
            [*rows, RuleRow(f"any/{backend}/added", wide, shipped_folder())] if backend == "flash" else rows
        )

    wide, narrow = PREFILL, PREFILL.with_(head_dim_qk=64, head_dim_v=64)
    assert decide(wide, H100, Changed(more)).verdict("flash").status == "unknown"
    assert decide(narrow, H100, Changed(more)).verdict("flash").status == "eligible"


def test_tables_are_plain_enough_to_be_changed_here():
    assert judged(decide(PREFILL, H100, Changed(lambda _, rows: rows))) == judged(decide(PREFILL, H100))
    assert dataclasses.is_dataclass(RuleRow)


def test_a_banned_backend_says_who_banned_it():
    policy = Policy(
        require="flash", ban=("flash",), origin={"ban": "ATTNROUTE_BACKENDS=-flash", "require": "the call"}
    )
    decision = decide(PREFILL, H100, policy=policy)
    assert decision.selected is None
    assert decision.verdict("flash").excluded.origin == "ATTNROUTE_BACKENDS=-flash"


def test_an_unknown_backend_is_selected_only_where_that_is_allowed():
    old = H100.with_versions({"torch": "99.0"})
    plain, allowed = (
        decide(PREFILL, old),
        decide(PREFILL, old, policy=Policy(allow_unknown=True, prefer=("flash",))),
    )
    assert plain.verdict("flash").excluded.reason == "unknown"
    assert (plain.selected, allowed.selected) == ("chunked", "flash")
    strict = decide(PREFILL, old, policy=Policy(allow_unknown=True, prefer=("flash",), strict=True))
    assert strict.selected == "chunked"


def test_an_eligible_backend_comes_before_an_unknown_one():
    decision = decide(PREFILL, H100.with_versions({"torch": "99.0"}), policy=Policy(allow_unknown=True))
    ranks = [decision.verdict(backend).status for backend in decision.order]
    assert ranks == sorted(ranks)
    assert decision.selected == "chunked"


def test_no_backend_is_asked_for_by_a_name_that_is_none():
    with pytest.raises(KeyError):
        decide(PREFILL, H100).verdict("fa5")


@pytest.mark.parametrize("arch", ["sm_70", "sm_130"])
def test_an_architecture_that_nobody_described_runs_what_depends_on_none(arch):
    host = Host(arch=arch, versions={"torch": "2.11.0+cu130", "cudnn": "9.19.0"})
    call = Call.model_validate(
        {
            "dtype": "bfloat16",
            "batch": 1,
            "num_heads_q": 4,
            "num_heads_kv": 2,
            "seqlen_q": 64,
            "seqlen_kv": 64,
            "head_dim_qk": 64,
            "head_dim_v": 64,
        }
    )
    decision = decide(call, host)
    assert decision.selected == "chunked"
    unknown = {v.backend for v in decision.verdicts if v.status == "unknown"}
    assert unknown == set(load().backends) - {"chunked", "math"}
