"""Import the module that a backend's table names, and return what it offers: an `Executor`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

from attnroute.errors import KernelRefusedError, TableError
from attnroute.executors.launch import before_launch
from attnroute.executors.protocol import Executor
from attnroute.memory import INSTALLED, cached


def executor(backend: str, module: str) -> Executor:
    """Return the executor of a backend.

    Where the module cannot be imported because something in it fails, the executor that is returned refuses
    each call, so that the next backend runs it. The next route tries again.

    Args:
        backend: Its name.
        module: The module that `[backend]` of its table names.

    Raises:
        TableError: There is no such module, or it has no `Executor`.
    """
    try:
        with before_launch(backend):
            return _imported(backend, module)
    except KernelRefusedError as error:
        # Not the error itself, which holds the frames that it went through.
        return _refusing(str(error), error.backend or backend, error.said)


def is_imported(module: str) -> bool:
    """Return whether the module of a backend was imported in this process."""
    return module in sys.modules


@cached(64, INSTALLED)
def _imported(backend: str, module: str) -> Executor:
    where = f"any/{backend}.toml: backend.module"
    try:
        found = getattr(import_module(module), "executor", None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        sentence = f"requires a module that can be imported; got {module}, and there is no {error.name}"
        raise TableError(f"{where} {sentence}; correct it, or ban {backend}.") from error
    if not isinstance(found, Executor):
        got = "nothing of that name" if found is None else f"one of type {type(found).__name__}"
        sentence = f"requires a module with an Executor under the name executor; got {got}"
        raise TableError(f"{where} {sentence} in {module}; define it, or ban {backend}.")
    return found


def _refusing(message: str, backend: str, reason: str) -> Executor:
    def refuse(*_: object) -> NoReturn:
        raise KernelRefusedError(message, backend, reason)

    return Executor(refuse)
