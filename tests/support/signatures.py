"""Signatures of other packages' functions, as `attnroute tables record` writes them."""

from __future__ import annotations

import json
from inspect import Parameter, Signature
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "executors" / "data" / "signatures"


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
