"""Groups of gloo processes, started at the first test that asks for one and ended with the last test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed._ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes: `two_ranks.run(function, *args)` runs a function of a module's top level on each."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
