"""What named calls get on recorded machines, as short lines: a changed row, cost or preference shows here.

`tests/hosts/probed` has machines that were probed, `assumed` those that nobody here has, each a file for
`--host`; beside each stands what is decided there. After an intended change write them all anew with
`GOLDEN_UPDATE=1 python -m pytest tests/test_hosts.py` and read the difference.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from support.golden_files import check

from attnroute.engine.decide import decide
from attnroute.engine.stock import predict
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.tables.load import load

FOLDER = Path(__file__).parent / "hosts"
MACHINES = sorted(FOLDER.glob("*/*.json"))
GROUPS = tomllib.loads((FOLDER / "calls.toml").read_text(encoding="utf-8"))
CALLS = {name: line for group in GROUPS.values() for name, line in group.items()}
RESULTS = FOLDER.parents[1] / "benchmarks" / "results"


def explained(line, host):
    """Return the order, with preparations, and why each other backend is none of it."""
    call = parse(line)
    decision = decide(call, host)
    told = [f"order      {', '.join(candidate(decision.verdict(b)) for b in decision.order) or 'none'}"]
    told.append(f"stock      {predict(call, host, load()).backend or 'cannot say it'}")
    absent = []
    for verdict in (v for v in decision.verdicts if v.backend not in decision.order):
        if verdict.blocking:
            rows = ", ".join(dict.fromkeys(f.rule for f in verdict.blocking))
            told.append(f"{verdict.backend:<10} {verdict.status}: {rows}")
        else:
            absent.append(candidate(verdict))
    return "\n".join([*told, *([f"absent     {', '.join(absent)}"] if absent else [])])


def candidate(verdict):
    return " + ".join([verdict.backend, *verdict.repairs])


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_what_calls_get_on_a_machine(path):
    host = Host.from_file(path)
    parts = [f"{name}: {line}\n{explained(line, host)}\n" for name, line in CALLS.items()]
    check(path.stem, "\n".join(parts), path.parent)


def test_forty_calls_are_named_in_canonical_form():
    assert len(CALLS) == 40
    assert {name: render(parse(line)) for name, line in CALLS.items()} == CALLS


def test_every_explanation_belongs_to_a_machine():
    assert {path.with_suffix("") for path in FOLDER.glob("*/*.txt")} == {p.with_suffix("") for p in MACHINES}


@pytest.mark.parametrize(
    ("name", "result"),
    [("h100-packages", "h100-torch2.11-backends-2"), ("h200-packages", "h200-torch2.11-grid")],
)
def test_a_probed_machine_is_the_one_that_was_measured(name, result):
    recorded = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
    environment = recorded["environment"]
    packages = recorded.get("packages") or environment["packages"]
    host = Host.from_file(FOLDER / "probed" / f"{name}.json")
    assert host.device_name == environment["card"]
    assert host.versions == {"torch": environment["torch"], "cuda": "13.0", "cudnn": "9.19.0", **packages}
    alone = Host.from_file(FOLDER / "probed" / f"{name.partition('-')[0]}.json")
    assert alone.versions.items() <= host.versions.items()
    assert set(alone.versions) == {"torch", "cuda", "cudnn", "triton"}
