"""What a process goes through in weeks, in minutes: threads, tasks, forks, interrupts, ever new shapes.

`python -m nox -s soak` runs every check, `python tests/soak/run.py fork memory` some of them. Each one runs
in a process of its own and prints its figures as JSON; the exit code is 1 where one of them fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
CHECKS = {
    "memory": "growing.py",
    "threads": "together.py",
    "tasks": "together.py",
    "fork": "together.py",
    "freed": "together.py",
    "compile": "together.py",
    "interrupts": "interrupted.py",
    "readonly": "readonly.py",
}
"""The longest first. The file of each takes its name."""
LIMIT_SECONDS = 560


def run(name: str) -> bool:
    """Run one check, print what it printed, and return whether it holds."""
    start = time.monotonic()
    # Workers share two cores; a thread pool of OpenMP does not live through a fork.
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent.parent), env.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / CHECKS[name]), name],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = -1, f"{error.stdout or ''}\nstill running after {LIMIT_SECONDS} s"
    state = "holds" if code == 0 else "FAILS"
    seconds = time.monotonic() - start
    print(f"{name:<10} {state} after {seconds:.0f} s  {said.strip()}", flush=True)
    return code == 0


def main() -> int:
    """Run the named checks, two at a time."""
    names = sys.argv[1:] or list(CHECKS)
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        print(f"soak requires names among {', '.join(CHECKS)}; got {unknown[0]}.")
        return 2
    with ThreadPoolExecutor(2) as pool:
        return 0 if all(list(pool.map(run, names))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
