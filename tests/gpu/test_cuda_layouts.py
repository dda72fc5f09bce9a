"""Every backend in every memory layout of its inputs and of the output's gradient, against float64."""

from __future__ import annotations

import pytest
from support import layouts
from support.package_runs import require

pytestmark = pytest.mark.gpu
PACKAGES = {
    "fa3": ("xformers", "xformers or flash-attn-3"),
    "fa4": ("flash_attn.cute", "flash-attn-4"),
    "flex_fa4": ("flash_attn.cute", "flash-attn-4"),
    "cudnn_fe": ("cudnn", "nvidia-cudnn-frontend"),
}
BACKENDS = ("flash", "cudnn", "efficient", "flex", "chunked", "math", *PACKAGES)
"""All but te and fa2, whose builds have files of their own; these run `layouts.check` as well."""
ONE_QUERY = ("flash", "efficient", "flex", "chunked", "math", "fa3", "fa4")
"""Those that train a single query."""


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(b, k) for b in BACKENDS for k in layouts.KINDS if k != "one query" or b in ONE_QUERY],
)
def test_layouts(backend, kind):
    if backend in PACKAGES:
        require(*PACKAGES[backend])
    layouts.check(backend, kind)
