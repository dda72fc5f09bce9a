"""Write to stdout; a reader that closes the pipe, or a full disk, ends the command quietly."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from attnroute.errors import OutputError

if TYPE_CHECKING:
    from typing import TextIO

_NO_READER = (errno.EPIPE, errno.ESHUTDOWN, errno.EINVAL)
"""What a closed pipe gives; Windows calls it an invalid argument."""


class Outlet:
    """A stream that drops what nobody reads any more, so that the exit code stays what was found out.

    What a full disk or another fault does not take is an `OutputError`.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        with suppress(AttributeError, ValueError):
            # A name that the terminal's encoding has no letters for is still printed.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Send what is left, which Python flushes at its end, nowhere."""
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if error.errno not in _NO_READER:
            reason = error.strerror or str(error)
            raise OutputError(f"{self._name} requires room for what is printed; got: {reason}.") from error


@contextmanager
def outlets() -> Iterator[None]:
    """Put an outlet before both streams."""
    before = sys.stdout, sys.stderr
    # A process that was started without streams has None in their place.
    streams = [open(os.devnull, "w", encoding="utf-8") if s is None else s for s in before]  # noqa: PTH123, SIM115
    sys.stdout, sys.stderr = (
        Outlet(stream, name) for stream, name in zip(streams, ("stdout", "stderr"), strict=True)
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
