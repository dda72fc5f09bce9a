"""The benchmark of host times: what it sets beside `attention()` means the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.reference import TOLERANCE, attend, error

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import host_times

LENGTH = host_times.SHAPE[2]
BAND = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-8)
EMPTY = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)
SINKS = {
    "sink": ({}, {}),
    "causal": ({"is_causal": True}, {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()}),
    "window": ({"window": (8, 0)}, {"attn_mask": BAND}),
    "a row with no key": ({"mask": EMPTY}, {"attn_mask": EMPTY}),
}


def case_of(name, *, heads_kv=host_times.SHAPE[1], train=False):
    sink = torch.randn(host_times.SHAPE[1], requires_grad=train)
    ours, stock = SINKS[name]
    stock = stock if heads_kv == host_times.SHAPE[1] else {**stock, "enable_gqa": True}
    own = (sink,) if train else ()
    return host_times.Case({**ours, "sink": sink}, stock, heads_kv, train=train, own=own)


@pytest.mark.parametrize("layout", ["bhsd", "tokens outermost"])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("name", SINKS)
def test_a_sink_as_a_key_means_the_same(name, heads_kv, layout):
    case = case_of(name, heads_kv=heads_kv)
    inputs = host_times.tensors(case, layout, "cpu", torch.float32)
    want = attend(*inputs, allowed=case.stock.get("attn_mask"), sink=case.ours["sink"])[0]
    runs = host_times.runs_of(case, inputs, None)
    for run in ("attention", host_times.AS_A_KEY):
        for _ in range(3):
            assert error(runs[run](), want) <= TOLERANCE[torch.float32], run
    assert error(runs["stock"](), want) > 0.01


@pytest.mark.parametrize("layout", ["bhsd", "tokens outermost"])
@pytest.mark.parametrize("name", SINKS)
def test_a_sink_as_a_key_has_the_same_gradients(name, layout, monkeypatch):
    case = case_of(name, train=True)
    inputs = host_times.tensors(case, layout, "cpu", torch.float32)
    grad = torch.randn(host_times.SHAPE)
    monkeypatch.setattr(torch, "randn_like", lambda _: grad)
    out = attend(*inputs, allowed=case.stock.get("attn_mask"), sink=case.ours["sink"])[0]
    want = torch.autograd.grad(out, [*inputs, case.ours["sink"]], grad.double())
    runs = host_times.runs_of(case, inputs, None)
    for run in ("attention", host_times.AS_A_KEY):
        got = runs[run]()
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert error(one, other) <= TOLERANCE[torch.float32], run


def test_each_call_with_a_sink_is_timed_beside_the_same_from_stock(capsys):
    for name, case in host_times.cases("cpu", torch.float32):
        row = host_times.measure(case, "bhsd", "cpu", torch.float32, 1)
        assert (host_times.AS_A_KEY in row) == ("sink" in case.ours), name
        host_times.show(name, row)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said[:1]] == ["plain"]
    assert sum(host_times.AS_A_KEY in line for line in said) == 3
