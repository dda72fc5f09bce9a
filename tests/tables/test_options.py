"""Rows of options: where they hold, in which order they apply, and what an architecture says of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnroute.engine.classes import class_of
from attnroute.engine.evaluate import Form, prepared
from attnroute.engine.options import Options, options_for
from attnroute.errors import TableError
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.folders import Tables

EVIDENCE = 'evidence = [{ kind = "own", ref = "this test" }]'
BACKEND = """
[backend]
title = "A backend"
provider = "torch"
needs = ["torch", "triton"]
versions_known = { torch = ">=2.5" }
operators = ["aten::mm"]
module = "attnroute.executors.aten.math"
memory = "linear"
first_call_seconds = [1, 2]
"""
HOST = Host(arch="sm_90", versions={"torch": "2.11.0"})
CALL = Call(
    dtype="bfloat16",
    batch=1,
    num_heads_q=4,
    num_heads_kv=4,
    seqlen_q=256,
    seqlen_kv=256,
    head_dim_qk=128,
    head_dim_v=128,
)


def option(name, values, when="", more=""):
    said = f'[[option]]\nname = "{name}"\nset = {{ {values} }}\nbecause = "of this test"\n{EVIDENCE}\n'
    return f"{said}{f'when = {{ {when} }}' if when else ''}\n{more}\n"


def arch(inherits=""):
    parent = f'inherits = "{inherits}"\n' if inherits else ""
    head = f'cards = ["a card"]\nbackends = []\n{parent}{EVIDENCE}\n'
    return f'{head}[[prefer]]\nname = "default"\nfirst = ["fast"]\nbecause = "of this test"\n{EVIDENCE}\n'


def tables(folder: Path, **files: str) -> Tables:
    """Write files, by their path with two underscores for the slash, and read them."""
    rest = {"sm_90__arch": arch(), "sm_90__fast": "", "any__fast": BACKEND}
    for name, text in {**rest, **files}.items():
        path = folder / f"{name.replace('__', '/')}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Tables((folder,))


def options(call, host, tables):
    return options_for(Form(call), prepared(tables, host)["fast"])


def values(tables, call=CALL, host=HOST):
    return dict(options(call, host, tables).values)


def test_without_a_row_a_kernel_chooses_for_itself(tmp_path):
    assert options(CALL, HOST, tables(tmp_path)) == Options()


def test_later_rows_replace_earlier_ones_by_name(tmp_path):
    found = tables(
        tmp_path,
        any__fast=BACKEND + option("all", "A = 1, B = 1, C = 1, D = 1"),
        shared__tiles=option("tiles", "B = 2, C = 2, D = 2"),
        sm_90__fast='include = ["shared/tiles"]\n' + option("own", "C = 3, D = 3") + option("last", "D = 4"),
    )
    said = options(CALL, HOST, found)
    assert said.values == (("A", 1), ("B", 2), ("C", 3), ("D", 4))
    assert said.rows == ("any/fast/all", "shared/tiles/tiles", "sm_90/fast/own", "sm_90/fast/last")


def test_what_is_inherited_comes_before_what_is_added(tmp_path):
    """An overlay's file adds to what an architecture inherits, and its rows are the later ones."""
    base, mine = tmp_path / "base", tmp_path / "mine"
    tables(base, sm_103__arch=arch("sm_90"), sm_90__fast=option("parent", "A = 1, B = 1"))
    (mine / "sm_103").mkdir(parents=True)
    (mine / "sm_103" / "fast.toml").write_text(option("mine", "B = 2"), encoding="utf-8")
    host = Host(arch="sm_103", versions=HOST.versions)
    assert values(Tables((base,)), host=host) == {"A": 1, "B": 1}
    assert values(Tables((base, mine)), host=host) == {"A": 1, "B": 2}


