"""A C++ function that checks something, as Python: just enough of C++ for such functions.

Each statement becomes one of Python: declarations and assignments, `if` and `else`, the macro
`RETURN_CUDNN_FRONTEND_ERROR_IF`, and `return`. Other macros and what only declares are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, Final

from attnroute.audit.standins import StandIn

_SKIPPED: Final = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n\\]|\\[^\n]|\\\n)*|("(?:[^"\\\n]|\\.)*")', re.DOTALL | re.MULTILINE
)
_REFUSAL: Final = "RETURN_CUDNN_FRONTEND_ERROR_IF"
_MACRO: Final = re.compile(r"[A-Z][A-Z0-9_]+\s*\(")
_DECLARED: Final = re.compile(r"^(?:[\w:<>&*]+\s+)+(\w+)\s*=(?!=)")
_IN_PYTHON: Final = (
    (re.compile(r"&&"), " and "),
    (re.compile(r"\|\|"), " or "),
    (re.compile(r"!(?!=)"), " not "),
    (re.compile(r"->|::"), "."),
    (re.compile(r"\bstd\.(\w+)<[^()]*>"), r"std.\1"),
    (re.compile(r"\bnullptr\b"), "None"),
    (re.compile(r"\btrue\b"), "True"),
    (re.compile(r"\bfalse\b"), "False"),
    (re.compile(r"(?<!/)/(?!/)"), "//"),
)
_LIST: Final = re.compile(r"(\breturn|=)\s*$")
_STRING: Final = re.compile(r'("(?:[^"\\\n]|\\.)*")')


class Function:
    """A function of a header that checks something, whose names mean in each call what the caller says."""

    def __init__(self, text: str, declaration: str) -> None:
        """Read it.

        Args:
            text: The header, from where the function is the first of its name.
            declaration: How its declaration begins.

        Raises:
            ValueError: The header has no such function.
            SyntaxError: It has statements that are not known here.
        """
        clean = _SKIPPED.sub(lambda found: found[1] or " ", text)
        start = clean.find(declaration)
        if start < 0:
            msg = f"a header requires {declaration}; got one without; look where it went."
            raise ValueError(msg)
        lines = [f"{' ' * depth}{line}" for depth, line in _lines(clean[clean.index("{", start) :])]
        source = "\n".join(["def check():", *lines, ' return ""'])
        tree = ast.parse(source, declaration)
        loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self._names: dict[str, Any] = {name: StandIn(name) for name in loaded}
        exec(compile(tree, declaration, "exec"), self._names)  # noqa: S102 - the checks of one release
        self._code = self._names.pop("check").__code__

    def __call__(self, names: Mapping[str, object]) -> str:
        """Return why it refuses, "" where it does not; names that are not given are stand-ins."""
        said: str = FunctionType(self._code, {**self._names, **names})()
        return said


def _lines(body: str) -> Iterator[tuple[int, str]]:
    """Give the statements of a body that begins with its brace, with their depth, up to its last brace."""
    depth = 0
    for piece in _pieces(body):
        if piece == "}":
            depth -= 1
            if not depth:
                return
        elif piece.endswith("{"):
            if depth:
                yield depth, _header(piece[:-1].strip())
            depth += 1
            yield depth, "pass"
        elif not _MACRO.match(piece) or piece.startswith(_REFUSAL):
            yield depth, _statement(piece[:-1])


def _pieces(body: str) -> Iterator[str]:
    """Cut behind semicolons and braces that stand outside of parentheses, strings and lists of values."""
    held, level, listed = "", 0, 0
    for part in _STRING.split(body):
        for letter in [part] if part.startswith('"') else part:
            level += (letter in "([") - (letter in ")]")
            if letter == "{":
                listed += listed > 0 or level > 0 or _LIST.search(held) is not None
            if level or listed or letter not in ";{}":
                held += letter
            else:
                yield " ".join(f"{held}{letter}".split())
                held = ""
            listed -= letter == "}" and listed > 0


def _header(head: str) -> str:
    """Return what opens a block in Python; a bare one is a block that is always entered."""
    word = {"": "if", "if": "if", "else": "else", "else if": "elif"}[head.partition("(")[0].strip()]
    condition = _expression(head[head.index("(") :]) if "(" in head else "True"
    return "else:" if word == "else" else f"{word} {condition}:"


def _statement(text: str) -> str:
    if text.startswith(_REFUSAL):
        condition, _, message = _arguments(text[len(_REFUSAL) :].strip()[1:-1])
        return f"if ({_expression(condition)}): return {_expression(message)}"
    if text.startswith("return {"):
        code, message = _arguments(text.removeprefix("return {").removesuffix("}"))
        return f"return {_expression(message)} or {_expression(code)!r}" if "OK" not in code else 'return ""'
    return _expression(_DECLARED.sub(r"\1 =", text))


def _arguments(text: str) -> list[str]:
    """Split at commas outside of parentheses and strings."""
    found, level = [""], 0
    for part in _STRING.split(text):
        for letter in [part] if part.startswith('"') else part:
            level += (letter in "([{") - (letter in ")]}")
            if letter == "," and not level:
                found.append("")
            else:
                found[-1] += letter
    return found


def _expression(text: str) -> str:
    """Return an expression in Python, which has no pointers, and other words for what is logical."""
    return "".join(part if part.startswith('"') else _words(part) for part in _STRING.split(text)).strip()


def _words(text: str) -> str:
    for pattern, word in _IN_PYTHON:
        text = pattern.sub(word, text)
    return text
