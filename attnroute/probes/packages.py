"""Versions of installed distributions, from their metadata; nothing is imported."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata

PROVIDERS = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "transformer-engine",
    "triton",
    "transformers",
)


@lru_cache(maxsize=1)
def installed() -> dict[str, str]:
    """Return distribution name to version for every known provider that is installed."""
    found = {}
    for name in PROVIDERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
