"""What tests of the API share: a process that remembers nothing, and which way each call went."""

from __future__ import annotations

import pytest
from support.ways import ways_taken

from attnroute.memory import reset


@pytest.fixture
def fresh():
    """Begin and end with nothing remembered."""
    reset()
    yield
    reset()


@pytest.fixture
def ways(monkeypatch):
    """Return a list that gets the way of each call."""
    return ways_taken(monkeypatch)
