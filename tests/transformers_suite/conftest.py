"""Leaves out the tests that `excluded.toml` lists; prints how many were left out or skipped, and why."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

EXCLUDED = tomllib.loads((Path(__file__).parent / "excluded.toml").read_text(encoding="utf-8"))["excluded"]
COUNTS = pytest.StashKey[list[int]]()
MODEL = re.compile(r"<class '[\w.]+'>|\b[A-Z]\w*(?:Model|LM|For[A-Z]\w+)\b")
"""Names of model classes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts = config.stash[COUNTS] = [0] * len(EXCLUDED)
    chosen, left_out = [], []
    for item in items:
        entry = _entry_of(item)
        (chosen if entry is None else left_out).append(item)
        if entry is not None:
            counts[entry] += 1
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


def _entry_of(item: pytest.Item) -> int | None:
    """Return the number of the entry that leaves a test out."""
    family, name = item.nodeid.split("::")[-2].removeprefix("Test_"), item.name
    for number, entry in enumerate(EXCLUDED):
        if family in entry.get("families", [family]) and any(fnmatch(name, p) for p in entry["tests"]):
            return number
    return None


def _reason_of(report: pytest.TestReport) -> str:
    """Return why a test was skipped, the same text for every model."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return MODEL.sub("the model", said.removeprefix("Skipped: "))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = Counter(_reason_of(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section(f"skipped by transformers: {sum(reasons.values())}")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:>4}  {reason}")
    counts = config.stash.get(COUNTS, [])
    terminalreporter.section(f"excluded: {sum(counts)}")
    for count, entry in zip(counts, EXCLUDED, strict=False):
        families = ", ".join(entry.get("families", ["all families"]))
        terminalreporter.line(f"{count:>4}  {', '.join(entry['tests'])} ({families}): {entry['because']}")
