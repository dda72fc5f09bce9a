"""attnroute: an attention backend dispatcher with capability tables.

Importing this package loads neither torch nor the tables; each public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnroute._version import __version__

if TYPE_CHECKING:
    from attnroute import biases, distributed, masks
    from attnroute.api.attention import attention, explain
    from attnroute.api.sdpa_block import route_sdpa
    from attnroute.api.trace import trace
    from attnroute.engine.decide import decide
    from attnroute.engine.decision import Decision, Verdict
    from attnroute.engine.finding import Finding
    from attnroute.errors import (
        ArgumentError,
        AttnRouteError,
        ConsensusError,
        KernelRefusedError,
        NoBackendError,
        NotCompiledError,
        OutputError,
        OverrideError,
        OverrideWarning,
        PackageError,
        PluginWarning,
        QuadraticAttentionWarning,
        RerouteWarning,
        TableError,
    )
    from attnroute.memory import reset
    from attnroute.question.call import Call
    from attnroute.question.host import Host
    from attnroute.question.policy import Policy
    from attnroute.settings import override

_HOMES = {
    "ArgumentError": "attnroute.errors",
    "AttnRouteError": "attnroute.errors",
    "Call": "attnroute.question.call",
    "ConsensusError": "attnroute.errors",
    "Decision": "attnroute.engine.decision",
    "Finding": "attnroute.engine.finding",
    "Host": "attnroute.question.host",
    "KernelRefusedError": "attnroute.errors",
    "NoBackendError": "attnroute.errors",
    "NotCompiledError": "attnroute.errors",
    "OutputError": "attnroute.errors",
    "OverrideError": "attnroute.errors",
    "OverrideWarning": "attnroute.errors",
    "PackageError": "attnroute.errors",
    "PluginWarning": "attnroute.errors",
    "Policy": "attnroute.question.policy",
    "QuadraticAttentionWarning": "attnroute.errors",
    "RerouteWarning": "attnroute.errors",
    "TableError": "attnroute.errors",
    "Verdict": "attnroute.engine.decision",
    "attention": "attnroute.api.attention",
    "decide": "attnroute.engine.decide",
    "explain": "attnroute.api.attention",
    "override": "attnroute.settings",
    "reset": "attnroute.memory",
    "route_sdpa": "attnroute.api.sdpa_block",
    "trace": "attnroute.api.trace",
}

__all__ = [
    "ArgumentError",
    "AttnRouteError",
    "Call",
    "ConsensusError",
    "Decision",
    "Finding",
    "Host",
    "KernelRefusedError",
    "NoBackendError",
    "NotCompiledError",
    "OutputError",
    "OverrideError",
    "OverrideWarning",
    "PackageError",
    "PluginWarning",
    "Policy",
    "QuadraticAttentionWarning",
    "RerouteWarning",
    "TableError",
    "Verdict",
    "__version__",
    "attention",
    "biases",
    "decide",
    "distributed",
    "explain",
    "masks",
    "override",
    "reset",
    "route_sdpa",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in ("biases", "distributed", "masks"):
        return import_module(f"attnroute.{name}")
    if name not in _HOMES:
        msg = f"module 'attnroute' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # The next use costs nothing.
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
