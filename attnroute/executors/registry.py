"""Backend name to the function that runs it, imported when it is first needed."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from attnroute.executors._repairs import Run


@lru_cache(maxsize=32)
def executor(backend: str) -> Run:
    """Return the `run` of `attnroute.executors.<backend>`."""
    return cast("Run", import_module(f"attnroute.executors.{backend}").run)
