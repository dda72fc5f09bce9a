"""Reads and writes the compressed recordings of a checkout: what releases of packages take, as text."""

from __future__ import annotations

import gzip
from pathlib import Path

from attnroute.errors import ArgumentError


def read(path: Path) -> str:
    """Return the text of a recording.

    Raises:
        ArgumentError: It is not there, as in an installed wheel.
    """
    if not path.is_file():
        required = "an audit requires the recordings of a checkout of attnroute"
        raise ArgumentError(f"{required}; got no {path}; run it there.")
    return gzip.decompress(path.read_bytes()).decode("utf-8")


def write(path: Path, text: str) -> None:
    """Write a recording; equal texts make equal files, whenever they are written."""
    path.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
