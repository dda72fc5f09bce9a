"""What one process computes of a call on DTensors is judged as the same call on plain tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from support.strategies import calls, hosts

from attnroute import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.vocabulary import FEATURES

H200 = Host(
    arch="sm_90",
    device_name="NVIDIA H200",
    versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"},
)


def told(verdict):
    """Return what does not depend on how long the host takes."""
    prediction = verdict.prediction
    return (
        verdict.backend,
        verdict.status,
        [(f.rule, f.outcome) for f in verdict.findings],
        verdict.repairs,
        verdict.missing,
        verdict.extra_bytes,
        verdict.quadratic_bytes,
        None if prediction is None else (prediction.device_ms, prediction.kind),
    )


def with_distributed(call, word):
    return call.changed(context=call.context.model_copy(update={"distributed": word}))


@given(calls(), hosts())
def test_no_backend_is_judged_otherwise(call, host):
    plain, spread = (decide(with_distributed(call, word), host) for word in (None, "dtensor"))
    assert sorted(map(told, spread.verdicts)) == sorted(map(told, plain.verdicts))


@pytest.mark.parametrize("line", ["bf16 b2 hq16 sq2048 d128 causal", "bf16 b2 hq16 sq2048 d128 causal train"])
def test_every_backend_keeps_the_host_longer_by_as_much(line):
    """What was not measured with DTensors must not seem faster there than what was."""
    plain, spread = (decide(parse(f"{line}{word}"), H200) for word in ("", " dtensor"))
    more = {
        verdict.backend: round(1e3 * (verdict.prediction.host_ms - own.host_ms), 1)
        for verdict in spread.verdicts
        if verdict.prediction is not None and (own := plain.verdict(verdict.backend).prediction) is not None
    }
    assert len(more) > 4
    assert len(set(more.values())) == 1
    assert min(more.values()) > 0


def test_a_graph_has_no_host():
    """A CUDA graph is replayed by the device alone, on DTensors too."""
    line = "bf16 b2 hq16 sq2048 d128 causal graph"
    assert decide(parse(f"{line} dtensor"), H200).order == decide(parse(line), H200).order


def test_it_is_no_feature_of_kernels():
    assert "dtensor" not in FEATURES
