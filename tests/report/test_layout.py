from __future__ import annotations

import pytest

from attnroute.report.layout import size


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (512, "512 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (968 * 1024, "968 KiB"),
        (2**20 - 1, "1 MiB"),
        (256 * 2**20, "256 MiB"),
        (4 * 2**30, "4 GiB"),
        (45 * 2**30 + 2**28, "45 GiB"),
        (3000 * 2**30, "3000 GiB"),
    ],
)
def test_bytes_are_said_in_the_largest_unit_that_they_fill(count: int, said: str) -> None:
    assert size(count) == said
