"""Run the Python of a package without what it imports: modules of other packages are stand-ins.

A stand-in takes every attribute, call and operation and gives another stand-in. What it does not give is a
decision: a program that branches on one raises `_UndecidedError`, so that no check passes by accident.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import linecache
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

UNDECIDED: Final = "undecided: "
_OF_THE_PROGRAM: Final = (AssertionError, UnboundLocalError, ZeroDivisionError)
_GIVEN: Final[dict[str, object]] = {}
"""What is decided in this process, by dotted name. It belongs to `install` and is read by every stand-in."""


class _UndecidedError(Exception):
    """The program asked a stand-in for a truth or a number."""


def _named(owner: str, name: str) -> Any:
    """Return what is decided about a name of a stand-in, or a stand-in; Python's own names are not had."""
    full = f"{owner}.{name}"
    if full not in _GIVEN and name.startswith("__"):
        raise AttributeError(name)
    return _GIVEN[full] if full in _GIVEN else StandIn(full)


class _Derived(type):
    """The type of classes that derive from a stand-in: what they do not define is one."""

    def __getattr__(cls, name: str) -> Any:
        return _named(cls.__name__, name)


class _Base(metaclass=_Derived):
    """The base of such classes."""


class StandIn:
    """Takes everything and decides nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = _named(self._name, name)
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a stand-in; as a decorator, what it decorates."""
        is_decorator = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
        return args[0] if is_decorator else StandIn(f"{self._name}()")

    def __getitem__(self, key: object) -> Any:
        return StandIn(f"{self._name}[{key!r}]")

    def __setitem__(self, key: object, value: object) -> None:
        """Forget it."""

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (_Base,)

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        """Let errors through."""

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and other._name == self._name

    def _combined(self, *_: object) -> Any:
        return StandIn(f"a result of {self._name}")

    def _undecided(self, *_: object) -> NoReturn:
        raise _UndecidedError(self._name)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _combined
    __floordiv__ = __rfloordiv__ = __mod__ = __neg__ = __or__ = __ror__ = __and__ = __rand__ = _combined
    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = _undecided
    __lt__ = __le__ = __gt__ = __ge__ = _undecided


class Module(types.ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012 - every module of them is a package, with nothing in its folder

    def __getattr__(self, name: str) -> Any:
        found = _named(self.__name__, name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is neither in the standard library nor in the package under test."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return the spec of a stand-in."""
        root = name.partition(".")[0]
        if root in {self._package, "attnroute"} or (root in sys.stdlib_module_names and root != "distutils"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a stand-in."""
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install(folder: Path, package: str, given: Mapping[str, object]) -> None:
    """Let this process import one package from a folder, and stand-ins for all others.

    Only for a process that does nothing else.

    Args:
        folder: Where the package lies, or its wheel.
        package: Its top module.
        given: By dotted name, what is decided: `{"torch.is_tensor": ...}`.
    """
    _GIVEN.update(given)
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, _Finder(package))


def problem_of(error: Exception) -> str:
    """Return why the program refuses, and "undecided: ..." where it did not come to refuse anything.

    A refusal is an assertion or a `raise` of the program itself, or an error that no stand-in can cause; all
    else is a stand-in that fell short.
    """
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    assert step is not None
    code = step.tb_frame.f_code
    line = linecache.getline(code.co_filename, step.tb_lineno).strip()
    what = str(error).partition("\n")[0] or line
    said = f"{Path(code.co_filename).name} {code.co_name}: {type(error).__name__}: {what}".rstrip()
    is_of_the_program = isinstance(error, _OF_THE_PROGRAM) or line.startswith("raise ")
    is_ours = Path(code.co_filename).parent == Path(__file__).parent
    return said if is_of_the_program and not is_ours else f"{UNDECIDED}{said}"


def answer_all(answer: Callable[[dict[str, Any]], str]) -> None:
    """Answer questions, a line of JSON each, until there are no more."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
