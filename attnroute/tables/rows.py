"""Rows as the tables give them out: what a file says, with its id and the file it stands in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from attnroute.question.host import device_of
from attnroute.tables.schema import BackendInfo, FeatureAnswer, Option, Preference, Rule

_KERNELS: Final = {"cpu": "CPUs", "cuda": "CUDA devices"}


@dataclass(frozen=True, slots=True, eq=False)
class RuleRow:
    """A rule with its id and the file it stands in; two are equal only if they are one, so one is a key."""

    id: str
    rule: Rule
    file: Path


@dataclass(frozen=True, slots=True)
class OptionRow:
    """A row of options with its id and the file it stands in."""

    id: str
    option: Option
    file: Path


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceRow:
    """A preference with its id and the file it stands in; two are equal only if they are one."""

    id: str
    preference: Preference
    file: Path

    @property
    def is_base(self) -> bool:
        """Whether the row has no condition, so that it counts for every call."""
        return not any(self.preference.condition)


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """A backend's answer about one feature, with its id."""

    id: str
    answer: FeatureAnswer


def wrong_device(arch: str, backend: str, info: BackendInfo, file: Path) -> RuleRow | None:
    """Return the row that rejects every call where a backend has no kernel for this kind of device.

    Returns:
        None where it has, or where its table names no kinds.
    """
    if info.devices is None or device_of(arch) in info.devices.kinds:
        return None
    rule = Rule(
        name=f"{'-and-'.join(info.devices.kinds)}-only",
        versions={},
        when={},
        requires="never",
        not_for={},
        because=f"the kernel exists for {' and '.join(_KERNELS[kind] for kind in info.devices.kinds)} only",
        evidence=info.devices.evidence,
    )
    return RuleRow(f"{arch}/{backend}/{rule.name}", rule, file)
