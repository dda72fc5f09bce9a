"""Answer the explorer in the browser: what its form offers, and one decision as sentences and as JSON.

Pyodide runs this file on the page (worker.js); run as a script it prints what the form offers.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Final

from attnroute.cli.matrix import CALLS
from attnroute.engine.decide import decide
from attnroute.engine.decision import Decision, Verdict
from attnroute.errors import AttnRouteError
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.report import sentences
from attnroute.report.json import decision_json
from attnroute.report.pages import places
from attnroute.report.text import render_decision
from attnroute.tables.cards import DEFAULT, named
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.machines import WHEEL, machine
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import published

_ROW: Final = re.compile(r"\[([\w/-]+)\]")
_ALONG: Final = {"transformer-engine": "transformer-engine-torch"}
"""Distributions of one release in two parts."""


def choices() -> str:
    """Return as JSON what the form offers: cards by architecture, versions with the newest first, calls."""
    tables = load(None)
    cards = {arch: _cards(tables, arch) for arch in tables.arch_names}
    releases = {name: known[::-1] for name, known in published(shipped_folder()).items()}
    return json.dumps({"cards": cards, "releases": releases, "bundled": ["torch", *WHEEL], "calls": CALLS})


def _cards(tables: Tables, arch: str) -> list[str]:
    """Return the names of cards, those of variants that have numbers of their own among them."""
    numbered = [name for name in tables.arch(arch).peak if name != DEFAULT]
    others = (name for name in tables.arch(arch).cards if not name.endswith(tuple(numbered)))
    return sorted([*others, *numbered])


def answer(question: str) -> str:
    """Return the decision for a question, or the sentence that refuses it.

    Args:
        question: JSON: `arch`; `card`, the name that the driver would give it; `versions` by name, where what
            torch's wheel brings along may be left out; `line`, the call.
    """
    asked = json.loads(question)
    try:
        decision = decide(parse(asked["line"]), _host(asked), advise=True)
    except AttnRouteError as error:
        return json.dumps({"refused": str(error)})
    return json.dumps(_told(decision) | {"command": _command(decision, asked)})


def _host(asked: dict[str, Any]) -> Host:
    host = machine(asked["arch"], load(None), argument="the card", given=_versions(asked))
    return host.model_copy(update={"device_name": asked["card"]})


def _versions(asked: dict[str, Any]) -> dict[str, str]:
    versions: dict[str, str] = asked["versions"]
    return versions | {part: versions[name] for name, part in _ALONG.items() if name in versions}


def _command(decision: Decision, asked: dict[str, Any]) -> str:
    """Return what to type for the same answer in a terminal."""
    words = ["attnroute", "explain", render(decision.call), "--arch", _name(decision.host)]
    for name, version in _versions(asked).items():
        words += ["--with", f"{name}={version}"]
    return shlex.join(words)


def _name(host: Host) -> str:
    """Return the name of the card, or of its architecture where the card's is not clear."""
    try:
        is_clear = named(host.device_name, load(None), "the card") == (host.arch, host.device_name)
    except AttnRouteError:
        is_clear = False
    return host.device_name if is_clear else host.arch


def _told(decision: Decision) -> dict[str, Any]:
    text = render_decision(decision, verbose=True)
    pages = places(load(None))
    return {
        "line": render(decision.call),
        "host": sentences.host_line(decision.host),
        "selected": decision.selected,
        "why": sentences.why_selected(decision) if decision.selected else sentences.why_none(decision),
        "order": sentences.order_by(decision) if len(decision.order) > 1 else "",
        "verdicts": [_verdict(v, decision) for v in sentences.arranged(decision)],
        "stock": sentences.stock(decision.stock, decision) if decision.stock else "",
        "hints": [sentences.hint(found, decision.selected) for found in decision.hints],
        "pages": {row: pages[row] for row in _ROW.findall(text) if row in pages},
        "text": text,
        "json": decision_json(decision, verbose=True),
    }


def _verdict(verdict: Verdict, decision: Decision) -> dict[str, Any]:
    """Return one verdict: its sum as a sentence, its time, and a reason for each row."""
    return {
        "backend": verdict.backend,
        "title": load(None).backends[verdict.backend].title,
        "status": "selected" if verdict.backend == decision.selected else verdict.status,
        "sum": sentences.status(verdict, decision),
        "ms": verdict.predicted_ms,
        "is_inferred": verdict.prediction is not None and verdict.prediction.kind == "inferred",
        "repairs": verdict.repairs,
        "reasons": [sentences.finding(found) for found in sentences.findings(verdict)],
    }


if __name__ == "__main__":
    print(choices())  # noqa: T201 - A build writes this into a file.
