"""Every backend in every memory layout of its inputs and of the output's gradient, against float64."""

from __future__ import annotations

import pytest
from support import layouts
from support.package_runs import DISTRIBUTIONS, require

pytestmark = pytest.mark.gpu
BACKENDS = ("flash", "cudnn", "efficient", "flex", "chunked", "math", *DISTRIBUTIONS)
"""All but te and fa2, whose builds have files of their own; these run `layouts.check` as well."""
ONE_QUERY = ("flash", "efficient", "flex", "chunked", "math", "fa3", "fa4")
"""Those that train a single query."""


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(b, k) for b in BACKENDS for k in layouts.KINDS if k != "one query" or b in ONE_QUERY],
)
def test_layouts(backend, kind):
    if backend in DISTRIBUTIONS:
        require(*DISTRIBUTIONS[backend])
    layouts.check(backend, kind)
