"""The short way to a kernel: what the kernel makes itself is not made before it."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from support.repair_inputs import inputs_of, lowered, plan, reference

from attnroute import masks
from attnroute.executors.prepare.bound import bind
from attnroute.executors.protocol import Executor


@pytest.mark.parametrize("repair", ["align_bias", "pad_head_dim"])
@pytest.mark.parametrize("spared", [False, True])
def test_what_a_kernel_makes_itself_is_not_made_before(repair, spared):
    """A bias beside a mask, or at an address that kernels cannot read, is still prepared."""
    seen = []

    def bound(*given):
        seen.append(given)
        return given[0]

    executor = Executor(reference, bind=lambda *_: bound, spared=frozenset({repair} if spared else ()))
    inputs = inputs_of(head_dims=(5, 5))
    bias = (
        torch.randn(17 * 16)[: 4 * 5 * 7].view(1, 4, 5, 7).requires_grad_()
        if repair == "align_bias"
        else None
    )
    run = bind(executor, replace(inputs, bias=bias), replace(plan(repair), return_lse=False), bias)
    assert (run is not None) is spared
    if spared:
        run(inputs.query, inputs.key, inputs.value, bias)
        assert all(map(operator.is_, seen[0], (inputs.query, inputs.key, inputs.value, bias)))
    if bias is not None:
        moved = torch.randn(4 * 5 * 7 + 1)[1:].view(1, 4, 5, 7)
        causal = lowered(masks.Causal("bottom_right"), inputs)
        for change in ({"bias": moved}, {"bias": bias, "mask": causal}):
            given = replace(inputs, **change)
            assert bind(executor, given, replace(plan(repair), return_lse=False), bias) is None
