"""Check that what is reported of a kernel is said, or denied, of every backend that runs this kernel.

A kernel is reached in several ways: cuDNN's through torch, through NVIDIA's frontend and through
TransformerEngine. What somebody reports of one of them holds for the others too, unless the row says why not.
On CPUs backends run kernels of their own, so only architectures of CUDA devices are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attnroute.question.host import device_of
from attnroute.tables.folders import ANY, Tables
from attnroute.tables.problem import Problem, problem_of

if TYPE_CHECKING:
    from attnroute.tables.rows import RuleRow


def siblings(tables: Tables) -> Iterator[Problem]:
    """Give reports that a backend with the same kernel lacks, and denials that deny nothing."""
    kin = {name: _kin(tables, name) for name in tables.backends}
    for name, info in tables.backends.items():
        if info.kernels and not kin[name]:
            sentence = f"requires a kernel that another backend runs too; got {', '.join(info.kernels)}."
            yield Problem(f"{ANY}/{name}.toml", "", "backend.kernels", sentence)
    rows, about = _rows(tables)
    cited: dict[str, set[str]] = defaultdict(set)
    for row in rows.values():
        for issue in _issues(row):
            cited[issue] |= about[row.id]
    for row in rows.values():
        others = set().union(*(kin[name] for name in about[row.id])) - about[row.id]
        yield from _lost(row, others, cited)
        yield from _idle(row, others, cited)


def _kin(tables: Tables, backend: str) -> set[str]:
    """Return the other backends that run one of a backend's kernels."""
    kernels = set(tables.backends[backend].kernels)
    return {name for name, info in tables.backends.items() if kernels & set(info.kernels)} - {backend}


def _rows(tables: Tables) -> tuple[dict[str, RuleRow], dict[str, set[str]]]:
    """Return every row by its id, and the backends that it holds for."""
    rows: dict[str, RuleRow] = {}
    about: dict[str, set[str]] = defaultdict(set)
    for arch in (name for name in tables.arch_names if device_of(name) == "cuda"):
        for backend in tables.backends:
            for row in tables.rules(arch, backend) or ():
                rows[row.id] = row
                about[row.id].add(backend)
    return rows, about


def _issues(row: RuleRow) -> list[str]:
    return list(dict.fromkeys(item.ref for item in row.rule.evidence if item.kind == "issue"))


def _lost(row: RuleRow, others: set[str], cited: Mapping[str, set[str]]) -> Iterator[Problem]:
    for issue in _issues(row):
        for backend in sorted(others - cited[issue] - set(row.rule.not_for)):
            sentence = (
                f"requires a row of {backend} that cites {issue} too, as it runs the same kernel, or a "
                f"reason; got neither; add the row, or not_for.{backend} here."
            )
            yield problem_of(row, "evidence", sentence)


def _idle(row: RuleRow, others: set[str], cited: Mapping[str, set[str]]) -> Iterator[Problem]:
    for backend in row.rule.not_for:
        if backend not in others:
            known = ", ".join(sorted(others)) or "none"
            sentence = f"requires another backend that runs the same kernel ({known}); got {backend}."
            yield problem_of(row, "not_for", sentence)
        elif all(backend in cited[issue] for issue in _issues(row)):
            sentence = f"requires an issue here that no row of {backend} cites; got none; take it away."
            yield problem_of(row, "not_for", sentence)
