"""What `attnroute tune` measured on this machine: its file, and what decisions get of it.

A file holds for one card with one set of versions. With others it is stale: nothing of it is used, and
explanations say so.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError

from attnroute._version import __version__
from attnroute.engine.measured import key_of
from attnroute.errors import TableError, shortened
from attnroute.memory import INSTALLED, cached
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.plain import Plain
from attnroute.question.policy import Measured, Policy

Identity = tuple[tuple[str, str], ...]
"""Architecture, device, attnroute and the versions of everything else, each with its name."""
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Times(Plain):
    """What one call takes, forward and backward together."""

    device_ms: Milliseconds
    host_ms: Milliseconds


class TunedCall(Plain):
    """What was measured of one class of calls.

    Attributes:
        line: The call that was measured.
        day: When.
        before: What would have been selected without this file.
        after: What is selected with it.
        margin: The share of its time by which another one must be faster than `before`.
        times: Of every backend that gave the right result.
        wrong: Backends that did not, each with its error.
        failed: Backends that could not be measured, each with the reason.
    """

    line: str
    day: str
    before: str
    after: str
    margin: Annotated[float, Field(ge=0, lt=1)]
    times: dict[str, Times]
    wrong: dict[str, str] = Field(default_factory=dict)
    failed: dict[str, str] = Field(default_factory=dict)

    def measured(self, path: Path, key: str) -> Measured:
        """Return what decisions about calls with a key get of it."""
        return Measured(
            file=path,
            calls=key,
            day=self.day,
            times=tuple((backend, t.device_ms, t.host_ms) for backend, t in self.times.items()),
            wrong=tuple(self.wrong.items()),
            stays=self.before,
            margin=self.margin,
        )


class TuningFile(Plain):
    """The content of a file that `attnroute tune` writes.

    Attributes:
        format: Of the file.
        attnroute: The version that wrote it.
        host: The machine.
        calls: What was measured, by what `engine.measured.key_of` says of the call.
        began: Key and backend of a first run under way, and of each that a process died at.
    """

    format: Literal[1] = 1
    attnroute: str = __version__
    host: Host
    calls: dict[str, TunedCall] = Field(default_factory=dict)
    began: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            TableError: It cannot be read, or is something else.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            got = error.strerror or type(error).__name__
        except (ValidationError, ValueError) as error:
            got = shortened(" ".join(str(error).split()), 200)
        raise TableError(
            f"{path} requires what `attnroute tune` writes; got: {got}; delete it and run `attnroute tune`"
            " again, or set ATTNROUTE_TUNING=off."
        )

    def write(self, path: Path) -> None:
        """Write the file as a whole or not at all.

        Raises:
            TableError: It cannot be written.
        """
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            got = error.strerror or type(error).__name__
            raise TableError(
                f"{path} requires a place that can be written; got: {got}; name another one with --out."
            ) from error
        finally:
            with suppress(OSError):
                part.unlink()

    def differences(self, here: Identity) -> tuple[str, ...]:
        """Return what is no longer as it was when the file was written, as clauses; empty where all is."""
        then, now = dict(identity_of(self.host, self.attnroute)), dict(here)
        return tuple(
            f"{name} {then.get(name, 'missing')} and not {now.get(name, 'missing')}"
            for name in dict.fromkeys((*then, *now))
            if then.get(name) != now.get(name)
        )


def identity_of(host: Host, attnroute: str = __version__) -> Identity:
    """Return what a time means nothing without."""
    card = (("architecture", host.arch), ("device", host.device_name), ("attnroute", attnroute))
    return (*card, *sorted(host.versions.items()))


def path_for(here: Identity) -> Path:
    """Return where the times of a card with these versions lie, among the user's data."""
    import platformdirs

    data = Path(platformdirs.user_data_dir("attnroute", appauthor=False))
    card = re.sub(r"[^\w.-]+", "-", " ".join(name for _, name in here[:2]).strip())
    return data / "tuning" / card / f"{hashlib.sha256(repr(here).encode()).hexdigest()[:12]}.json"


def informed(call: Call, host: Host, policy: Policy) -> Policy:
    """Return the policy with what was measured of such calls on this machine.

    Raises:
        TableError: The file is malformed.
    """
    tuning = policy.tuning
    if tuning is False:
        return policy
    found = _found(None if tuning is True else tuning, identity_of(host))
    if found is None:
        return policy
    path, file, differences = found
    if differences:
        return policy.changed(measured=Measured(file=path, differences=differences))
    tuned = file.calls.get(key := key_of(call))
    return policy if tuned is None else policy.changed(measured=tuned.measured(path, key))


@cached(16, INSTALLED)
def _found(path: Path | None, here: Identity) -> tuple[Path, TuningFile, tuple[str, ...]] | None:
    """Return a machine's file, or the newest stale one of its card, with what differs; None without one."""
    if path is None:
        path = path_for(here)
        others = sorted(path.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
        if not others:
            return None
        path = path if path in others else others[-1]
    file = TuningFile.read(path)
    return path, file, file.differences(here)
