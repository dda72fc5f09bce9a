"""The examples of a row notice every slip that it invites, and the lint names those that none notices."""

from __future__ import annotations

import pytest
from support.own_tables import put

from attnroute.engine.examples import Examples
from attnroute.engine.pins import loose_ends, loose_ends_of
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.tables.slips import slips

ROW = """
[[rule]]
name = "mine"
{said}
because = "of this test"
refuses = {refuses}
takes = {takes}
evidence = [{{ kind = "own", ref = "this test" }}]
"""
LINE = "bf16 b1 hq8 sq64"


def row_of(folder, said, refuses, takes):
    text = ROW.format(said=said, refuses=refuses, takes=takes)
    tables = Tables((shipped_folder(), put(folder, {"sm_90/flash.toml": text})))
    (row,) = (row for row in tables.all_rows() if row.id == "sm_90/flash/mine")
    return row, tables


def unnoticed(folder, said, refuses, takes):
    row, tables = row_of(folder, said, refuses, takes)
    return {end.slip.said: end.example for end in loose_ends_of(row, Examples(tables), tables)}


def test_no_slip_in_a_shipped_row_passes_unnoticed():
    assert list(map(str, loose_ends(load()))) == []


def test_a_bound_without_neighbours_is_told_with_calls_that_would_do(tmp_path):
    found = unnoticed(tmp_path, 'requires = { head_dim_qk = "<=64" }', f'"{LINE} d128"', f'"{LINE} d32"')
    assert found == {
        "requires head_dim_qk <=63 in place of head_dim_qk <=64": "bf16 b1 hq8 hkv8 sq64 skv64 d64",
        "requires head_dim_qk <=65 in place of head_dim_qk <=64": "bf16 b1 hq8 hkv8 sq64 skv64 d65",
    }


def test_a_bound_between_its_neighbours_is_pinned(tmp_path):
    said = 'requires = { head_dim_qk = "<=64" }'
    assert unnoticed(tmp_path, said, f'"{LINE} d65"', f'"{LINE} d64"') == {}


def test_a_release_on_each_side_pins_a_window(tmp_path):
    said = 'versions = { torch = ">=2.8, <2.10" }\nrequires = { head_dim_qk = "<=64" }'
    refuses, takes = f"{LINE} d65 on torch=", f"{LINE} d65 on torch="
    pinned = unnoticed(
        tmp_path / "pinned", said, f'"{refuses}2.8.0|2.9.1"', f'["{LINE} d64", "{takes}2.7.1|2.10.0"]'
    )
    assert pinned == {}
    loose = unnoticed(tmp_path / "loose", said, f'"{LINE} d65"', f'"{LINE} d64"')
    assert set(loose) == {
        "versions.torch left out",
        "versions.torch <2.10 in place of >=2.8, <2.10",
        "versions.torch >=2.7.1, <2.10 in place of >=2.8, <2.10",
        "versions.torch >=2.8, <2.11.0 in place of >=2.8, <2.10",
        "versions.torch >=2.8, <2.9.1 in place of >=2.8, <2.10",
        "versions.torch >=2.8 in place of >=2.8, <2.10",
        "versions.torch >=2.9.0, <2.10 in place of >=2.8, <2.10",
    }


@pytest.mark.parametrize(
    ("said", "slip"),
    [
        ("requires = { causal = false }", "causal = true in place of causal = false"),
        ('requires = { dtype = ["float16", "bfloat16"] }', "dtype one of float16 in place of"),
        ('requires = { dtype = ["float16"] }', "dtype one of float16, float32 in place of"),
        ('requires = { head_dim_qk = "%8" }', "head_dim_qk %16 in place of head_dim_qk %8"),
        ('requires = { head_dim_qk = "%8" }', "head_dim_qk %4 in place of head_dim_qk %8"),
        ('requires = { head_dim_qk = ">=8, <64" }', "head_dim_qk <64 in place of head_dim_qk >=8, <64"),
        ("when = { batch = 2 }\nrequires = { causal = false }", "when without batch = 2"),
        ("requires = { any_of = [{ batch = 2 }, { batch = 4 }] }", "requires without batch = 4"),
        ('requires = { seqlen_q = "<=seqlen_kv" }', "seqlen_q >seqlen_kv in place of"),
        ('requires = { seqlen_q = "<1600000" }', "seqlen_q <1700000 in place of"),
        ('phase = "training"\nrequires = "never"', "phase left out in place of training"),
        ('phase = "training"\nrequires = "never"', "phase inference in place of training"),
    ],
)
def test_what_a_slip_makes_of_a_row(said, slip, tmp_path):
    row, _ = row_of(tmp_path, said, f'"{LINE} d64"', f'"{LINE} d64"')
    assert any(slip in one.said for one in slips(row.rule, {}))


def test_a_version_that_no_release_lies_between_is_no_slip(tmp_path):
    said = 'versions = { torch = "<2.8" }\nrequires = "never"'
    row, _ = row_of(tmp_path, said, f'"{LINE} d64"', f'"{LINE} d64"')
    assert [one.said for one in slips(row.rule, {"torch": ["2.8.0", "2.9.0"]})] == [
        "versions.torch left out",
        "versions.torch <2.9.0 in place of <2.8",
    ]
