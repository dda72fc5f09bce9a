"""Processes of one gloo group that run functions of test modules, started once and used by many tests.

The processes are forked from a server that has imported torch, so a rank costs no start of torch. A rank
that fails, hangs or dies ends the others too, and the next run starts new ones.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Final

PRELOADED: Final = ("torch", "torch.distributed.tensor", "attnroute.api.attention", "pytest")
TIMEOUT: Final = 120.0
"""Seconds that a function may take unless its run states others."""
GRACE: Final = 3.0
"""Seconds that ranks have to report after one has failed: they may wait for it in a collective."""


class RankError(Exception):
    """A rank raised, died or did not end in time; the message has each such rank with its traceback."""


class Ranks:
    """A group of gloo processes.

    Attributes:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._busy: set[int] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Run a function in every process at once; return what it returned, by rank.

        Warnings are errors in it where they are in the test.

        Args:
            function: A function of a module's top level; it learns its rank from `torch.distributed`.
            *args: What it gets, the same on each rank: anything that pickle takes, also tensors.
            timeout: Seconds after which all processes are ended.

        Raises:
            RankError: A rank raised, died or did not end in time.
        """
        if function.__qualname__ != function.__name__:
            raise RankError(f"run() requires a function of a module's top level; got {function.__qualname__}")
        if not self._processes:
            self._start()
        # Filters of warnings are plain data, and those of the test hold on the ranks too.
        request = (inspect.getfile(function), function.__name__, args, list(warnings.filters), timeout)
        data = pickle.dumps(request)
        for connection in self._connections:
            connection.send_bytes(data)
        results, failures = self._collect(time.monotonic() + timeout)
        if failures:
            text = "\n".join(f"rank {rank} of {self.size}: {failures[rank]}" for rank in sorted(failures))
            self.stop()
            raise RankError(text)
        return [results[rank] for rank in range(self.size)]

    def stop(self) -> None:
        """End all processes, whatever they do."""
        for connection in self._connections:
            connection.close()
        for rank, process in enumerate(self._processes):
            # One that waits for requests ends by itself, and closes its group.
            process.join(0 if rank in self._busy else GRACE)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED])
        self._folder = tempfile.TemporaryDirectory(prefix="attnroute-ranks-", ignore_cleanup_errors=True)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self._folder.name, theirs)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Return what the ranks returned, and what is wrong with those that did not."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        self._busy = busy = set(range(self.size))
        while busy:
            left = deadline - time.monotonic()
            by_connection = {self._connections[rank]: rank for rank in busy}
            ready = wait(list(by_connection), timeout=max(left, 0))
            if not ready:
                failures |= {rank: self._stack(rank) for rank in busy}
                break
            for connection in ready:
                rank = by_connection[connection]
                busy.discard(rank)
                try:
                    done, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    busy.add(rank)
                    self._processes[rank].join(GRACE)
                    failures[rank] = f"ended with exit code {self._processes[rank].exitcode}"
                    return results, failures
                if done:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE)
        return results, failures

    def _stack(self, rank: int) -> str:
        """Return where a rank that did not end in time was shortly before that."""
        path = Path(self._folder.name, f"stack-{rank}")
        stack = path.read_text(encoding="utf-8") if path.exists() else ""
        return f"did not end\n{stack}"


def _serve(rank: int, size: int, folder: str, connection: Connection) -> None:
    """Join the group, and run what is asked for until nobody asks any more."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.platform == "linux":
        # The name of the machine need not lead to an address.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_receive, args=(connection, requests, busy), daemon=True).start()
    # A file as the meeting place needs no port.
    store = dist.FileStore(f"{folder}/store", size)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    modules: dict[str, ModuleType] = {}
    with Path(folder, f"stack-{rank}").open("w", encoding="utf-8") as stack:
        while (data := requests.get()) is not None:
            busy.set()
            answer = _answer(data, modules, stack)
            busy.clear()
            connection.send_bytes(answer)
    dist.destroy_process_group()


def _receive(
    connection: Connection, requests: queue.SimpleQueue[bytes | None], busy: threading.Event
) -> None:
    """Hand on requests; where the test process is gone, end this one even in the middle of a collective."""
    while True:
        try:
            requests.put(connection.recv_bytes())
        except (EOFError, OSError):
            if busy.is_set():
                os._exit(1)
            requests.put(None)
            return


def _forget_graphs() -> None:
    """Forget what earlier functions compiled: by their sizes torch would make those of this one open.

    A DTensor of open sizes does not come out of a graph ("'NoneType' object cannot be interpreted").
    """
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


def _answer(data: bytes, modules: dict[str, ModuleType], stack: Any) -> bytes:
    """Run one request; return whether it succeeded, with its result or its traceback."""
    try:
        path, name, args, filters, timeout = pickle.loads(data)
        faulthandler.dump_traceback_later(max(timeout - 0.5, timeout / 2), file=stack)
        with warnings.catch_warnings():
            warnings.filters[:] = filters
            if path not in modules:
                modules[path] = _load(path)
            _forget_graphs()
            return pickle.dumps((True, getattr(modules[path], name)(*args)))
    except BaseException:  # noqa: BLE001 # Whatever it is, the test shall see it.
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _load(path: str) -> ModuleType:
    """Import a test module from its file, since pytest's names of these mean nothing here."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
