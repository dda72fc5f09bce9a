"""Times every eligible backend, stock attention and `attention()` over a designed set of calls on one card.

python benchmarks/sweep.py --out sweep --seconds 500 --workers 12
python benchmarks/sweep.py --out sweep --set models --seconds 500 --workers 12
python benchmarks/sweep.py --out sweep --device cpu --seconds 60 --workers 2 --structures 6   # tiny sizes

Worker processes compile and run the first calls side by side; then, while nobody compiles, one after the
other has the card to itself and times its calls. This repeats until the time is over. Each finished call is
a line of `calls.jsonl`; a second run with the same folder goes on after the last one.
`sweep.json` holds all calls with the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sweep_calls import SIZES, STRUCTURES, SweepCall, shrunk, units
from sweep_models import models
from sweep_process import Process

SAME = ("card", "driver", "torch", "cudnn", "packages")
"""What must not change between the runs that go on in one folder."""
PREPARE_LIMIT = 90.0
"""Seconds that the first run of one backend may take."""
TIME_LIMIT = 30.0
"""Seconds that one batch, or the warm-up, of one backend may take."""
SECONDS_PER_CALL = 0.8
"""About what timing a call takes, until some were timed."""
UNITS_PER_WORKER = 3
"""How many structures a worker prepares in a round."""
SETTLE = 12.0
"""Seconds that are kept for first runs under way and for writing."""


def environment(device: str) -> dict[str, Any]:
    """Return what a number means nothing without."""
    from backends import versions
    from common import environment as of_card

    if device == "cuda":
        return of_card() | {"packages": versions()}
    import torch

    return {"card": "cpu", "driver": "", "torch": torch.__version__, "cudnn": "", "packages": versions()}


class Results:
    """The lines of `calls.jsonl`, and which calls they hold."""

    def __init__(self, folder: Path, here: dict[str, Any]) -> None:
        """Read what an earlier run left in a folder.

        Raises:
            SystemExit: The earlier run was on another card or with other versions.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / "calls.jsonl"
        self._lock = threading.Lock()
        self.environment = here
        self.calls: dict[str, dict[str, Any]] = {}
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        # A run that was killed may leave half a line.
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
        for line in lines:
            if "environment" in line:
                self._compare(line["environment"])
            else:
                self.calls[line["key"]] = line
        head = [] if lines else [{"environment": here}]
        kept = "".join(json.dumps(line) + "\n" for line in (*lines, *head))
        self._path.write_text(kept, encoding="utf-8")

    def _compare(self, before: dict[str, Any]) -> None:
        other = [name for name in SAME if before[name] != self.environment[name]]
        if other:
            told = "; ".join(f"{name} {before[name]} before, {self.environment[name]} now" for name in other)
            raise SystemExit(f"{self._path} was begun elsewhere ({told}): choose another --out.")
        self.environment = before

    def add(self, call: SweepCall, found: dict[str, Any]) -> None:
        """Write one finished call."""
        line = {"key": call.key, "part": call.part, **found}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            self.calls[call.key] = line
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write all calls with the environment as one file, a line for each call."""
        head = json.dumps(self.environment)
        lines = ",\n".join(json.dumps(line) for line in self.calls.values())
        text = f'{{"environment": {head},\n"calls": [\n{lines}\n]}}\n'
        (self._folder / "sweep.json").write_text(text, encoding="utf-8")


class Sweep:
    """Calls that wait, processes, and the time there is."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        """Find what is left to do, and start the processes."""
        self._until = time.monotonic() + options.seconds
        self._results = results
        form = shrunk if options.device == "cpu" else _unchanged
        drawn = [[form(call) for call in unit] for unit in chosen(options)]
        left = [list(dict.fromkeys(c for c in unit if c.key not in results.calls)) for unit in drawn]
        self.total = len({call.key for unit in drawn for call in unit})
        self._waiting = [unit for unit in left if unit]
        folder = Path(options.out, "stderr")
        folder.mkdir(exist_ok=True)
        backends = options.backends
        share = 0.85 / options.workers
        self._processes = [
            Process(options.device, backends, share, folder / str(i)) for i in range(options.workers)
        ]
        self._lock = threading.Lock()
        self._timed = (0, 0.0)

    def run(self) -> None:
        """Prepare and time, round after round."""
        try:
            while self._waiting and self._left() > SETTLE + SECONDS_PER_CALL:
                prepared = self._prepare()
                if not prepared:
                    break
                self._time(prepared)
                _progress(f"{len(self._results.calls)} of {self.total} calls, {self._left():.0f} s left")
        finally:
            for process in self._processes:
                process.end()

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _per_call(self) -> float:
        count, seconds = self._timed
        return seconds / count if count >= 10 else SECONDS_PER_CALL

    def _prepare(self) -> list[tuple[Process, SweepCall, dict[str, Any]]]:
        """Let all processes prepare calls side by side, as many as there is time to time afterwards."""
        prepared: list[tuple[Process, SweepCall, dict[str, Any]]] = []
        taken = 0
        most = UNITS_PER_WORKER * len(self._processes)

        def work(process: Process) -> None:
            nonlocal taken
            while True:
                with self._lock:
                    reserve = (len(prepared) + len(self._processes)) * self._per_call() + SETTLE
                    if not self._waiting or taken >= most or self._left() < reserve:
                        return
                    unit = self._waiting.pop(0)
                    taken += 1
                for call in unit:
                    until = self._until - (len(prepared) + 1) * self._per_call() - 3.0
                    found = self._asked(process, "prepare", call, {}, PREPARE_LIMIT, until)
                    if found is None:
                        return
                    with self._lock:
                        prepared.append((process, call, found))
                    if self._left() < len(prepared) * self._per_call() + SETTLE:
                        break

        start = time.monotonic()
        with ThreadPoolExecutor(len(self._processes)) as pool:
            list(pool.map(work, self._processes))
        _progress(f"prepared {len(prepared)} calls in {time.monotonic() - start:.0f} s")
        return prepared

    def _time(self, prepared: list[tuple[Process, SweepCall, dict[str, Any]]]) -> None:
        """Time the prepared calls, one at a time."""
        for process, call, found in prepared:
            if self._left() < 2.0:
                return
            start = time.monotonic()
            timed = found
            if "status" not in found:
                timed = self._asked(process, "time", call, found["backends"], TIME_LIMIT, self._until)
            if timed is None:
                return
            self._results.add(call, found | timed)
            count, seconds = self._timed
            self._timed = count + 1, seconds + time.monotonic() - start

    def _asked(
        self,
        process: Process,
        do: str,
        call: SweepCall,
        backends: dict[str, Any],
        limit: float,
        until: float,
    ) -> dict[str, Any] | None:
        """Return a process's answer, None where the time is over before.

        A backend that ends the process or takes too long gets that as its status, and is left out of the next
        try. A process that ends at no backend may have died before: the call is tried once more.
        """
        results = dict(backends)
        lost = 0
        while True:
            answer = process.ask({"do": do, "key": call.key, "backends": results}, limit, until)
            if "done" in answer:
                found: dict[str, Any] = answer["done"]
                return found
            if time.monotonic() >= until:
                return None
            status = {"status": answer["status"], "text": answer["text"]}
            at = answer["at"]
            if at != "":
                results[at] = results.get(at, {}) | status
            elif (lost := lost + 1) > 1:
                return {"backends": results} | status


def chosen(options: argparse.Namespace) -> list[list[SweepCall]]:
    """Return the calls that the command line names, by structure."""
    if options.set == "models":
        return models()
    return units(options.seed, options.structures, options.sizes)


def _unchanged(call: SweepCall) -> SweepCall:
    return call


def _progress(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", default="sweep", help="folder; an earlier run's goes on")
    found.add_argument("--seconds", type=float, default=500.0)
    found.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4))
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--backends", default="", help="only these of the eligible ones, by comma")
    found.add_argument("--set", choices=("drawn", "models"), default="drawn", help="which calls")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--structures", type=int, default=STRUCTURES)
    found.add_argument("--sizes", type=int, default=SIZES, help="sizes of each structure")
    found.add_argument("--list", action="store_true", help="print the calls and end; needs no GPU")
    return found


def main() -> None:
    """Read the arguments and run."""
    options = parser().parse_args()
    if options.list:
        for call in (call for unit in chosen(options) for call in unit):
            print(call.part, call.key)
        return
    results = Results(Path(options.out), environment(options.device))
    sweep = Sweep(options, results)
    try:
        sweep.run()
    finally:
        results.close()
    _progress(f"{len(results.calls)} of {sweep.total} calls are in {options.out}/sweep.json")


if __name__ == "__main__":
    main()
