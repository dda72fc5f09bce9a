"""Both sides of a table row: a call that it refuses and one, as near as can be, that it lets pass."""

from __future__ import annotations

from typing import Any, NamedTuple

from attnroute.engine.decide import judge
from attnroute.engine.evaluate import evaluate
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.tables.load import load

TABLES = load()
CUDA_ARCHS = [arch for arch in TABLES.arch_names if arch != "cpu"]
CALL = {
    "dtype": "bfloat16",
    "batch": 2,
    "num_heads_q": 8,
    "num_heads_kv": 8,
    "seqlen_q": 512,
    "seqlen_kv": 512,
    "head_dim_qk": 64,
    "head_dim_v": 64,
}
TRAINING = {"phase": "training"}
THD = {"layout": "thd", "batch": 1}


PADDED = {"mask": ({"kind": "key_padding", "lengths": (100, 512)},)}
FINITE = {"mask": ({"kind": "key_padding", "lengths": (100, 512), "finite": True},)}


class Case(NamedTuple):
    """One row, held against two calls.

    Attributes:
        rule: Its id.
        arch: Where.
        refused: Fields of a call that fails it, over `CALL`, and the host's `versions`.
        taken: What is said instead in the call that does not.
    """

    rule: str
    arch: str
    refused: dict[str, Any]
    taken: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.arch}:{self.rule}"


LEFT_OUT_CASE = Case("shared/left_out_finite/zero-times-nan", "sm_90", PADDED, FINITE)
"""Of every backend that reads what padding leaves out."""


def dims(qk, v=None):
    return {"head_dim_qk": qk, "head_dim_v": qk if v is None else v}


def lengths(q, kv):
    return {"seqlen_q": q, "seqlen_kv": kv}


def causal(alignment="top_left"):
    return {"mask": ({"kind": "causal", "alignment": alignment},)}


def window(left, right, alignment="top_left"):
    return {"mask": ({"kind": "window", "left": left, "right": right, "alignment": alignment},)}


def strides(**given):
    return {"strides": given}


def asked(arch, versions, fields):
    """Return the call and the host that fields, and versions over them, describe."""
    given = {**CALL, **fields}
    host = Host(arch=arch, versions={**versions, **given.pop("versions", {})})
    return Call.model_validate(given), host


def findings(backend, versions, arch, fields):
    """Return what every row says, by id, no repair made."""
    call, host = asked(arch, versions, fields)
    return {f.rule: f for f in evaluate(call, host, TABLES, backend)}


def takes(backend, versions, arch, fields, rules):
    """Return whether none of some rows refuses a call."""
    found = findings(backend, versions, arch, fields)
    return all(found[rule].outcome != "fail" for rule in rules)


def verdict(backend, versions, arch, fields):
    """Return a backend's verdict, repairs included."""
    call, host = asked(arch, versions, fields)
    return judge(call, host, TABLES, backend, Policy())


def rows_of(backend):
    """Return every row of a backend, by id, wherever it holds; no CPU has a kernel of a package."""
    found = {}
    for arch in CUDA_ARCHS:
        found |= {row.id: row for row in TABLES.rules(arch, backend) or ()}
    return found


def check_sides(backend, versions, case):
    """Assert that a row refuses one call and takes the other, and that its repair lifts it."""
    refused = findings(backend, versions, case.arch, case.refused)[case.rule]
    taken = findings(backend, versions, case.arch, {**case.refused, **case.taken})[case.rule]
    assert refused.outcome == "fail"
    assert taken.outcome in ("pass", "not_applicable")
    if refused.repair is not None:
        lifted = {f.rule: f for f in verdict(backend, versions, case.arch, case.refused).findings}
        assert lifted[case.rule].repaired_by is not None


def check_every_row_has_a_case(backend, cases):
    """Assert that no row is left untried."""
    assert {case.rule for case in cases} == set(rows_of(backend))


def archs_with(backend, rule):
    return {a for a in CUDA_ARCHS if any(r.id == rule for r in TABLES.rules(a, backend) or ())}
