"""Find the tensors that a function reads, so that what was made from it is made anew when one changes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, Final

from attnroute.masks.checks import is_tensor
from attnroute.memory import cached

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN: Final = (type, str, bytes, int, float, complex, type(None))
_LIBRARIES: Final = frozenset({"attnroute", "builtins", "functools", "math", "numpy", "operator", "torch"})
"""Packages whose globals hold none of the caller's tensors; what their functions close over is searched."""
_OF_MODULES: Final = ("_parameters", "_buffers", "_modules")
"""Where a module of torch holds what reads like its attributes."""


def captured_tensors(function: object) -> tuple[Tensor, ...]:
    """Return the tensors that a function reads, each once, in the order in which they are found.

    Searched are closures, defaults, `functools.partial`, the function's object where it is a method or can be
    called, functions that it calls, and globals; of objects and modules only the attributes that the code
    names. A tensor that is reached in another way (a computed attribute name, for one) is not found.

    Args:
        function: Anything that can be called; other values read nothing.
    """
    search = _Search()
    search.visit(function, frozenset())
    return tuple(search.found.values())


class _Search:
    """One walk; what was visited under the same names is not visited again."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}
        self._visited: set[tuple[int, frozenset[str]]] = set()

    def visit(self, value: Any, names: frozenset[str]) -> None:
        """Search a value that code reaches which reads the attributes `names`."""
        if isinstance(value, _PLAIN):
            return
        if is_tensor(value):
            self.found.setdefault(id(value), value)
            return
        if (id(value), names) in self._visited:
            return
        self._visited.add((id(value), names))
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, MethodType):
            self._visit_method(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._visit_each((value.func, *value.args, *value.keywords.values()), names)
        elif isinstance(value, Mapping):
            self._visit_each(value.values(), names)
        elif isinstance(value, list | tuple | set | frozenset):
            self._visit_each(value, names)
        elif isinstance(value, BuiltinMethodType | MethodWrapperType):
            self.visit(value.__self__, names)
        elif isinstance(value, ModuleType):
            self._visit_module(value, names)
        else:
            self._visit_object(value, names)

    def _visit_each(self, values: Iterable[object], names: frozenset[str]) -> None:
        for value in values:
            self.visit(value, names)

    def _visit_function(self, function: FunctionType) -> None:
        names = _names(function.__code__)
        self._visit_each(map(_contents, function.__closure__ or ()), names)
        self._visit_each(function.__defaults__ or (), names)
        self._visit_each((function.__kwdefaults__ or {}).values(), names)
        scope = function.__globals__
        if _is_library(scope.get("__name__")):
            return
        self._visit_each([scope[name] for name in sorted(names) if name in scope], names)

    def _visit_method(self, function: Any, owner: object) -> None:
        """A method reads the attributes of its object that its own code names."""
        self.visit(function, frozenset())
        code = getattr(function, "__code__", None)
        if code is not None and not _is_inherited(function, owner):
            self.visit(owner, _names(code))

    def _visit_module(self, module: ModuleType, names: frozenset[str]) -> None:
        if not _is_library(module.__name__):
            held = vars(module)
            self._visit_each([held[name] for name in sorted(names) if name in held], names)

    def _visit_object(self, value: object, names: frozenset[str]) -> None:
        """An object is taken to be called where the code names none of its attributes."""
        self.visit(_attribute(value, "__wrapped__"), names)
        found = {name: _attribute(value, name) for name in sorted(names)}
        if all(attribute is None or _is_inherited(attribute, value) for attribute in found.values()):
            called = "forward" if "_modules" in getattr(value, "__dict__", ()) else "__call__"
            found[called] = _attribute(value, called)
        for attribute in found.values():
            if isinstance(attribute, FunctionType):
                self._visit_method(attribute, value)
            else:
                self.visit(attribute, names)


def _contents(cell: CellType) -> object:
    """Return what a cell holds, None while its name is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attribute(value: object, name: str) -> object:
    """Return an attribute without running code of the object, None where it has none."""
    held = getattr(value, "__dict__", {})
    for place in (held, *(held[part] for part in _OF_MODULES if part in held)):
        if name in place:
            return place[name]
    found = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    if isinstance(found, MemberDescriptorType):
        return getattr(value, name, None)
    if isinstance(found, property):
        return found.fget
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


@cached(1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that code and the functions inside it name."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_inherited(attribute: object, owner: object) -> bool:
    """Return whether a class of the caller has a method from a library, like all that `torch.nn.Module` does.

    Such a method reads nothing that the caller's own code does not name.
    """
    by_library = isinstance(attribute, FunctionType) and _is_library(attribute.__module__)
    return by_library and not _is_library(type(owner).__module__)


def _is_library(name: object) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES
