"""What is reported of a kernel is said, or denied, of every backend that runs it; a lost sibling is found."""

from __future__ import annotations

import shutil

import pytest

from attnroute.tables.folders import Tables
from attnroute.tables.read import shipped_folder
from attnroute.tables.siblings import siblings

ROW = """
[[rule]]
name = "extra"
requires = {{ head_dim_qk = "<=100" }}
because = "of this test"
refuses = "bf16 b1 hq8 sq64 d104"
takes = "bf16 b1 hq8 sq64 d96"
{more}
evidence = [{{ kind = "issue", ref = "owner/name#1" }}]
"""


@pytest.fixture
def told(tmp_path):
    """Say what is wrong with a copy of the tables to which rows are added, or in which a text is another."""
    root = tmp_path / "tables"
    shutil.copytree(shipped_folder(), root)

    def tell(*added, changed=None):
        for file, more in added:
            path = root / file
            path.write_text(path.read_text(encoding="utf-8") + ROW.format(more=more), encoding="utf-8")
        if changed:
            file, before, after = changed
            text = (root / file).read_text(encoding="utf-8")
            assert text.count(before) == 1
            (root / file).write_text(text.replace(before, after), encoding="utf-8")
        return [str(problem) for problem in siblings(Tables((root,)))]

    return tell


def test_the_shipped_tables_say_it_of_every_backend(told):
    assert told() == []


def test_a_lost_sibling_is_named_with_row_and_issue(told):
    (said,) = told(("any/fa2.toml", ""))
    assert said == (
        "any/fa2.toml: extra: evidence: requires a row of flash that cites owner/name#1 too, as it runs the "
        "same kernel, or a reason; got neither; add the row, or not_for.flash here."
    )


def test_each_backend_of_three_is_asked(told):
    first, second = told(("sm_90/cudnn.toml", ""))
    assert "a row of cudnn_fe that" in first
    assert "a row of te that" in second


def test_a_row_of_the_other_on_another_architecture_is_enough(told):
    assert told(("sm_90/fa4.toml", ""), ("sm_100/flex_fa4.toml", "")) == []


def test_a_row_of_both_asks_for_none(told):
    assert told(("shared/fa4_package.toml", "")) == []


def test_a_backend_without_kin_is_asked_for_none(told):
    assert told(("any/fa3.toml", ""), ("cpu/flash.toml", "")) == []


def test_a_reason_is_enough(told):
    assert told(("any/fa2.toml", 'not_for = { flash = "torch has no such argument" }')) == []


def test_each_row_that_cites_the_issue_gives_its_reason(told):
    reasons = 'not_for = { flash = "torch has no such argument" }'
    (said,) = told(("any/fa2.toml", reasons), ("sm_80/fa2.toml", ""))
    assert said.startswith("sm_80/fa2.toml: extra: evidence: ")


@pytest.mark.parametrize(
    ("backend", "reason", "sentence"),
    [
        ("te", "it is another kernel", "runs the same kernel (flash); got te."),
        ("fa2", "it is the same backend", "runs the same kernel (flash); got fa2."),
    ],
)
def test_a_reason_names_another_backend_of_the_kernel(told, backend, reason, sentence):
    said = told(("any/fa2.toml", f'not_for = {{ {backend} = "{reason}" }}'))
    assert next(line for line in said if ": not_for: " in line).endswith(sentence)


def test_a_reason_that_denies_nothing(told):
    (said,) = told(("any/fa2.toml", 'not_for = { flash = "it has none" }'), ("sm_90/flash.toml", ""))
    assert "requires an issue here that no row of flash cites; got none; take it away." in said


def test_a_kernel_of_one_backend(told):
    kernels = 'kernels = ["cudnn"]'
    (said,) = told(changed=("any/te.toml", kernels, 'kernels = ["cudn"]'))[:1]
    assert said == "any/te.toml: backend.kernels: requires a kernel that another backend runs too; got cudn."
