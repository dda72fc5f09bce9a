"""How many Python functions `attention()` calls on the CPU: counted, so that it is a test and no benchmark.

Tables are loaded and modules imported; the executor's and torch's own Python functions count too.
"""

from __future__ import annotations

import sys

import pytest
import torch

import attnroute

HEADS = iter(range(100, 1000))
"""Head counts that no other test has, so that each makes a new class of calls."""
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (5, 0)},
    "softcap": {"softcap": 20.0},
}


def calls_of(function, *args, **kwargs):
    count = 0

    def on_event(frame, event, arg):
        nonlocal count
        count += event == "call"

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
    """Load the tables and import what runs these calls."""
    for arguments in CALLS.values():
        for seqlen in (100, 101):
            attnroute.attention(*inputs(1, seqlen), **arguments)
            attnroute.attention(*inputs(1, seqlen, grad=True), **arguments)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_a_call_reaches_its_kernel_through_few_python_functions(arguments, grad):
    heads = next(HEADS)
    new_class, new_length = (
        calls_of(attnroute.attention, *inputs(heads, seqlen, grad=grad), **arguments) for seqlen in (100, 101)
    )
    assert new_class <= 2000
    assert new_length <= 400


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_call_like_an_earlier_one_reaches_its_kernel_at_once(grad):
    """20 functions of attnroute, the records and the executor included; the others are torch's."""
    tensors = inputs(1, 100, grad=grad)
    assert calls_of(attnroute.attention, *tensors, is_causal=True) <= 26
