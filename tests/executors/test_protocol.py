"""Every backend's module offers what its table says of it, and no module offers more."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import attnroute.executors
from attnroute.executors import registry
from attnroute.executors.protocol import Executor
from attnroute.tables.load import load

ROOT = Path(attnroute.executors.__path__[0])
BACKENDS = load().backends
LOG_SUM_EXP = {"sink_from_lse", "backward_from_chunked"}
"""Repairs that run a kernel's two directions apart."""


def repairs_of(backend):
    tables = load()
    for arch in ("any", *tables.arch_names):
        yield from (answer.repair for answer in tables.answers(arch, backend).values())
        yield from (row.rule.repair for row in tables.rules(arch, backend) or ())


def goes_round(backend):
    tables = load()
    answers = (tables.answers(arch, backend).get("ring") for arch in ("any", *tables.arch_names))
    return any(answer is not None and answer.value is True for answer in answers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_runs_and_has_the_directions_that_its_repairs_need(backend):
    found = registry.executor(backend, BACKENDS[backend].module)
    assert isinstance(found, Executor)
    assert (found.pair is not None) is (
        goes_round(backend) or not LOG_SUM_EXP.isdisjoint(repairs_of(backend))
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_tells_how_long_it_compiled_compiles(backend):
    found = registry.executor(backend, BACKENDS[backend].module)
    assert found.compiled_seconds is None or BACKENDS[backend].first_call_seconds is not None


def test_every_executor_is_that_of_a_backend():
    paths = (path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("[a-z]*.py"))
    modules = [".".join(("attnroute.executors", *path.parts)) for path in paths if "triton" not in path.stem]
    found = {name for name in modules if isinstance(getattr(import_module(name), "executor", None), Executor)}
    assert {info.module for info in BACKENDS.values()} == found
