"""Calls in short, what a backend's rows find in them, and where rows hold."""

from __future__ import annotations

from attnroute.engine.decide import judge
from attnroute.engine.evaluate import evaluate
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy
from attnroute.tables.load import load

TABLES = load()
CUDA_ARCHS = [arch for arch in TABLES.arch_names if arch != "cpu"]
NAMED_ARCHS = {f"sm_{n}" for n in (75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)}
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
DETERMINISTIC = TRAINING | {"deterministic": True}
THD = {"layout": "thd", "batch": 1}


PADDED = {"mask": ({"kind": "key_padding", "lengths": (100, 512)},)}
FINITE = {"mask": ({"kind": "key_padding", "lengths": (100, 512), "finite": True},)}


def dims(qk, v=None):
    return {"head_dim_qk": qk, "head_dim_v": qk if v is None else v}


def lengths(q, kv):
    return {"seqlen_q": q, "seqlen_kv": kv}


def causal(alignment="top_left"):
    return {"mask": ({"kind": "causal", "alignment": alignment},)}


def window(left, right, alignment="top_left"):
    return {"mask": ({"kind": "window", "left": left, "right": right, "alignment": alignment},)}


def cudnn(release):
    return {"versions": {"cudnn": release}}


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


def archs_with(backend, rule):
    """Return where a row holds, of the architectures that tests name: one that is added inherits its rows."""
    return {a for a in NAMED_ARCHS if any(r.id == rule for r in TABLES.rules(a, backend) or ())}
