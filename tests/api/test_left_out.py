"""Padding that is left out may hold anything: neither the output nor a gradient shows what is in it."""

from __future__ import annotations

import math

import pytest
import torch
from support.left_out import COUNTS, HEADS, LEFT, LENGTH, MEMORY, RIGHT, TOKENS, hold, inputs_of
from support.reference import TOLERANCE, attend, error

import attnroute
from attnroute import masks
from attnroute.engine.decide import decide
from attnroute.errors import ArgumentError
from attnroute.executors.prepare import clear
from attnroute.question.host import Host
from attnroute.question.line import parse

FORMS = {
    "lengths": (lambda: masks.KeyPadding(lengths=COUNTS), RIGHT),
    "lengths as ints": (lambda: masks.KeyPadding(lengths=COUNTS.tolist()), RIGHT),
    "left": (lambda: masks.KeyPadding(left=LENGTH - COUNTS), LEFT),
    "keep": (lambda: masks.KeyPadding(keep=RIGHT), RIGHT),
    "two": (lambda: masks.KeyPadding(keep=RIGHT, finite=True) & masks.KeyPadding(left=[0, 1, 2, 0]), None),
}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["flash", "chunked", "math"])
def test_garbage_changes_nothing(backend, form, causal, garbage):
    make, keep = FORMS[form]
    keep = RIGHT & (torch.tensor([[0], [1], [2], [0]]) <= TOKENS) if keep is None else keep
    hold(inputs_of("packed", garbage, keep), make(), keep, causal, TOLERANCE[torch.float32], backend=backend)


@pytest.mark.parametrize("backend", ["flash", "chunked", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", MEMORY)
def test_in_every_memory_layout(memory, dtype, backend):
    inputs = inputs_of(memory, math.nan, RIGHT, dtype)
    hold(inputs, masks.KeyPadding(lengths=COUNTS), RIGHT, True, TOLERANCE[dtype], backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("size", ["small", "large"])
def test_calls_that_repeat_in_every_memory_layout(memory, dtype, size, monkeypatch):
    if size == "large":
        monkeypatch.setattr(clear, "_SMALL", 0)
    mask = masks.KeyPadding(lengths=COUNTS)
    for _ in range(3):
        inputs = inputs_of(memory, math.nan, RIGHT, dtype)
        hold(inputs, mask, RIGHT, False, TOLERANCE[dtype], train=False, backend="flash")


@pytest.mark.parametrize("memory", ["packed", "tokens outermost", "static cache"])
def test_a_mask_that_is_kept_costs_one_pass_for_each_tensor(memory):
    """Nothing else is launched, and the backward clears nothing."""
    inputs = [t.requires_grad_() for t in inputs_of(memory, math.nan, RIGHT)]
    mask = masks.KeyPadding(lengths=COUNTS)
    for _ in range(3):
        attnroute.attention(*inputs, mask, backend="flash")
    with torch.profiler.profile() as seen:
        out = attnroute.attention(*inputs, mask, backend="flash")
        torch.autograd.grad(out, inputs, out.detach())
    counts = {event.key.removeprefix("aten::"): event.count for event in seen.key_averages()}
    assert counts["bitwise_and"] == 2
    assert counts.keys() & {"where", "masked_fill", "fill_", "neg_"} == set()


@pytest.mark.parametrize("given", [{"softcap": 5.0}, {"sink": torch.randn(HEADS)}, {"return_lse": False}])
def test_beside_changes_of_scores_and_without_a_wish(given):
    inputs = inputs_of("packed", math.nan, RIGHT)
    hold(inputs, masks.KeyPadding(lengths=COUNTS), RIGHT, True, TOLERANCE[torch.float32], **given)


@pytest.mark.parametrize("backend", ["flash", "chunked", "math"])
def test_in_a_graph(backend):
    inputs = inputs_of("packed", math.nan, RIGHT)
    counts = COUNTS.clone()

    def call(query, key, value, counts):
        return attnroute.attention(query, key, value, masks.KeyPadding(lengths=counts), backend=backend)

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs, counts)
    clean = [t.double().nan_to_num(0) for t in inputs]
    assert error(got, attend(*clean, allowed=RIGHT[:, None, None])[0]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "cpu"])
def test_nobody_reads_what_is_left_out_without_a_repair(arch):
    """A padded row is cleared, or becomes a sequence that ends where its keys do."""
    versions = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"}
    packages = {"nvidia-cudnn-frontend": "1.32.0", "xformers": "0.0.34", "flash-attn-4": "4.0.0b36"}
    versions |= {**packages, "nvidia-cutlass-dsl": "4.8.1"}
    for line in ("keys=9,100", "keys-left causal", "keys-any", "keys causal train"):
        decision = decide(
            parse(f"bf16 b2 hq4 hkv2 sq128 skv128 d64 {line}"), Host(arch=arch, versions=versions)
        )
        assert decision.order
        for backend in decision.order:
            repairs = decision.verdict(backend).repairs
            expected = "to_varlen" if backend in ("flash", "cudnn_fe") and arch != "cpu" else "clear_left_out"
            assert expected in repairs, backend


def test_what_is_stated_to_be_finite_is_not_copied():
    host = Host(arch="cpu", versions={"torch": "2.13.0"})
    call = parse("fp32 b2 hq4 sq128 d64 keys=9,100:finite")
    decision = decide(call, host)
    assert all("clear_left_out" not in decision.verdict(b).repairs for b in decision.order)
    stated = masks.KeyPadding(lengths=COUNTS, finite=True)
    query, key, value = inputs_of("packed", 0.0, RIGHT)
    assert "clear_left_out" not in attnroute.explain(query, key, value, stated).text(verbose=True)
    assert "clear_left_out" in attnroute.explain(query, key, value, masks.KeyPadding(lengths=COUNTS)).text(
        verbose=True
    )
    with pytest.raises(ArgumentError, match="KeyPadding finite requires True or False; got 'yes'"):
        masks.KeyPadding(lengths=COUNTS, finite="yes")


def test_a_tensor_is_taken_as_stock_takes_it():
    """A dense mask that is padding: no copy is made, recognised or not."""
    host = Host(arch="cpu", versions={"torch": "2.13.0"})
    decision = decide(parse("fp32 b2 hq4 sq512 d64 dense=2x1x1x512:recognized=keys"), host)
    assert all("clear_left_out" not in decision.verdict(b).repairs for b in decision.order)
