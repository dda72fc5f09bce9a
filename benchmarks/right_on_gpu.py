"""Every backend against float64, output and every gradient, over memory layouts, masks, heads, lengths.

python benchmarks/right_on_gpu.py --out folder [--seconds 420] [--backends flash,cudnn_fe] [--seed 0]
python benchmarks/right_on_gpu.py --one '{"backend":"cudnn_fe","mask":"documents"}'
python benchmarks/right_on_gpu.py --out folder --device cpu --seconds 30 --backends flash,chunked

Only calls that the tables call eligible are run. Cases are drawn so that pairs of values that were not
together yet come first; more seconds draw more of them. Each process has one backend, and one that crashes
or hangs costs the case that it was at: that is written down and another process goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

BACKENDS = {
    "flex": 3,
    "fa4": 3,
    "flex_fa4": 2,
    "cudnn_fe": 2,
    "auto": 2,
    "flash": 1,
    "cudnn": 1,
    "efficient": 1,
    "fa3": 1,
    "chunked": 1,
    "math": 1,
}
"""Backend to how many processes it gets: those that compile take longer."""
_BYTES = 9 * 2**20
"""How much of lines about cases that are right is kept."""


class Results:
    """What all processes say, written down as it comes."""

    def __init__(self, folder: Path) -> None:
        """Open the files of a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._right = (folder / "right.jsonl").open("w", encoding="utf-8")
        self._other = (folder / "other.jsonl").open("w", encoding="utf-8")
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._missed: dict[str, Counter[str]] = defaultdict(Counter)
        self._kernels: dict[str, set[str]] = defaultdict(set)
        self._worst: dict[str, float] = defaultdict(float)
        self._selected: dict[str, Counter[str]] = defaultdict(Counter)
        self._garbage: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._shown: dict[str, dict[str, Any]] = defaultdict(dict)

    def take(self, backend: str, line: dict[str, Any]) -> None:
        """Keep what one case gave."""
        with self._lock:
            status = line["status"]
            self._selected[backend][line.pop("selected", "?")] += 1
            case = json.loads(line["done"])
            garbage = case.get("garbage")
            if garbage is not None and status in ("ok", "wrong"):
                status = "garbage " + ("stays out" if status == "ok" else "comes in")
                self._garbage[f"{case['mask']} {garbage}"][backend].update(line.get("wrong", {}))
            self._counts[backend][status] += 1
            self._kernels[backend].update(line.pop("kernels", ()))
            if line["status"] == "ok":
                self._worst[backend] = max(self._worst[backend], line.get("error", 0.0))
                if self._right.tell() < _BYTES:
                    self._right.write(line["done"] + "\n")
            else:
                self._other.write(json.dumps(line) + "\n")
                self._other.flush()
                names = ",".join(line.get("wrong", ())) or line.get("text", "")[:60]
                sign = f"{status} {names} | {case.get('mask', 'none')} {case.get('api', '')}"
                if garbage is None:
                    self._shown[backend].setdefault(sign, [0, line])[0] += 1
            if line.get("rerouted"):
                self._counts[backend]["rerouted"] += 1

    def missed(self, backend: str, line: dict[str, Any]) -> None:
        """Keep why cases were not eligible."""
        with self._lock:
            self._counts[backend]["not eligible"] += line["missed"]
            self._missed[backend].update(dict(line["not_eligible"]))

    def close(self, told: dict[str, Any]) -> None:
        """Write the summary and print the table."""
        with self._lock:
            self._right.close()
            self._other.close()
            summary = told | {
                "backends": {b: dict(c) for b, c in sorted(self._counts.items())},
                "largest_error_of_ok": {b: float(f"{e:.3g}") for b, e in sorted(self._worst.items())},
                "not_eligible": {b: dict(c.most_common(12)) for b, c in sorted(self._missed.items())},
                "selected": {b: dict(c) for b, c in sorted(self._selected.items())},
                "garbage": {
                    k: {b: sorted(n) or "stays out" for b, n in sorted(found.items())}
                    for k, found in sorted(self._garbage.items())
                },
                "kernels": {b: sorted(k) for b, k in sorted(self._kernels.items())},
                "signatures": {
                    b: {s: [n, line] for s, (n, line) in found.items()} for b, found in self._shown.items()
                },
            }
            (self._folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            self._print()

    def _print(self) -> None:
        for kind, found in sorted(self._garbage.items()):
            said = "; ".join(f"{b}: {','.join(sorted(n)) or '-'}" for b, n in sorted(found.items()))
            print(f"reaches, {kind}: {said}"[:500])
        for backend, found in sorted(self._shown.items()):
            for sign, (count, line) in sorted(found.items(), key=lambda item: -item[1][0])[:12]:
                wrong = line.get("wrong", line.get("text", ""))
                print(f"{backend:9} {count:4} x {sign}\n    {wrong} {line['done']}"[:420])
        words = ("ok", "wrong", "refused", "raised", "crashed", "hung", "rerouted", "not eligible")
        print(f"{'backend':10}" + "".join(f"{word:>13}" for word in words) + "   worst ok")
        for backend, counts in sorted(self._counts.items()):
            row = "".join(f"{counts[word]:13}" for word in words)
            print(f"{backend:10}{row}   {self._worst[backend]:.2g}", flush=True)


def follow(backend: str, number: int, options: argparse.Namespace, results: Results) -> None:
    """Keep one process with one backend going until the time is over."""
    until = time.monotonic() + options.seconds
    skip = 0
    while (left := until - time.monotonic()) > 5:
        worker = _started(backend, number, options, left, skip)
        at = {"case": "", "since": time.monotonic()}
        watch = threading.Thread(
            target=_watch, args=(worker, at, options.case_limit, until + 15), daemon=True
        )
        watch.start()
        assert worker.stdout is not None
        for text in worker.stdout:
            line = _line(text)
            if "start" in line:
                at.update(case=line["start"], since=time.monotonic())
                skip = line["index"] + 1
            elif "done" in line:
                at.update(case="", since=time.monotonic())
                results.take(backend, line)
            elif "end" in line:
                results.missed(backend, line)
                worker.wait()
                return
        code = worker.wait()
        text = Path(options.errors, f"{backend}-{number}").read_text(encoding="utf-8", errors="replace")
        if at["case"]:
            status = "hung" if at.get("hung") else "crashed"
            results.take(backend, {"done": at["case"], "status": status, "text": f"rc {code}: {text[-400:]}"})
        elif time.monotonic() < until:
            print(f"{backend} {number} ended with {code} between cases: {text[-500:]}", flush=True)
            skip += 1


def _line(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _started(
    backend: str, number: int, options: argparse.Namespace, left: float, skip: int
) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--shard", backend, str(number), "--seconds", str(left)]
    command += ["--seed", str(options.seed), "--device", options.device, "--skip", str(skip)]
    environment = os.environ | {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with Path(options.errors, f"{backend}-{number}").open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)


def _watch(worker: subprocess.Popen[str], at: dict[str, Any], limit: float, until: float) -> None:
    """Kill a process whose case takes too long, or that outlives the time."""
    while worker.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        if at["case"] and now - at["since"] > limit:
            at["hung"] = True
            worker.kill()
        elif now > until:
            at["case"] = ""
            worker.kill()


def run_all(options: argparse.Namespace) -> None:
    """Run every backend's processes at the same time."""
    from common import environment, progress

    named = dict.fromkeys(options.backends.split(","), 1) if options.backends else BACKENDS
    named = {b: BACKENDS.get(b, n) for b, n in named.items()}
    results = Results(Path(options.out))
    progress(f"{sum(named.values())} processes for {options.seconds:.0f} s")
    threads = [
        threading.Thread(target=follow, args=(backend, number, options, results))
        for backend, count in named.items()
        for number in range(count)
    ]
    with tempfile.TemporaryDirectory() as options.errors:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    told = {"seed": options.seed, "seconds": options.seconds}
    results.close(told if options.device == "cpu" else {"environment": environment(), **told})


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="right")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--backends", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case-limit", type=float, default=120.0, help="seconds after which a case is hung")
    parser.add_argument("--one", help="run the case of one line and print its errors")
    parser.add_argument("--shard", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shard is not None:
        from right_run import shard

        backend, number = options.shard[0], int(options.shard[1])
        rest = {
            "seed": options.seed,
            "seconds": options.seconds,
            "device": options.device,
            "skip": options.skip,
        }
        shard(backend, number, fixed=number == 0, **rest)
    elif options.one is not None:
        from right_cases import read
        from right_run import eligible, one

        case = read(options.one)
        print(case, eligible(case, options.device), one(case, options.device), sep="\n")
    else:
        run_all(options)


if __name__ == "__main__":
    main()
