"""Padding that holds NaN, on a CUDA device: no backend shows it, in output or gradients, in any layout."""

from __future__ import annotations

import math

import pytest
import torch
from support import layouts
from support.cuda_problems import TOLERANCE, spoil_memory
from support.kernel_names import names_of
from support.left_out import COUNTS, LEFT, LENGTH, MEMORY, RIGHT, hold, inputs_of
from support.package_runs import DISTRIBUTIONS, require

import attnroute
from attnroute import masks

pytestmark = pytest.mark.gpu
BACKENDS = ("flash", "cudnn", "efficient", "flex", "chunked", "math", *DISTRIBUTIONS)


def check(backend, memory, *, left=False, causal=False, train=False, queries=LENGTH):
    """Run one call three times, so that the last one goes the short way, and hold each."""
    if backend in DISTRIBUTIONS:
        require(*DISTRIBUTIONS[backend])
    keep, counts = (LEFT if left else RIGHT).cuda(), COUNTS.cuda()
    mask = masks.KeyPadding(left=LENGTH - counts) if left else masks.KeyPadding(lengths=counts)
    inputs = inputs_of(memory, math.nan, keep, torch.bfloat16, 64, queries)
    decision = attnroute.explain(*inputs, mask & masks.Causal() if causal else mask, backend=backend)
    assert decision.selected == backend, str(decision)

    def run():
        for _ in range(3):
            spoil_memory()
            hold(inputs, mask, keep, causal, TOLERANCE[torch.bfloat16], train=train, backend=backend)

    run()
    _, on_device, names = names_of(run)
    layouts.check_ran(backend, on_device, names)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_at_the_right(backend, memory, train):
    check(backend, memory, train=train)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_at_the_left_and_causal(backend, train):
    check(backend, "tokens outermost", left=True, causal=True, train=train)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding(backend, memory, left):
    check(backend, memory, left=left, queries=1)