def test_an_overlay_replaces_the_row_of_the_same_id(tmp_path):
    tables(tmp_path / "base", sm_90__fast=option("one", "A = 1") + option("two", "A = 2"))
    tables(tmp_path / "mine", sm_90__fast=option("one", "A = 3, B = 3"))
    both = Tables((tmp_path / "base", tmp_path / "mine"))
    assert values(both) == {"A": 2, "B": 3}


@pytest.mark.parametrize(
    ("guard", "host", "call", "holds"),
    [
        ("", HOST, CALL, True),
        ("head_dim_qk = 128", HOST, CALL, True),
        ("head_dim_qk = 64", HOST, CALL, False),
        ("any_of = [{ head_dim_qk = 64 }, { seqlen_q = 256 }]", HOST, CALL, True),
        ('seqlen_q = ">=128"', HOST, CALL.with_(context={"dynamic": ("seqlen_q",)}), False),
        ('seqlen_q = ">=1"', HOST, CALL.with_(context={"dynamic": ("seqlen_q",)}), True),
    ],
)
def test_a_row_applies_only_where_its_guard_certainly_holds(guard, host, call, holds, tmp_path):
    found = tables(tmp_path, sm_90__fast=option("one", "A = 1", guard))
    assert values(found, call, host) == ({"A": 1} if holds else {})


def test_versions_and_phase_guard_a_row(tmp_path):
    newer = option("newer", "A = 1", more='versions = { torch = ">=2.11" }')
    training = option("training", "B = true", more='phase = "training"')
    found = tables(tmp_path, sm_90__fast=newer + training)
    assert values(found) == {"A": 1}
    assert values(found, host=HOST.with_versions({"torch": "2.10.0"})) == {}
    assert values(found, host=HOST.with_versions({"torch": None})) == {}
    assert values(found, CALL.with_(phase="training")) == {"A": 1, "B": True}


def test_calls_that_get_other_options_are_of_another_class(tmp_path):
    """A decision that is reused for another length must not hand over the tiles of the first."""
    short, middle, long = (CALL.with_(seqlen_q=n, seqlen_kv=n) for n in (64, 256, 4096))
    split = tables(tmp_path / "split", sm_90__fast=option("long", "A = 1", 'seqlen_q = ">=128"'))
    plain = tables(tmp_path / "plain")
    assert class_of(short, "sm_90", plain) == class_of(middle, "sm_90", plain)
    assert class_of(short, "sm_90", split) != class_of(middle, "sm_90", split)
    assert class_of(middle, "sm_90", split) == class_of(long, "sm_90", split)


def test_a_name_is_unique_among_rules_and_options(tmp_path):
    rule = f'[[rule]]\nname = "one"\nrequires = "never"\nbecause = "of this test"\n{EVIDENCE}\n'
    with pytest.raises(TableError, match="one: name requires a unique value"):
        tables(tmp_path, sm_90__fast=rule + option("one", "A = 1")).options("sm_90", "fast")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (option("one", ""), "sm_90/fast.toml: option one: set: "),
        (option("one", '"A B" = 1'), "sm_90/fast.toml: option one: set"),
        (option("one", "A = 1", "head_dmi = 1"), 'got "head_dmi"'),
        (option("one", "A = 1", more='versions = { torch = "new" }'), 'got "new"'),
    ],
)
def test_a_malformed_row_names_itself(text, said, tmp_path):
    with pytest.raises(TableError) as error:
        tables(tmp_path, sm_90__fast=text).options("sm_90", "fast")
    assert said in str(error.value)


def test_an_architecture_may_need_something_else(tmp_path):
    found = tables(
        tmp_path,
        cpu__arch=arch(),
        cpu__fast='needs = ["torch", "c++"]\nfirst_call_seconds = [6, 30]\n',
        sm_103__arch=arch("sm_90"),
    )
    assert found.info("sm_90", "fast") == found.info("sm_103", "fast") == found.backends["fast"]
    there = found.info("cpu", "fast")
    assert (there.needs, there.first_call_seconds) == (["torch", "c++"], (6, 30))
    assert there.title == found.backends["fast"].title
