"""A route that builds a mask with an entry for every query and key comes after every one that builds none.

So it is without predicted times. With one it is the memory that counts (`test_predicted_times.py`).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from support.strategies import calls, hosts

from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.nodes import DenseBias, DenseNode
from attnroute.question.policy import Policy
from attnroute.tables.load import load

SLOW_TIER = load().slow_tier
TORCH = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"}
FRONTEND = {**TORCH, "nvidia-cudnn-frontend": "1.32.0"}
TE = {**TORCH, "transformer-engine": "2.16.1", "transformer-engine-torch": "2.16.1"}
HOPPER, WITH_FRONTEND, WITH_TE = (Host(arch="sm_90", versions=v) for v in (TORCH, FRONTEND, TE))


def built(decision, backend):
    """Return the bytes of the large mask that a backend would need."""
    return decision.verdict(backend).quadratic_bytes


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("phase", ["", " train"])
@pytest.mark.parametrize("tokens", [256, 4000, 8192])
@pytest.mark.parametrize(
    ("host", "kernels"),
    [(HOPPER, {"flash"}), (WITH_FRONTEND, {"flash", "cudnn_fe"}), (WITH_TE, {"flash", "te"})],
    ids=["torch", "frontend", "te"],
)
@pytest.mark.parametrize("features", ["causal sink", "causal", "sink"])
def test_sequences_run_where_kernels_take_them_as_they_are(features, host, kernels, tokens, phase):
    """The mask of a ragged batch would hold every pair of tokens of different sequences."""
    line = f"bf16 b1 hq64 hkv8 sq{tokens} skv{tokens} d64 thd {features}{phase}"
    decision = decide(parse(line), host)
    assert decision.selected in kernels
    assert built(decision, "cudnn") > 0
    assert decision.order.index("cudnn") > max(decision.order.index(b) for b in kernels)


@pytest.mark.parametrize("mask", ["window=127,0", "documents", "keys causal", "prefix", "not(window=9,0)"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "cpu"])
def test_large_masks_are_built_for_nobody_while_others_need_none(arch, mask):
    host = Host(arch=arch, versions=TORCH)
    decision = decide(parse(f"bf16 b2 hq8 hkv8 sq4096 skv4096 d64 {mask} train"), host)
    assert built(decision, decision.selected) == 0
    first, last = decision.order[0], decision.order[-1]
    assert first not in SLOW_TIER
    assert built(decision, last) > 0 or last in SLOW_TIER or mask == "documents"


@pytest.mark.usefixtures("unmeasured")
def test_a_small_mask_and_a_tensor_that_the_caller_brought_count_for_nothing():
    for line in (
        "bf16 b2 hq8 hkv8 sq512 skv512 d64 prefix",
        "bf16 b2 hq8 hkv8 sq4096 skv4096 d64 dense=1x1x4096x4096",
        "bf16 b2 hq8 hkv8 sq1 skv8192 d64 keys-any",
        "bf16 b2 hq8 hkv8 sq4096 skv4096 d64 keys",
    ):
        decision = decide(parse(line), HOPPER)
        assert decision.selected == "cudnn", line
        assert {built(decision, b) for b in decision.order} == {0}, line


def test_a_wish_still_comes_first_and_the_explanation_says_what_is_built():
    call = parse("bf16 b1 hq8 hkv8 sq8000 skv8000 d64 thd causal sink")
    decision = decide(call, HOPPER, policy=Policy(prefer=("cudnn",)))
    assert decision.selected == "cudnn"
    assert "builds 183 MiB of mask, an entry for every query and key" in decision.text(
        verbose=True, width=120
    )


@given(calls(), hosts())
def test_nobody_who_builds_precedes_somebody_who_does_not(call, host):
    decision = decide(call, host)
    fused = [decision.verdict(b) for b in decision.order if b not in SLOW_TIER]
    counts = [verdict.counts_mask(call) for verdict in fused]
    assert counts == sorted(counts)
    builds = [verdict.quadratic_bytes > 0 for verdict in fused]
    tensors = [n for n in call.mask if isinstance(n, DenseNode)]
    tensors += [call.bias] if isinstance(call.bias, DenseBias) else []
    if any(len(t.shape) > 1 and t.shape[-2] > 1 for t in tensors):
        assert not any(builds)
