"""Which module makes a call: read from the frames of Python and from dynamo's graph, without hooks.

Hooks of modules would be seen by torch.compile, which warns of them. Frames cost nothing until they are read.
"""

from __future__ import annotations

import re
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.nn import Module

from attnroute.memory import Memory

if TYPE_CHECKING:
    from types import FrameType

_KEPT: Final = 65536
_WRAPPERS: Final = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
"""Attributes in which wrappers of torch hold the module that a user wrote."""
_ROOT: Final = re.compile(r"^[LG](\[[^\]]+\])+")
"""How dynamo begins the path of a module: with a variable of the frame."""


class Where(NamedTuple):
    """A module: the class of the outermost one that was called, and the path inside of that."""

    model: str = ""
    module: str = ""


class _Named(NamedTuple):
    module: weakref.ref[Module]
    where: Where


NOWHERE: Final = Where()
_NAMES: Memory[int, _Named] = Memory(
    _KEPT, f"{__name__}._NAMES", "when a module dies, whose number another may get: it is compared"
)


def where_called() -> Where:
    """Return the innermost module whose code calls this."""
    frame: FrameType | None = sys._getframe(1)
    inside: list[Module] = []
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            found = frame.f_locals.get("self")
            if isinstance(found, Module) and not (inside and inside[-1] is found):
                inside.append(found)
                # A recompute runs without the modules around it, which its forward had.
                if len(inside) == 1 and (known := _known(found)) is not None:
                    return known
        frame = frame.f_back
    return _named(inside) if inside else NOWHERE


def where_traced() -> Where | None:
    """Return the module of a call that dynamo traces; None where the call was told of before.

    What is behind dynamo runs each call of a graph again, several times.
    """
    guards = sys.modules.get("torch._guards")
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if guards is None or dynamo is None or guards.TracingContext.try_get() is None:
        return where_called()
    node = dynamo.get_current_node() if hasattr(dynamo, "get_current_node") else None
    if node is None:
        return None
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    outer = where_called()
    if not stack:
        return outer
    (path, _), (_, outermost) = stack[-1], stack[0]
    inner = _ROOT.sub("", path).lstrip(".")
    return Where(
        outer.model or getattr(outermost, "__name__", ""),
        ".".join(part for part in (outer.module, inner) if part),
    )


def _known(module: Module) -> Where | None:
    named = _NAMES.get(id(module))
    return named.where if named is not None and named.module() is module else None


def _named(inside: list[Module]) -> Where:
    """Name the modules of the outermost one that has the innermost among its own."""
    for root in reversed(inside):
        model = type(getattr(root, "_orig_mod", root)).__name__
        for path, module in root.named_modules():
            if _known(module) is None:
                where = Where(model, _WRAPPERS.sub("", path).lstrip("."))
                _NAMES.put(id(module), _Named(weakref.ref(module), where))
        if (known := _known(inside[0])) is not None:
            return known
    return NOWHERE
