"""The machine as plain data. `attnroute.probes` fills it in; a JSON file or flags do so for others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, StringConstraints, ValidationError

from attnroute.errors import ArgumentError, shortened
from attnroute.question.plain import Plain
from attnroute.vocabulary import Device

ARCH: Final = r"^(cpu|sm_\d{2,3})$"
Arch = Annotated[str, StringConstraints(pattern=ARCH)]


class Host(Plain):
    """One device and the software around it.

    Attributes:
        arch: "sm_90", "sm_120", "cpu", ...; never an int and never a marketing name.
        device_name: As the driver reports it, or as somebody named it; empty when nobody did.
        versions: Distribution or library to version: torch, cuda, cudnn, flash-attn-4, ... A provider
            that is missing is not installed.
        assumed: Which of these nobody stated, each with why it was assumed; also what could not be, without a
            version.
        broken: Distribution to the error its import raised, for installs that cannot be used.
        free_memory: Bytes of the device that are free for what a call makes besides its output; None where
            nobody asked, and then nothing is kept out for what it takes.
    """

    arch: Arch
    device_name: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    assumed: dict[str, str] = Field(default_factory=dict)
    broken: dict[str, str] = Field(default_factory=dict)
    free_memory: Annotated[int, Field(ge=0)] | None = None

    def __hash__(self) -> int:
        """Hash by value, so that a host can be part of a cache key."""
        return hash((self.arch, self.device_name, tuple(sorted(self.versions.items())), self.free_memory))

    @property
    def lasting(self) -> Host:
        """The host without what changes from call to call."""
        return self if self.free_memory is None else self.model_copy(update={"free_memory": None})

    def with_versions(self, changes: dict[str, str | None]) -> Host:
        """Return a copy with versions set, or removed where the value is None."""
        merged = {**self.versions, **{k: v for k, v in changes.items() if v is not None}}
        kept = {k: v for k, v in merged.items() if not (k in changes and changes[k] is None)}
        assumed = {name: why for name, why in self.assumed.items() if name not in changes}
        return self.model_copy(update={"versions": kept, "assumed": assumed})

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a host from the JSON that `attnroute probe` prints.

        Raises:
            ArgumentError: The file cannot be read or is not a host.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            msg = (
                f"--host requires a JSON file as `attnroute probe` prints it; got {shortened(str(path))} "
                f"({shortened(_reason(error))}); record one with `attnroute probe > {shortened(path.name)}`."
            )
            raise ArgumentError(msg) from error


def _reason(error: Exception) -> str:
    """Say in one line what is wrong; pydantic says it in a paragraph."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])


def arch_of(capability: tuple[int, int]) -> str:
    """Return the arch word of a CUDA compute capability: (9, 0) is "sm_90", (12, 1) is "sm_121"."""
    major, minor = capability
    return f"sm_{major}{minor}"


def device_of(arch: str) -> Device:
    """Return the kind of device that an architecture is of."""
    return "cpu" if arch == "cpu" else "cuda"


def sort_key(arch: str) -> tuple[int, int]:
    """Order arch words as a reader expects: numbers ascending, cpu last."""
    match = re.fullmatch(r"sm_(\d+)", arch)
    return (0, int(match[1])) if match else (1, 0)
