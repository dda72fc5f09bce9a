"""Hand-made decisions for the tests of texts, so that a changed table row does not break them."""

from __future__ import annotations

from attnroute.engine.decision import Decision, Exclusion, Prediction, Verdict
from attnroute.engine.finding import Finding
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy

CALL = "bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train"
HOST = Host(
    arch="sm_90", device_name="some card", versions={"triton": "3.5", "cudnn": "9.19.0", "torch": "2.11.0"}
)
GIB = 2**30


def finding(**changes):
    """Return a failing finding."""
    fields = {
        "rule": "sm_90/alpha/head-dim-range",
        "outcome": "fail",
        "requires": "head_dim_qk <=64",
        "got": "head_dim_qk = 128",
        "because": "the kernel stops at 64",
    }
    return Finding(**{**fields, **changes})


def prediction(device_ms=1.0, host_ms=0.0, kind="measured", source="NVIDIA H200, 2026-11-29"):
    """Return a prediction."""
    return Prediction(device_ms=device_ms, host_ms=host_ms, kind=kind, source=source)


def verdict(backend, status="eligible", *findings, excluded=None, origin="somebody", **fields):
    """Return a verdict; `excluded` is the reason of an exclusion."""
    kept_out = None if excluded is None else Exclusion(reason=excluded, origin=origin)
    return Verdict(backend=backend, status=status, findings=findings, excluded=kept_out, **fields)


def decision(*verdicts, order=(), line=CALL, host=HOST, policy=None, **fields):
    """Return a decision that selects the first of `order`."""
    return Decision(
        call=parse(line),
        host=host,
        policy=policy or Policy(),
        verdicts=verdicts,
        order=order,
        selected=order[0] if order else None,
        **{"why_this_order": "any/arch/default: alpha is the fastest", **fields},
    )
