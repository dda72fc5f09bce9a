"""Backend name to the function that runs it, imported when it is first needed."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, cast

from attnroute.errors import KernelRefusedError, TableError
from attnroute.executors.launch import before_launch

if TYPE_CHECKING:
    from attnroute.executors.prepare.apply import Run

_MODULES = {
    "flash": "aten.flash",
    "cudnn": "aten.cudnn",
    "efficient": "aten.efficient",
    "math": "aten.math",
    "flex": "flex.run",
    "flex_fa4": "flex.fa4",
    "chunked": "chunked.run",
}
"""Backend to its module; every other one stands in `packages` under its own name."""


def name_of(backend: str) -> str:
    """Return the name of the module that runs a backend."""
    return f"attnroute.executors.{_MODULES.get(backend, f'packages.{backend}')}"


def executor(backend: str) -> Run:
    """Return the `run` of a backend's module.

    Where that cannot be imported, because something that it imports fails, what is returned refuses each
    call, so that the next backend runs it. The next route tries again.

    Raises:
        TableError: There is none: a folder of tables declares a backend that nothing here runs.
    """
    try:
        with before_launch(backend):
            return _imported(backend)
    except KernelRefusedError as error:
        # Not the error itself, which holds the frames that it went through.
        return _refusing(str(error), error.backend or backend, error.said)


@lru_cache(maxsize=32)
def _imported(backend: str) -> Run:
    name = name_of(backend)
    try:
        return cast("Run", import_module(name).run)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        required = f"attnroute/executors/packages/{backend}.py, which runs it"
        raise TableError(f"any/{backend}.toml requires {required}; got none; ban {backend}.") from error


def _refusing(message: str, backend: str, said: str) -> Run:
    def refuse(*_: object) -> NoReturn:
        raise KernelRefusedError(message, backend, said)

    return refuse
