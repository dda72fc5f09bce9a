"""Which calls flash-attn-4 was recorded to compile kernels for, beside the tables.

A recording is made without a GPU (`attnroute tables record compiled`): kernels that compile may still fail at
their launch or be wrong, those that do not compile never run.
"""

from __future__ import annotations

import json
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from packaging.version import Version

from attnroute.audit.compare import Comparison, Judge
from attnroute.audit.releases import TORCH
from attnroute.audit.standins import UNDECIDED
from attnroute.audit.torch import recording
from attnroute.errors import ArgumentError
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.question.normalize import normalize

if TYPE_CHECKING:
    from pathlib import Path

    from attnroute.tables.folders import Tables

COMPILER: Final = "nvidia-cutlass-dsl"
_HOW: Final = "attnroute tables record compiled"
_EQUAL: Final = (8, 24, 40, 64, 72, 80, 96, 104, 112, 128, 136, 160, 176, 192, 200, 248, 256)
_UNEQUAL: Final = (
    "64/32", "64/96", "64/128", "96/64", "128/32", "128/64", "128/96", "128/256", "160/128", "192/64",
    "192/128", "256/128",
)  # fmt: skip
_WIDE_VALUES: Final = (
    "32/80", "64/136", "64/144", "64/152", "64/192", "64/208", "64/256", "64/512", "72/160", "72/224",
    "88/208", "96/136", "96/192", "96/200", "96/256", "512",
)  # fmt: skip
_FEATURES: Final = (
    "causal",
    "window=128,0",
    "window=64,64",
    "softcap=30",
    "sink",
    "deterministic",
    "thd causal",
)
_PHASES: Final = ("", "train")


class Record(NamedTuple):
    """What one release compiled with one compiler for one architecture.

    Attributes:
        release: The release of flash-attn-4.
        compiler: That of nvidia-cutlass-dsl.
        arch: The architecture.
        answers: By the line of a call, why its kernels do not compile, "" where they do.
    """

    release: str
    compiler: str
    arch: str
    answers: dict[str, str]


def lines() -> list[str]:
    """Return the calls that every release is asked about."""
    trained = product(_PHASES, (*_EQUAL, *_UNEQUAL))
    found = [f"bf16 b2 hq8 sq512 d{dims} {phase}" for phase, dims in trained]
    found += [f"bf16 b2 hq8 sq512 d{dims}" for dims in _WIDE_VALUES]
    more = product(_PHASES, (64, 256), _FEATURES)
    found += [f"bf16 b2 hq8 sq512 d{dim} {words} {phase}" for phase, dim, words in more]
    found += [f"bf16 b2 hq8 hkv2 sq512 d{dims} train" for dims in ("64", "136", "192", "192/128", "256")]
    found += [f"bf16 b2 hq8 sq512 d{dim} causal train" for dim in (104, 112)]
    return list(dict.fromkeys(render(normalize(parse(line))) for line in found))


def path() -> Path:
    """Return the file of the recording, which a checkout has."""
    return recording() / "fa4_compiled.json"


def recorded() -> list[Record]:
    """Read the recording; it may be empty.

    Raises:
        ArgumentError: This is no checkout.
    """
    if not recording().is_dir():
        required = "the recordings of a checkout of attnroute"
        raise ArgumentError(f"compiled kernels require {required}; got no {path()}; run it there.")
    return (
        [Record(**one) for one in json.loads(path().read_text(encoding="utf-8"))] if path().is_file() else []
    )


def write(records: list[Record]) -> None:
    """Write the recording, an answer a line."""
    kept = sorted(records, key=lambda one: (Version(one.release), Version(one.compiler), one.arch))
    text = json.dumps([record._asdict() for record in kept], indent=0)
    path().write_text(text + "\n", encoding="utf-8")


class Audit:
    """The tables beside the recording in the tests of a checkout."""

    package = "flash-attn-4"

    def __init__(self, tables: Tables) -> None:
        """Read it when it is asked for."""
        self._tables = tables

    @cached_property
    def _records(self) -> list[Record]:
        found = recorded()
        if not found:
            raise ArgumentError(f"--compile requires a recording; got none; make one: {_HOW}.")
        return found

    def versions(self) -> list[str]:
        """Return the releases that were recorded, the newest first."""
        return sorted({record.release for record in self._records}, key=Version, reverse=True)

    def release(self, version: str) -> Comparison:
        """Compare one release.

        Raises:
            ArgumentError: It was not recorded.
        """
        if version not in self.versions():
            known = ", ".join(self.versions())
            raise ArgumentError(f"--version requires a release that was recorded ({known}); got {version}.")
        comparison = Comparison()
        for record in self._records:
            if record.release == version:
                judge = Judge(self._tables, "fa4", [normalize(parse(line)) for line in record.answers])
                versions = {"torch": TORCH, self.package: version, COMPILER: record.compiler}
                for opinion in judge.opinions(Host(arch=record.arch, versions=versions)):
                    line = render(opinion.call)
                    said = record.answers.get(line, f"{UNDECIDED}nobody compiled {line}, a repaired call")
                    comparison.add(record.arch, opinion, said)
        return comparison
