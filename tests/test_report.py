"""Pages, pictures and the README say what the committed measurements say: `python -m benchmarks.report`."""

from __future__ import annotations

import re

import pytest

from benchmarks.kinds import KINDS
from benchmarks.report import __main__ as report
from benchmarks.report import data, pictures, tables


def test_tables_and_pictures_are_what_the_results_say():
    assert report.stale() == [], "run `python -m benchmarks.report`"


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_a_number_that_somebody_typed_is_noticed_and_written_anew(page):
    text = page.read_text(encoding="utf-8")
    typed = re.sub(r"\| (\d+\.\d+) ", r"| 9\1 ", text, count=1)
    assert typed != text
    assert tables.filled(typed) == text


def test_every_block_is_shown_somewhere():
    shown = {mark[1] for page in report.PAGES for mark in tables.MARKED.findall(page.read_text("utf-8"))}
    assert shown == tables.BLOCKS.keys()
    with pytest.raises(KeyError):
        tables.filled("<!-- benchmarks: nothing -->\n<!-- end -->")


def test_a_picture_of_other_numbers_is_not_current(tmp_path):
    picture = pictures.PICTURES["calls"]
    other = picture._replace(shown=lambda: picture.shown()[1:])
    (tmp_path / "calls.svg").write_text(f"<svg>data {other.digest}</svg>", encoding="utf-8")
    assert not pictures.is_current(tmp_path, "calls")
    (tmp_path / "calls.svg").write_text(f"<svg>data {picture.digest}</svg>", encoding="utf-8")
    assert pictures.is_current(tmp_path, "calls")


def test_what_is_shown_are_recorded_times():
    for row in data.rows():
        choice = row.everything
        if choice:
            assert choice.took_ms == row.record.times[choice.selected].total_ms
            assert data.best_ms(choice) <= choice.took_ms * 1.0001
    assert {call["kind"] for call in data.calls()} == set(KINDS)
    assert all(len(points) > 10 for points in data.speed_ups().values())


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0206, "0.021"), (0.25, "0.250"), (1.1, "1.10"), (66.0, "66.0"), (153.2, "153")]
)
def test_numbers_have_three_digits_that_count(value, shown):
    assert tables.number(value) == shown
