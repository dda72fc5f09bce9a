"""Which preferences an explanation names, and with which reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnroute.engine.rank import why_placed
from attnroute.tables.preferences import placed
from attnroute.tables.rows import PreferenceRow
from attnroute.tables.schema import Preference


def row(name, *first):
    """A preference whose reason is its name with an s."""
    fields = {"name": name, "first": list(first), "because": f"{name}s"}
    evidence = [{"kind": "own", "ref": "this test"}]
    return PreferenceRow(name, Preference.model_validate({**fields, "evidence": evidence}), Path())


SMALL, MIDDLE, BASE = row("small", "c"), row("middle", "b", "a"), row("base", "a", "b", "c", "e", "d")
ROWS = (SMALL, MIDDLE, BASE)


@pytest.mark.parametrize(
    ("able", "said"),
    [
        ("abcde", "small, middle, base: smalls"),
        ("abde", "middle, base: middles"),
        ("bd", "middle: middles"),
        ("ad", "middle: middles"),
        ("c", "small: smalls"),
        ("d", "base: bases"),
        ("xy", "no preference applies"),
        ("", "no preference applies"),
    ],
)
def test_rows_are_named_that_put_a_backend_where_it_is(able, said):
    assert why_placed(ROWS, tuple(able)) == said


def test_a_row_that_moves_nothing_is_not_named():
    assert why_placed((row("odd", "a"), MIDDLE, BASE), tuple("ade")) == "odd, base: odds"


def test_backends_that_no_row_names_come_last_by_name():
    assert placed(ROWS, ["y", "d", "x", "b", "a"]) == ("b", "a", "d", "x", "y")
