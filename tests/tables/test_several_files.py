"""Rows that several files share: each counts as a row of every one of them."""

from __future__ import annotations

import pytest
from support.small_tables import BACKEND, EVIDENCE, ids, rule, small_tables, write

from attnroute.errors import TableError
from attnroute.tables.folders import Tables


@pytest.fixture
def base(tmp_path):
    return small_tables(tmp_path)


BOTH = ["any/fast", "any/other"]


def several(name, files, evidence=EVIDENCE):
    names = ", ".join(f'"{file}"' for file in files)
    return rule(name).replace(EVIDENCE, f"files = [{names}]\n{evidence}")


def test_a_row_of_several_files_is_one_of_each(base):
    write(base, {"any/several": several("both", BOTH), "any/alone": BACKEND})
    tables = Tables((base,))
    assert ids(tables, "sm_80") == ["any/fast/both", "any/fast/everywhere", "sm_80/fast/ampere"]
    assert ids(tables, "sm_80", "other") == ["any/other/both"]
    assert {"any/fast/both", "any/other/both"} < {row.id for row in tables.all_rows()}
    assert not any("/alone/" in row.id for row in tables.all_rows())
    assert {row.file.name for row in tables.rules("sm_80", "other")} == {"several.toml"}


def test_a_row_of_several_files_describes_backends_on_their_architectures(base):
    """As the files would: what is inherited is replaced, and a backend that was unknown no longer is."""
    write(base, {"any/several": several("both", ["sm_89/fast", "sm_90/other"])})
    tables = Tables((base,))
    assert ids(tables, "sm_89") == ["any/fast/everywhere", "sm_89/fast/both", "sm_89/fast/ada"]
    assert ids(tables, "sm_90", "other") == ["sm_90/other/both"]


def test_a_row_of_several_files_may_stand_in_shared_ones(base):
    head = 'include = ["shared/wide"]\n'
    write(base, {"any/several": several("both", ["shared/wide", "sm_89/fast"]), "shared/wide": rule("own")})
    write(base, {"sm_80/fast": head + rule("ampere")})
    found = ids(Tables((base,)), "sm_80")
    assert found == ["any/fast/everywhere", "shared/wide/both", "shared/wide/own", "sm_80/fast/ampere"]


def test_evidence_about_one_file_is_not_evidence_about_another(base):
    items = ('{ kind = "own", ref = "of both" }', '{ file = "any/fast", kind = "docs", ref = "of one" }')
    write(base, {"any/several": several("both", BOTH, f"evidence = [{', '.join(items)}]")})
    tables = Tables((base,))
    cited = {b: [e.ref for e in tables.rules("sm_80", b)[0].rule.evidence] for b in ("fast", "other")}
    assert cited == {"fast": ["of both", "of one"], "other": ["of both"]}


@pytest.mark.parametrize(
    ("files", "evidence", "sentence"),
    [
        (["any/fast"], EVIDENCE, "at least 2 items"),
        (["any/fast", "any/othr"], EVIDENCE, 'backends of the tables .*; got othr; did you mean "other"'),
        (["any/fast", "sm_8O/fast"], EVIDENCE, "String should match pattern|got sm_8O/fast"),
        (["any/fast", "sm_81/fast"], EVIDENCE, "existing ones, or an architecture's; got sm_81/fast"),
        (["any/fast", "shared/wide"], EVIDENCE, "existing ones, or an architecture's; got shared/wide"),
        (BOTH, 'evidence = [{ file = "any/fast", kind = "own", ref = "x" }]', "evidence about any/other"),
        (BOTH, 'evidence = [{ file = "any/math", kind = "own", ref = "x" }]', "has evidence about any/math"),
    ],
)
def test_a_row_of_several_files_must_be_about_them(files, evidence, sentence, base):
    write(base, {"any/several": several("both", files, evidence)})
    with pytest.raises(TableError, match=rf"any/several\.toml.*({sentence})"):
        Tables((base,)).rules("sm_80", "fast")


def test_a_name_stands_once_in_each_file(base):
    write(base, {"any/several": several("both", BOTH) + several("everywhere", BOTH)})
    assert len(Tables((base,)).rules("sm_80", "other")) == 2
    with pytest.raises(TableError, match="rule everywhere: name requires a unique value"):
        Tables((base,)).rules("sm_80", "fast")


def test_an_overlay_replaces_a_row_of_several_files_in_one(base, tmp_path):
    write(base, {"any/several": several("both", BOTH)})
    mine = write(tmp_path / "mine", {"any/fast": rule("both", "head_dim_qk = 16")})
    rows = [Tables((base, mine)).rules("sm_80", backend)[0].rule for backend in ("fast", "other")]
    assert [row.requires for row in rows] == [{"head_dim_qk": 16}, {"head_dim_qk": 8}]
