"""Machines that somebody names and nobody probed: what is not said about one is assumed, and says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from attnroute.question.host import Host
from attnroute.tables.cards import named
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import companions_of, known
from attnroute.tables.versions import version_of

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables

WHEEL: Final = ("cuda", "cudnn", "triton")
"""What a wheel of torch brings along."""
_ANY_CUDA: Final = frozenset({"triton"})
"""What every wheel of one torch brings along, whatever its CUDA."""
_PROCESSOR: Final = {"c++": "present", "avx2": "present"}
"""What a machine without a GPU is taken to have, as most have it: a C++ compiler of any version, and AVX2."""


def machine(
    word: str,
    tables: Tables,
    *,
    argument: str,
    given: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> Host:
    """Return a machine by the name of its architecture or card.

    Args:
        word: An architecture or a card: "sm_90", "h100", "cpu".
        tables: The tables.
        argument: Where the word was written, for the error.
        given: Versions that were stated.
        without: What was said not to be installed.

    Raises:
        ArgumentError: The word names no architecture of the tables, or cards of several.
    """
    arch, card = named(word, tables, argument)
    stated = dict(given or {})
    if "torch" in without:
        return Host(arch=arch, device_name=card, versions=stated)
    newest = known(shipped_folder())[-1].torch
    found = {} if "torch" in stated else {"torch": (newest, "the newest known release")}
    if arch == "cpu":
        usual = {n: v for n, v in _PROCESSOR.items() if n not in stated and n not in without}
        found |= {name: (version, "as most machines have") for name, version in usual.items()}
    else:
        open_names = [name for name in WHEEL if name not in stated and name not in without]
        found |= _brought(newest, stated, open_names)
    versions = {name: version for name, (version, _) in found.items() if version}
    assumed = {name: why for name, (_, why) in found.items()}
    return Host(arch=arch, device_name=card, versions={**versions, **stated}, assumed=assumed)


def _brought(newest: str, given: Mapping[str, str], names: list[str]) -> dict[str, tuple[str, str]]:
    """Return what torch's wheel brings along, each with why; "" for a version that is not known."""
    torch = given.get("torch", newest)
    wheel = companions_of(torch, shipped_folder())
    cuda = version_of("cuda", {"torch": torch, **given})
    source = "what its default wheel brings" if "torch" in given else "the newest known release"
    release = f"torch {torch}" if wheel is None else f"torch {torch} with CUDA {cuda}"
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        if wheel is not None and (cuda in (None, wheel.cuda) or name in _ANY_CUDA):
            found[name] = (getattr(wheel, name), source)
        else:
            found[name] = ("", f"because no default wheel of {release} is listed")
    return found
