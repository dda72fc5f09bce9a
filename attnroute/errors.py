"""Every exception of attnroute. All derive from `AttnRouteError`; each carries its exit code for the CLI."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from types import FrameType

    from attnroute.engine.decision import Decision

_ALIKE: Final = 0.7
ECHO: Final = 100
"""Most characters of a user's text that a message repeats."""


class AttnRouteError(Exception):
    """Base of every error that attnroute raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "") -> None:
        """Take the sentence; what a terminal would act on is written as an escape."""
        super().__init__(printable(message))


class ArgumentError(AttnRouteError, ValueError, RuntimeError):
    """An argument is malformed: the message names it, what is required, what was got and what to do.

    A `ValueError`, and a `RuntimeError` too, which is what scaled_dot_product_attention raises.
    """

    exit_code: ClassVar[int] = 2


class OverrideError(AttnRouteError, ValueError):
    """An environment variable or `override()` value that cannot be understood."""

    exit_code: ClassVar[int] = 2


class TableError(AttnRouteError, ValueError):
    """A capability table is malformed: the message names the file, the rule and the field."""

    exit_code: ClassVar[int] = 5


class NoBackendError(AttnRouteError, RuntimeError):
    """No backend may run this call.

    Attributes:
        decision: The whole `Decision`, with every reason of every backend.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, decision: Decision | None = None) -> None:
        """Keep the decision beside the message that was rendered from it."""
        super().__init__(message)
        self.decision = decision


class KernelRefusedError(AttnRouteError, RuntimeError):
    """A kernel was refused before it was launched: nothing ran on the device, so another backend may.

    `attention()` raises it where the backend was required, or under strict; elsewhere another backend runs.

    Attributes:
        backend: Whose kernel it is.
        said: The error of the package, in one line.
        lasts: Such a call will be refused again; False where the reason lies in what surrounds this one.
    """

    lasts = True

    def __init__(self, message: str, backend: str = "", said: str = "") -> None:
        """Keep the parts of the message as attributes."""
        super().__init__(message)
        self.backend = backend
        self.said = said or message


class NotCompiledError(KernelRefusedError):
    """The selected backend must be compiled and cannot be: run uncompiled, it would allocate all scores."""


class ConsensusError(AttnRouteError, RuntimeError):
    """Processes of a mesh would run a call differently: the message names the rank and the difference."""


class OutputError(AttnRouteError):
    """What a command found out could not be written: a full disk, for one."""

    exit_code: ClassVar[int] = 6


class PackageError(AttnRouteError):
    """A command that reads releases of a package could not have one, or not run its code with stand-ins."""

    exit_code: ClassVar[int] = 7


class QuadraticAttentionWarning(UserWarning):
    """The selected backend materialises seqlen_q x seqlen_kv scores; the message names the bytes."""


class RerouteWarning(UserWarning):
    """A kernel was refused before its launch and another backend runs; the message explains it."""


class OverrideWarning(UserWarning):
    """An `ATTNROUTE_*` variable that attnroute does not know, or an `override()` that nobody entered."""


class PluginWarning(UserWarning):
    """A backend of another distribution is left out; the message names it and what is wrong with it."""


def argument_error(argument: str, required: str, got: object, to_do: str) -> ArgumentError:
    """Build the one-sentence error for a bad argument.

    Args:
        argument: Name of the argument as the caller wrote it.
        required: What is required of it, e.g. "a bool or floating-point tensor".
        got: What was given.
        to_do: What the caller can do, as an imperative clause without a full stop.
    """
    return ArgumentError(f"{argument} requires {required}; got {_shown(got)}; {to_do}.")


def _shown(got: object) -> str:
    """Return what was given as text, of a long one the beginning."""
    try:
        text = str(got)
    except ValueError:
        # Python writes out no integer of thousands of digits.
        return f"an {type(got).__name__} of more digits than Python writes out"
    return shortened(text, 4 * ECHO)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that led here, through attnroute and torch's compiler."""
    frame = _users_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    module = names.get("__name__", "__main__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _users_frame() -> FrameType | None:
    """Return the innermost frame outside of attnroute and torch, one of torch where there is no other."""
    frame, of_torch = inspect.currentframe(), None
    while frame is not None:
        # Code that torch.fx generated has no module.
        package = str(frame.f_globals.get("__name__", "torch")).partition(".")[0]
        if package not in ("attnroute", "torch"):
            return frame
        if package == "torch" and of_torch is None:
            of_torch = frame
        frame = frame.f_back
    return of_torch


def printable(text: str) -> str:
    """Return the text with escapes in the place of what a terminal acts on or cannot show; line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shortened(text: str, most: int = ECHO) -> str:
    """Return the text, or of a long one its beginning and how long it is."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def quoted(text: object) -> str:
    """Return a user's text as a message repeats it: in quotes, a long text shortened."""
    return f'"{shortened(str(text))}"'


def did_you_mean(word: str, choices: Iterable[str], shared: str = "") -> str:
    """Return '; did you mean "x"?' for a choice that is nearly the word, or an empty string.

    The cutoff is high, because no suggestion is better than a wrong one.

    Args:
        word: What was written.
        choices: What is right.
        shared: What all choices begin with, which makes no two of them alike.
    """
    if len(word) > ECHO:
        return ""
    found = {choice.removeprefix(shared).lower(): choice for choice in choices}
    near = get_close_matches(word.removeprefix(shared).lower(), found, n=1, cutoff=_ALIKE)
    return f'; did you mean "{found[near[0]]}"?' if near else ""
