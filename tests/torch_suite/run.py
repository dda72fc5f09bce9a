"""PyTorch's own tests of scaled_dot_product_attention, test/test_transformers.py, inside of `route_sdpa()`.

    python tests/torch_suite/run.py [--source FOLDER] [--every N] [PART_OF_A_NAME ...]

Without `--source`, the file comes from PyTorch's repository at the tag of the installed torch. Each test runs
in a block; one that fails there runs once more without, so that what fails anyway counts for nobody.
"""

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
import tempfile
import time
import tomllib
import unittest
import urllib.request
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

import attnroute

CLASSES = ("TestTransformers", "TestSDPAFailureModes", "TestSDPA", "TestSDPACpuOnly", "TestAttnBias")
SOURCE = "https://raw.githubusercontent.com/pytorch/pytorch/v{version}/test/test_transformers.py"
NOT_APPLICABLE = Path(__file__).with_name("not_applicable.toml")


def main() -> int:
    """Run the tests, print counts; 1 where a test fails in the block alone, or a reason is out of date."""
    asked = _arguments()
    warnings.simplefilter("ignore")
    folder = asked.source or _downloaded()
    reasons = tomllib.loads(NOT_APPLICABLE.read_text(encoding="utf-8"))
    counts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    begin, routed = time.time(), 0
    for test in _tests(folder, asked.names, asked.every):
        name = test.id().partition(".")[2]
        reason = next((pattern for pattern in reasons if re.fullmatch(pattern, name)), None)
        verdict, calls, why = _ran(test)
        if verdict == "fails in the block" and reason is not None:
            verdict = "does not apply"
            seen[reason] += 1
        elif verdict == "fails in the block":
            print(f"{name}\n{why}", flush=True)
        counts[verdict] += 1
        routed += calls
    for verdict, count in sorted(counts.items()):
        print(f"{count:6} {verdict}")
    for reason, count in seen.items():
        print(f"{count:6} do not apply: {reasons[reason]}")
    print(f"{sum(counts.values())} tests, {routed} calls on attnroute, {time.time() - begin:.0f} s")
    idle = [] if asked.names or asked.every > 1 else sorted(set(reasons) - set(seen))
    for pattern in idle:
        print(f"no test that {NOT_APPLICABLE.name} lists fails any more: {pattern}")
    return int(bool(counts["fails in the block"] or idle or not routed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, help="the folder with test_transformers.py")
    parser.add_argument("--every", type=int, default=1, help="run one test of N")
    parser.add_argument("names", nargs="*", help="run tests whose name has one of these parts")
    return parser.parse_args()


def _downloaded() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="attnroute-torch-suite-"))
    url = SOURCE.format(version=torch.__version__.partition("+")[0])
    print(f"fetching {url}", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            (folder / "test_transformers.py").write_bytes(answer.read())
    except OSError as error:
        sys.exit(f"requires {url}; got {error}; pass --source FOLDER with the file of that tag.")
    return folder


def _tests(folder: Path, names: list[str], every: int) -> Iterator[unittest.TestCase]:
    sys.path.insert(0, str(folder))
    module = importlib.import_module("test_transformers")
    loader = unittest.defaultTestLoader
    found = [
        test
        for name in CLASSES
        for test in loader.loadTestsFromTestCase(getattr(module, f"{name}CPU"))
        if not names or any(part in test.id() for part in names)
    ]
    yield from found[::every]


def _ran(test: unittest.TestCase) -> tuple[str, int, str]:
    """Return the verdict on a test, how many calls of it were routed, and its failure."""
    again = type(test)(test._testMethodName)
    with attnroute.trace() as trace, attnroute.route_sdpa():
        inside = _result(test)
    calls = sum(call.count for call in trace.calls)
    if inside.skipped:
        return "skipped by torch", calls, ""
    if inside.wasSuccessful():
        return ("passes, routed" if calls else "passes, nothing to route"), calls, ""
    verdict = "fails in the block" if _result(again).wasSuccessful() else "fails without attnroute too"
    return verdict, calls, "".join(text for _, text in (*inside.failures, *inside.errors))


def _result(test: unittest.TestCase) -> unittest.TestResult:
    torch.compiler.reset()
    result = unittest.TestResult(stream=io.StringIO())
    test.run(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
