"""A new length finds the decision of its class, and still runs its own mask."""

from __future__ import annotations

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.spy import Spy, decided_calls

import attnroute
from attnroute.memory import reset


@pytest.fixture(autouse=True)
def fresh():
    reset()


def test_a_decoding_loop_decides_once(monkeypatch):
    made = decided_calls(monkeypatch)
    query = torch.randn(1, 4, 1, 16)
    for length in range(2, 200):
        key = torch.randn(1, 2, length, 16)
        with Spy() as spy:
            out = attnroute.attention(query, key, key, is_causal=True, causal_alignment="bottom_right")
        assert spy.backends == {"flash"}
        assert error(out, attend(query, key, key)[0]) <= TOLERANCE[torch.float32]
    # Rules ask whether 64 or 128 divide a length and whether it is above 64: five classes, not 198.
    assert len(made) <= 5


def test_a_window_that_rules_nothing_out_shares_the_class_of_none(monkeypatch):
    made = decided_calls(monkeypatch)
    tensors = [torch.randn(1, 2, 9, 16) for _ in range(3)]
    plain = attnroute.attention(*tensors, is_causal=True)
    windowed = attnroute.attention(*tensors, is_causal=True, window=(4095, 0))
    narrow = attnroute.attention(*tensors, is_causal=True, window=(2, 0))
    assert torch.equal(plain, windowed)
    rows, columns = torch.arange(9)[:, None], torch.arange(9)
    allowed = (columns <= rows) & (columns >= rows - 2)
    assert error(narrow, attend(*tensors, allowed=allowed)[0]) <= TOLERANCE[torch.float32]
    assert len(made) == 2


def test_every_length_runs_its_own_band():
    for length in (5, 9, 300, 40):
        tensors = [torch.randn(2, 2, length, 16) for _ in range(3)]
        rows, columns = torch.arange(length)[:, None], torch.arange(length)
        out = attnroute.attention(*tensors, window=(3, 1))
        allowed = (columns >= rows - 3) & (columns <= rows + 1)
        assert error(out, attend(*tensors, allowed=allowed)[0]) <= TOLERANCE[torch.float32]
