"""How many Python functions `attention()` calls on the CPU: counted, so that it is a test and no benchmark.

Tables are loaded and modules imported. Functions of the executor count too, torch's own do not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import attnroute

TORCH = str(Path(torch.__file__).parent)
HEADS = iter(range(100, 1000))
"""Head counts that no other test has, so that each makes a new class of calls."""
CALLS = {
    "plain": ({}, 193),
    "causal": ({"is_causal": True}, 260),
    "scaled": ({"scale": 0.5}, 193),
}
"""Arguments, and how many calls the first call at a new length of a known class takes at most."""
NEW_CLASS = 1000
WARM = 4
"""Of each later one."""
WITH_MASK = 24
"""The same with a mask that was seen before."""


def calls_of(function, *args, **kwargs):
    count = 0

    def on_event(frame, event, arg):
        nonlocal count
        count += event == "call" and TORCH not in frame.f_code.co_filename

    sys.setprofile(on_event)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return count


def inputs(heads, seqlen, *, grad=False):
    return [torch.randn(1, heads, seqlen, 16, requires_grad=grad) for _ in range(3)]


@pytest.fixture(autouse=True)
def ready():
    """Load the tables and import what runs these calls; what other tests left behind is forgotten."""
    attnroute.reset()
    for arguments, _ in CALLS.values():
        for seqlen in (100, 101):
            attnroute.attention(*inputs(1, seqlen), **arguments)
            attnroute.attention(*inputs(1, seqlen, grad=True), **arguments)


def test_an_override_before_slows_no_later_call():
    tensors = inputs(next(HEADS), 100)
    with attnroute.override(prefer="flash"):
        attnroute.attention(*tensors)
    for _ in range(2):
        attnroute.attention(*tensors)
    assert calls_of(attnroute.attention, *tensors) <= WARM


def test_a_trace_before_slows_no_later_call():
    tensors = inputs(next(HEADS), 100)
    attnroute.attention(*tensors)
    before = calls_of(attnroute.attention, *tensors)
    with attnroute.trace():
        assert calls_of(attnroute.attention, *tensors) > WARM
    assert calls_of(attnroute.attention, *tensors) == before <= WARM


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("arguments", "new_length"), CALLS.values(), ids=CALLS)
def test_a_call_reaches_its_kernel_through_few_functions(arguments, new_length, grad):
    heads = next(HEADS)
    first, second = inputs(heads, 100, grad=grad), inputs(heads, 101, grad=grad)
    found = [calls_of(attnroute.attention, *tensors, **arguments) for tensors in (first, second, second)]
    assert found[0] <= NEW_CLASS
    assert found[1] <= new_length
    assert found[2] <= WARM


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": torch.ones(32, 32, dtype=torch.bool).tril()},
        {"mask": attnroute.masks.KeyPadding(lengths=torch.tensor([9]), finite=True)},
        {"mask": attnroute.masks.Causal() & attnroute.masks.KeyPadding(lengths=[9], finite=True)},
        {"window": (3, 0)},
        {"bias": torch.zeros(32, 32)},
        {"layout": "bshd"},
    ],
    ids=["bool mask", "padding", "causal padding", "window", "bias", "bshd"],
)
def test_masks_and_layouts_add_few(arguments):
    tensors = [torch.randn(1, 32, 32, 16) for _ in range(3)]
    attnroute.attention(*tensors, **arguments)
    assert calls_of(attnroute.attention, *tensors, **arguments) <= WITH_MASK
