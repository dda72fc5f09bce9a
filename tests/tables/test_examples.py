"""Both sides of every row, by its own examples, and what is said of an example on the wrong side."""

from __future__ import annotations

import pytest
from support.own_tables import put

from attnroute.cli import main
from attnroute.engine.examples import Examples, read_example
from attnroute.settings import reload
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder

SHIPPED = load()
EXAMPLES = Examples(SHIPPED)
ROW = """
[[rule]]
name = "mine"
{guard}
requires = {requires}
because = "of this test"
{examples}
evidence = [{{ kind = "own", ref = "this test" }}]
"""
NARROW, WIDE = "bf16 b1 hq8 sq64 d8", "bf16 b1 hq8 sq64 d16"


@pytest.mark.parametrize("row", SHIPPED.all_rows(), ids=lambda row: row.id)
def test_both_sides(row):
    assert list(map(str, EXAMPLES.problems_of(row))) == []


def told(folder, examples, guard="", requires='{ head_dim_qk = "<=8" }'):
    """Return what is said of the examples of a row about flash on sm_90, which an overlay adds."""
    text = ROW.format(examples=examples, guard=guard, requires=requires)
    overlay = folder / str(len(list(folder.iterdir())))
    tables = Tables((shipped_folder(), put(overlay, {"sm_90/flash.toml": text})))
    (row,) = (row for row in tables.all_rows() if row.id == "sm_90/flash/mine")
    return [str(problem) for problem in Examples(tables).problems_of(row)]


def test_examples_on_their_sides_are_right(tmp_path):
    assert (
        told(tmp_path, f'refuses = ["{WIDE}", "{WIDE} train"]\ntakes = "{NARROW} on sm_90 torch=2.9.0"') == []
    )


@pytest.mark.parametrize(
    ("examples", "sentence"),
    [
        (
            f'refuses = "{NARROW}"',
            "refuses: requires a call that the row rejects; got pass for flash",
        ),
        (f'takes = "{WIDE}"', "takes: requires a call that the row lets pass; got fail for flash"),
        (f'takes = ["{NARROW}", "{WIDE}"]', f'got fail for flash on sm_90 in "{WIDE}".'),
        ('refuses = "bf16 b1 hq8 sq64 d8 caual"', 'got "caual"; did you mean "causal"?'),
        ('refuses = "bf16 b1 hq8 sq64 d8 dense=7x64"', "requires a shape that broadcasts"),
        (f'refuses = "{WIDE} on sm_80"', "requires an architecture where the row holds; got sm_80"),
    ],
)
def test_an_example_on_the_wrong_side_is_named(examples, sentence, tmp_path):
    (found,) = told(tmp_path, examples)
    assert found.startswith("sm_90/flash.toml: mine: ")
    assert sentence in found


def test_what_an_example_leaves_open_is_in_the_range_of_the_row(tmp_path):
    guard = 'versions = { torch = ">=2.6, <2.8" }'
    examples = f'refuses = ["{WIDE}", "{WIDE} on torch=2.6.0"]\ntakes = ["{WIDE} on torch=2.8.0", "{NARROW}"]'
    assert told(tmp_path, examples, guard) == []
    (found,) = told(tmp_path, f'refuses = "{WIDE} on torch=2.5.1"', guard)
    assert "got not_applicable" in found


def test_a_repair_must_lift_what_it_is_named_for(tmp_path):
    examples = f'refuses = "{WIDE}"'
    (found,) = told(tmp_path, examples, 'repair = "pad_head_dim"')
    assert "requires a call that pad_head_dim makes acceptable to the row" in found
    examples = 'refuses = "bf16 b1 hq8 sq64 d4"'
    assert told(tmp_path, examples, 'repair = "pad_head_dim"', '{ head_dim_qk = "%8" }') == []


@pytest.mark.parametrize(
    ("requires", "guard", "missing"),
    [
        ('{ head_dim_qk = "<=8" }', "", ["refuses", "takes"]),
        ('"never"', 'versions = { torch = "<2.6" }', ["refuses", "takes"]),
        ('"never"', "", ["refuses"]),
    ],
)
def test_a_row_without_examples_fails_the_lint(requires, guard, missing, tmp_path, monkeypatch, capsys):
    put(tmp_path, {"sm_90/flash.toml": ROW.format(examples="", guard=guard, requires=requires)})
    monkeypatch.setenv("ATTNROUTE_TABLES", str(tmp_path))
    reload()
    assert main(["tables", "lint"]) == 5
    monkeypatch.undo()
    reload()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:3] for line in lines] == [["sm_90/flash.toml", "mine", f] for f in missing]


def test_a_wrong_example_fails_the_lint(tmp_path, monkeypatch, capsys):
    examples = f'refuses = "{NARROW}"\ntakes = "{WIDE}"'
    row = ROW.format(examples=examples, guard="", requires='{ head_dim_qk = "<=8" }')
    put(tmp_path, {"sm_90/flash.toml": row})
    monkeypatch.setenv("ATTNROUTE_TABLES", str(tmp_path))
    reload()
    assert main(["tables", "lint"]) == 5
    monkeypatch.undo()
    reload()
    assert capsys.readouterr().out.count("sm_90/flash.toml: mine: ") == 2


def test_a_row_is_printed_with_its_examples(capsys):
    assert main(["rule", "any/fa3/diagonal-at-bottom-right"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("refuses    bf16") for line in lines)
    assert any(line.startswith("takes      bf16") for line in lines)


def test_an_example_is_a_call_and_what_matters_of_the_machine():
    example = read_example(f"{NARROW} on sm_90 torch=2.9.0 cuda=12.8")
    assert (example.arch, example.versions) == ("sm_90", {"torch": "2.9.0", "cuda": "12.8"})
    assert read_example(NARROW).versions == {}
    assert read_example(NARROW).call == example.call
