"""Deal with packages of other people: find their modules without importing them, sum up what they raise."""

from __future__ import annotations

import signal
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType

_LONGEST: Final = 300
"""Characters of an error that are kept: some list every path that they tried."""


def is_of_the_user(error: BaseException) -> bool:
    """Return whether an error is no fault of the package that ran: an interrupt, or a signal's exit.

    `SystemExit` and other classes beside `Exception` are faults else: scripts that were installed as modules
    exit when they are imported, and a panic of Rust is no `Exception`.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = _handlers()
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in handlers:
            return True
        step = step.tb_next
    return False


def _handlers() -> set[CodeType]:
    """Return the code of the functions that answer signals, which run in the middle of anything."""
    found = (getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals())
    return {code for code in found if code is not None}


def summarize_error(error: BaseException) -> str:
    """Return an error in one clause: its class and the first line of its text."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the text of an error is code of the package too
        text = ""
    return f"{type(error).__name__}: {text}".partition("\n")[0].rstrip(": ")[:_LONGEST]


def locate(module: str) -> ModuleSpec | None:
    """Find a module as an import would, importing neither it nor the packages around it.

    Args:
        module: Its dotted name.

    Returns:
        Its spec, None where an import would not find it.
    """
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
        places = _inside(spec)
        for part in rest:
            spec = PathFinder.find_spec(part, places)
            places = _inside(spec, part, places)
    except BaseException as error:
        # An entry of sys.modules without a spec, or a finder of another package that fails, as it likes.
        if is_of_the_user(error):
            raise
        return None
    return spec


def _inside(spec: ModuleSpec | None, part: str = "", around: list[str] | None = None) -> list[str]:
    """Return the folders in which the modules of a package are."""
    if spec is None or spec.submodule_search_locations is None:
        return []
    if around and spec.loader is None:
        # A namespace package asks its parent where it is, and that one is not imported.
        return [place for folder in around if Path(place := str(Path(folder, part))).is_dir()]
    return list(spec.submodule_search_locations)
