"""Backend name to the function that runs it, imported when it is first needed."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from attnroute.errors import TableError

if TYPE_CHECKING:
    from attnroute.executors._repairs import Run


@lru_cache(maxsize=32)
def executor(backend: str) -> Run:
    """Return the `run` of `attnroute.executors.<backend>`.

    Raises:
        TableError: There is none: a folder of tables declares a backend that nothing here runs.
    """
    name = f"attnroute.executors.{backend}"
    try:
        return cast("Run", import_module(name).run)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        required = f"attnroute/executors/{backend}.py, which runs it"
        raise TableError(f"any/{backend}.toml requires {required}; got none; ban {backend}.") from error
