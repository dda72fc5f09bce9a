"""`attnroute tables record`: the data of a new release, for a checkout of attnroute.

A record holds facts about a release, never its code: what its functions take, which head dims its check
accepts, what a wheel of torch brings along.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attnroute.audit import packages, recordings, signatures
from attnroute.errors import ArgumentError, PackageError
from attnroute.tables.read import shipped_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from packaging.requirements import Requirement

_SIGNATURES: Final = "tests/executors/data/signatures"
_VALIDATOR: Final = "tests/tables/data/fa4_validator.json.gz"
_CHECK: Final = "_validate_head_dims"


class Source(NamedTuple):
    """Where the functions stand that an executor calls: a distribution, and a file in its wheel."""

    package: str
    file: str


SOURCES: Final = {
    "cudnn-frontend": Source("nvidia-cudnn-frontend", "cudnn/sdpa/fwd/torch_op.py"),
    "fa4": Source("flash-attn-4", "flash_attn/cute/interface.py"),
    "te": Source("transformer-engine", "transformer_engine/pytorch/cpp_extensions/fused_attn.py"),
}


def record(name: str, version: str) -> list[str]:
    """Write the data of a release into the checkout that this package is imported from.

    Args:
        name: One of `SOURCES`.
        version: The release.

    Returns:
        What was written, a sentence each.

    Raises:
        ArgumentError: This is no checkout, or the release has no such function.
        PackageError: pip cannot give the release.
    """
    source = SOURCES[name]
    file = f"{_SIGNATURES}/{source.package}.json"
    path = shipped_folder().parent / file
    if not path.is_file():
        raise ArgumentError(f"record requires a checkout of attnroute; got no {path}; run it there.")
    with zipfile.ZipFile(packages.wheel(source.package, version)) as archive:
        text = archive.read(source.file).decode("utf-8")
    try:
        functions = signatures.of_source(text, signatures.names_in(path))
    except KeyError as error:
        msg = f"record requires {error} in {source.file}; got a release without; look where it went."
        raise ArgumentError(msg) from error
    same = signatures.add(path, version, functions)
    known = "take what those of another release take" if same else "take something new: look at the executor"
    done = [f"{file}: its functions {known}"]
    return done + ([_record_check(text, version)] if name == "fa4" else [])


def _record_check(text: str, version: str) -> str:
    """Ask the release's check of head dims about every pair, and write what it accepts."""
    path = shipped_folder().parent / _VALIDATOR
    recorded: dict[str, Any] = json.loads(recordings.read(path))
    sets = {name: [[qk, list(v)] for qk, v in rows] for name, rows in recorded["sets"].items()}
    check, release = _cut(text), version.removeprefix("4.0.0")
    answers: dict[str, str] | None = None
    if check is not None:
        keys = next(found for found in recorded["releases"].values() if found)
        answers = {key: _name_of(_accepted(check, key, recorded["grid"]), sets) for key in keys}
    new = {**recorded, "releases": {**recorded["releases"], release: answers}, "sets": sets}
    recordings.write(path, json.dumps(new))
    added = sorted(sets.keys() - recorded["sets"].keys())
    said = "accepts pairs that no release before accepted: look at the rows named validator-"
    return f"{_VALIDATOR}: its check of head dims {said if added else 'accepts what an earlier one accepts'}"


def _accepted(check: Callable[..., None], key: str, grid: list[int]) -> list[list[Any]]:
    """Return, for each head dim of keys, those of values that go with it on a major and alignment."""
    numbers = [int(part) for part in key.split("/")]
    rows = [[qk, [v for v in grid if _takes(check, qk, v, *numbers)]] for qk in grid]
    return [row for row in rows if row[1]]


def _name_of(rows: list[list[Any]], sets: dict[str, list[list[Any]]]) -> str:
    """Return the name of a set of pairs, which gets one where it is new."""
    for name, known in sets.items():
        if known == rows:
            return name
    name = f"set{len(sets)}"
    sets[name] = rows
    return name


def _cut(text: str) -> Callable[..., None] | None:
    """Return the check alone, None where a release has none."""
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    found = next((node for node in functions if node.name == _CHECK), None)
    if found is None:
        return None
    found.decorator_list = []
    names: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), _CHECK, "exec"), names)  # noqa: S102 - one function of the release
    check: Callable[..., None] = names[_CHECK]
    return check


def _takes(check: Callable[..., None], *numbers: int) -> bool:
    try:
        check(*numbers)
    except AssertionError:
        return False
    return True


def companions(version: str) -> str:
    """Return the lines of `releases.toml` about a release of torch, from the metadata of its wheel.

    Raises:
        PackageError: pip cannot give it, or the wheel names no CUDA, cuDNN or Triton, as one for the CPU.
    """
    needs = packages.metadata("torch", version)
    cudnn = _pin(needs, r"nvidia-cudnn-cu\d+")
    cuda = _pin(needs, r"cuda-toolkit|nvidia-cuda-runtime-cu\d+")
    triton = _pin(needs, "triton")
    if cudnn is None or cuda is None or triton is None:
        msg = f"record torch requires a wheel for CUDA; got torch {version} for the CPU; set another index."
        raise PackageError(msg)
    short = [
        ".".join(text.split(".")[:parts]) for text, parts in ((cuda[1], 2), (cudnn[1], 3), (triton[1], 3))
    ]
    ref = f"metadata of the PyPI wheel: {cudnn[0]} {cudnn[1]}, {triton[0]} {triton[1]}"
    return "\n".join(
        [
            "[[release]]",
            f'torch = ["{version}"]',
            *(f'{name} = "{text}"' for name, text in zip(("cuda", "cudnn", "triton"), short, strict=True)),
            f'evidence = [{{ kind = "source", ref = "{ref}" }}]',
        ]
    )


def _pin(needs: list[Requirement], pattern: str) -> tuple[str, str] | None:
    """Return the distribution of a name that is needed, and the version it is pinned to."""
    for need in needs:
        versions = [term.version for term in need.specifier if term.operator in ("==", "~=")]
        if re.fullmatch(pattern, need.name) and versions:
            return need.name, versions[0]
    return None
