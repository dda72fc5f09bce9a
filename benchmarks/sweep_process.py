"""A worker process of the sweep as its parent sees it: asked, watched, and started again when it dies."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_LIMIT = 180.0
"""Seconds until a process must be ready: many of them import torch together."""
_ENVIRONMENT = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
}


class Process:
    """One worker process."""

    def __init__(self, device: str, backends: str, share: float, errors: Path) -> None:
        """Start it without waiting until it is ready.

        Args:
            device: cuda or cpu.
            backends: Names by comma; empty for all.
            share: Part of the card's memory that it may take while others run beside it.
            errors: The file that its stderr goes to.
        """
        self._arguments = [device, backends, str(share)]
        self._errors = errors
        self._errors.write_bytes(b"")
        self._start()

    def ask(self, command: dict[str, Any], limit: float, until: float) -> dict[str, Any]:
        """Return the answer, or at which backend the process died or was stopped, and why.

        Args:
            command: What the process is to do.
            limit: Seconds that one backend may take.
            until: The monotonic time at which it is stopped whatever it does.
        """
        if not self._is_ready:
            line = self._line(time.monotonic() + START_LIMIT)
            if "ready" not in line:
                return self._lost("", line)
            self._is_ready = True
        return self._answer(command, limit, until)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.stdin.close()

    def _start(self) -> None:
        worker = str(Path(__file__).with_name("sweep_worker.py"))
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, worker, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=os.environ | _ENVIRONMENT,
            )
        self._buffer = b""
        self._is_ready = False

    def _answer(self, command: dict[str, Any], limit: float, until: float) -> dict[str, Any]:
        at = ""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._lost(at, {"status": "crashed"})
        while True:
            line = self._line(min(time.monotonic() + limit, until))
            if "done" in line:
                return line
            if "at" not in line:
                return self._lost(at, line)
            at = line["at"]

    def _line(self, until: float) -> dict[str, Any]:
        """Return the next line of the process, or the status of one that gives none."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while not (found := self._read()):
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return {"status": "took too long"}
            read = os.read(descriptor, 2**16)
            if not read:
                return {"status": "crashed"}
            self._buffer += read
        return found

    def _read(self) -> dict[str, Any]:
        """Return the next line that was read already, empty without one; pass over what packages print."""
        while b"\n" in self._buffer:
            text, _, self._buffer = self._buffer.partition(b"\n")
            try:
                found = json.loads(text)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return {}

    def _lost(self, at: str, line: dict[str, Any]) -> dict[str, Any]:
        """Start the process again, and return where it was."""
        self.end()
        text = self._errors.read_text(encoding="utf-8", errors="replace")[-400:]
        self._start()
        return {"at": at, "status": line.get("status", "crashed"), "text": text}
