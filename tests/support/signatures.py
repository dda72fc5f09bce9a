"""Signatures of other packages' functions, recorded from their releases to hold calls against them.

To record, with wheels or sdists at hand (nothing is imported from them):

    python tests/executors/signatures.py RECORD.json PATH/IN/PACKAGE.py FUNCTION[,FUNCTION] ARCHIVE...

A function is one that the file defines, or an operator that it declares to torch by its schema.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
import zipfile
from inspect import Parameter, Signature
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "executors" / "data" / "signatures"
_POSITIONAL, _NAMED = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY


def recorded(package):
    """Return {release: {function: Signature}}."""
    groups = json.loads((FOLDER / f"{package}.json").read_text())
    return {
        release: {name: _signature(parameters) for name, parameters in group["functions"].items()}
        for group in groups
        for release in group["releases"]
    }


def _signature(parameters):
    return Signature(
        Parameter(name, getattr(Parameter, kind), default=None if has_default else Parameter.empty)
        for name, kind, has_default in parameters
    )


def of_source(text, names):
    """Return {function: [[parameter, kind, has a default]]} of what a module defines or declares."""
    tree = ast.parse(text)
    found = {n.name: _of_arguments(n.args) for n in tree.body if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            schema = re.match(r"(\w+)\((.*)\) -> ", node.value)
            if schema:
                found.setdefault(schema[1], _of_schema(schema[2]))
    return {name: found[name] for name in names}


def _of_arguments(args):
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    kinds = ["POSITIONAL_ONLY"] * len(args.posonlyargs) + [_POSITIONAL.name] * len(args.args)
    found = [[a.arg, kind, n >= required] for n, (a, kind) in enumerate(zip(positional, kinds, strict=True))]
    found += [[args.vararg.arg, "VAR_POSITIONAL", False]] if args.vararg else []
    found += [
        [a.arg, _NAMED.name, d is not None] for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return found + ([[args.kwarg.arg, "VAR_KEYWORD", False]] if args.kwarg else [])


def _of_schema(arguments):
    before, _, after = arguments.partition("*, ")
    return [
        [one.split()[1].partition("=")[0], kind.name, "=" in one]
        for part, kind in ((before, _POSITIONAL), (after, _NAMED))
        for one in part.split(", ")
        if one
    ]


def _read(archive, path):
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(path).decode()
    with tarfile.open(archive) as sdist:
        (member,) = (m for m in sdist if m.name.partition("/")[2] == path)
        return sdist.extractfile(member).read().decode()


def record(target, path, names, archives):
    """Write what the archives' functions take, releases that agree together."""
    groups = []
    for archive in archives:
        release = archive.name.removesuffix(".tar.gz").split("-")[1]
        functions = of_source(_read(archive, path), names)
        same = next((g for g in groups if g["functions"] == functions), None)
        if same is None:
            groups.append({"releases": [release], "functions": functions})
        else:
            same["releases"].append(release)
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps(groups, indent=1)
    text = re.sub(r'\[\s+("\w+"),\s+("\w+"),\s+(true|false)\s+\]', r"[\1, \2, \3]", text)
    (FOLDER / target).write_text(text + "\n")


if __name__ == "__main__":
    _, _target, _path, _names, *_archives = sys.argv
    record(_target, _path, _names.split(","), [Path(a) for a in _archives])
