"""What functions of a release take, read from its source: nothing of it is imported."""

from __future__ import annotations

import ast
import json
import re
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_POSITIONAL: Final = Parameter.POSITIONAL_OR_KEYWORD.name
_NAMED: Final = Parameter.KEYWORD_ONLY.name
_SCHEMA: Final = re.compile(r"(\w+)\((.*)\) -> ")

Parameters = list[list[str | bool]]
"""Of each parameter its name, its kind and whether it has a default."""


def of_source(text: str, names: Iterable[str]) -> dict[str, Parameters]:
    """Return what functions take that a module defines, or operators that it declares to torch by a schema.

    Args:
        text: The source of the module.
        names: Which of them.

    Raises:
        KeyError: The module does not have one of them.
    """
    tree = ast.parse(text)
    found = {node.name: _of_arguments(node.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            schema = _SCHEMA.match(node.value)
            if schema:
                found.setdefault(schema[1], _of_schema(schema[2]))
    return {name: found[name] for name in names}


def _of_arguments(args: ast.arguments) -> Parameters:
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    kinds = [Parameter.POSITIONAL_ONLY.name] * len(args.posonlyargs) + [_POSITIONAL] * len(args.args)
    found: Parameters = [
        [a.arg, kind, n >= required] for n, (a, kind) in enumerate(zip(positional, kinds, strict=True))
    ]
    found += [[args.vararg.arg, Parameter.VAR_POSITIONAL.name, False]] if args.vararg else []
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [[a.arg, _NAMED, default is not None] for a, default in pairs]
    return found + ([[args.kwarg.arg, Parameter.VAR_KEYWORD.name, False]] if args.kwarg else [])


def _of_schema(arguments: str) -> Parameters:
    before, _, after = arguments.partition("*, ")
    return [
        [one.split()[1].partition("=")[0], kind, "=" in one]
        for part, kind in ((before, _POSITIONAL), (after, _NAMED))
        for one in part.split(", ")
        if one
    ]


def names_in(file: Path) -> list[str]:
    """Return the functions that the newest release of a record has."""
    return list(json.loads(file.read_text(encoding="utf-8"))[-1]["functions"])


def add(file: Path, release: str, functions: dict[str, Parameters]) -> bool:
    """Write a release to a record, beside releases whose functions take the same.

    Args:
        file: The record.
        release: The release.
        functions: What its functions take.

    Returns:
        Whether another release takes the same.
    """
    groups: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    others = [{**group, "releases": [r for r in group["releases"] if r != release]} for group in groups]
    kept = [group for group in others if group["releases"]]
    same = next((group for group in kept if group["functions"] == functions), None)
    if same is None:
        kept.append({"releases": [release], "functions": functions})
    else:
        place = next((g["releases"].index(release) for g in groups if release in g["releases"]), None)
        same["releases"].insert(len(same["releases"]) if place is None else place, release)
    text = json.dumps(kept, indent=1)
    text = re.sub(r'\[\s+("\w+"),\s+("\w+"),\s+(true|false)\s+\]', r"[\1, \2, \3]", text)
    file.write_text(text + "\n", encoding="utf-8")
    return same is not None
