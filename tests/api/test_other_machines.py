"""`explain(arch=...)`: what a call of tensors here would get on another machine."""

from __future__ import annotations

import pytest
import torch

import attnroute
from attnroute.engine.decide import decide
from attnroute.question.line import render
from attnroute.tables.load import load
from attnroute.tables.machines import machine


def tensors():
    query = torch.empty(1, 8, 256, 128, dtype=torch.bfloat16)
    key = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16)
    return query, key, key


@pytest.mark.parametrize("arch", ["h100", "sm_90", "rtx4090", "cpu"])
def test_a_call_is_decided_for_the_machine_that_is_named(arch):
    found = attnroute.explain(*tensors(), is_causal=True, arch=arch)
    host = machine(arch, load(), argument="arch")
    assert found.host == host
    assert found == decide(found.call, host, advise=True)
    assert render(found.call) == "bf16 b1 hq8 hkv2 sq256 skv256 d128 causal"


def test_settings_hold_there_too():
    assert attnroute.explain(*tensors(), arch="h100", backend="efficient").selected == "efficient"
    with attnroute.override(ban="cudnn"):
        assert attnroute.explain(*tensors(), arch="h100").selected != "cudnn"


def test_a_machine_that_nobody_knows_is_refused_with_what_is_alike():
    with pytest.raises(
        attnroute.ArgumentError, match=r'arch requires one of .*; got "h1000"; known and alike: H100'
    ):
        attnroute.explain(*tensors(), arch="h1000")
