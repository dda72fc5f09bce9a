"""Reads what others measured on cards that nobody here has, and says what today's choices cost there.

python -m benchmarks.public_figures [--worst 10]
"""

from __future__ import annotations

import argparse
from typing import Any

from attnroute.question.host import Host
from attnroute.question.line import parse
from benchmarks.recorded import Record, Time, load
from benchmarks.replay import choices, report


def figures() -> tuple[Record, ...]:
    """Return every figure as a record of its source. No fit may read them: nobody here can check them."""
    found = load("public-figures")
    return tuple(_figure(figure, found["sources"][figure["source"]]) for figure in found["figures"])


def _figure(figure: dict[str, Any], source: dict[str, Any]) -> Record:
    call = parse(figure["call"])
    times = dict(figure.get("ms") or figure["relative"])
    for backend, timed in source.get("same_kernel", {}).items():
        # With a window torch's cuDNN reads a mask tensor, which is another kernel.
        if timed in times and "window" not in figure["call"]:
            times[backend] = times[timed]
    return Record(
        source=figure["source"],
        name=figure["call"],
        host=Host(
            arch=source["arch"], device_name=source["card"], versions={**source["assumed"], **source["said"]}
        ),
        call=call,
        times={backend: Time(time) for backend, time in times.items()},
        stock=None,
        ours=None,
        selected=None,
        part="unseen",
    )


def main() -> None:
    """Print what today's choices cost on these cards."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worst", type=int, default=10)
    print(report(choices("everything", figures()), worst=parser.parse_args().worst))


if __name__ == "__main__":
    main()
