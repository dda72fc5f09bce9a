"""Fills the tables of pages and of the demo from results and models, and draws the pictures.

python -m benchmarks.report                  # needs matplotlib, which the extra `docs` brings
python -m benchmarks.report --check          # says what is not as the results say; needs no matplotlib
python -m benchmarks.report --out elsewhere  # draws the pictures into another folder, and fills nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from attnroute.cli._demo_recorded import FILE
from benchmarks.report import data, pictures, tables

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "distributed.md")
OUT = ROOT / "docs" / "benchmarks"


def stale() -> list[str]:
    """Return the names of files that are not what the results say."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    found = [page.name for page, text in texts.items() if tables.filled(text) != text]
    found += [FILE.name] if FILE.read_text(encoding="utf-8") != demo() else []
    return found + [name for name in pictures.PICTURES if not pictures.is_current(OUT, name)]


def demo() -> str:
    """Return the file of `attnroute demo`."""
    return json.dumps(data.demo(), indent=1) + "\n"


def main() -> int:
    """Write, or check what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is not current"
    )
    options = parser.parse_args()
    if options.check:
        found = stale()
        if found:
            print(f"not as the results say: {', '.join(found)}; run `python -m benchmarks.report`")
        return 1 if found else 0
    pictures.write(options.out)
    if options.out == OUT:
        FILE.write_text(demo(), encoding="utf-8")
        for page in PAGES:
            page.write_text(tables.filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
