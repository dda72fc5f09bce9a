"""Machines with releases of flash-attn-4, each with a compiler that it runs with."""

from __future__ import annotations

TORCH = {"torch": "2.11.0+cu130", "triton": "3.6.0"}
NEWEST = {**TORCH, "flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1"}
RELEASES = (3, 4, 5, *range(7, 37))
"""The betas that were published."""


def dsl_of(release):
    """Return a release of CuTe DSL that the metadata of a beta asks for."""
    wanted = ((27, "4.8.1"), (20, "4.6.0.dev0"), (16, "4.5.2"), (0, "4.4.2"))
    return next(dsl for first, dsl in wanted if release >= first)


def fa4(release, dsl=None, **more):
    """Return a host's versions with a beta of flash-attn-4, as fields of a call in `row_calls`."""
    given = {"flash-attn-4": f"4.0.0b{release}", "nvidia-cutlass-dsl": dsl or dsl_of(release)}
    return {"versions": {**TORCH, **given, **more}}


SINK = {"sink": True}
DETERMINISTIC = {"deterministic": True}
MQA = {"num_heads_kv": 1}
MHA = {"num_heads_kv": 8}
