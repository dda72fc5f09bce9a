"""The shipped tables are sound, and each check fires on a copy that is broken in one place."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
from support.own_tables import own_overlay

from attnroute.tables.folders import Tables
from attnroute.tables.lint import lint
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder

TODAY = datetime.date(2026, 12, 31)
ROW = """
[[rule]]
name = "{name}"
kind = "{kind}"
versions = {{ {versions} }}
requires = {{ head_dim_qk = "<=100" }}
because = "of this test"
refuses = "bf16 b1 hq8 sq64 d104"
takes = "bf16 b1 hq8 sq64 d96"
evidence = [{{ kind = "{evidence}", ref = "nowhere", date = 2026-11-27 }}]
{more}
"""


OPTION = """
[[option]]
name = "{name}"
versions = {{ {versions} }}
set = {{ BLOCK_M = 32 }}
because = "of this test"
evidence = [{{ kind = "{evidence}", ref = "nowhere", date = 2026-11-27 }}]
"""


def option(name="extra", versions="", evidence="own"):
    return OPTION.format(name=name, versions=versions, evidence=evidence)


def row(name="extra", kind="limit", versions="", evidence="own", more=""):
    return ROW.format(name=name, kind=kind, versions=versions, evidence=evidence, more=more)


@pytest.fixture
def broken(tmp_path):
    """A copy of the shipped tables, with the folder of measurements beside it, as in the repository."""
    shutil.copytree(shipped_folder(), tmp_path / "tables")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for result in (Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"):
        (tmp_path / "benchmarks" / "results" / result.name).touch()
    return tmp_path / "tables"


def append(path, text):
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def replace(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def problems(*folders, today=TODAY):
    return lint(Tables(folders), today)


def only(found, file, field):
    assert len(found) == 1, found
    assert (found[0].file, found[0].field) == (file, field)
    return str(found[0])


def test_shipped_tables_are_sound():
    assert lint(load(), TODAY) == []


def test_an_unbroken_copy_is_sound(broken):
    assert problems(broken) == []


def test_two_rows_of_one_name(broken):
    append(broken / "sm_90" / "flash.toml", row() + row())
    assert "extra: name requires a unique value" in only(problems(broken), "", "")


def test_a_row_named_like_a_finding_of_the_engine(broken):
    append(broken / "sm_90" / "flash.toml", row("feature-window"))
    assert "feature-window" in only(problems(broken), "sm_90/flash.toml", "name")


def test_an_option_named_like_a_finding_of_the_engine(broken):
    append(broken / "sm_90" / "flex.toml", option("no-table-here"))
    assert "no-table-here" in only(problems(broken), "sm_90/flex.toml", "name")


def test_an_option_measured_nowhere(broken):
    append(broken / "sm_90" / "flex.toml", option(evidence="measured"))
    assert "benchmarks/results/nowhere.json" in only(problems(broken), "sm_90/flex.toml", "evidence.ref")


def test_an_option_of_no_known_version(broken):
    append(broken / "sm_90" / "flex.toml", option(versions='torch = "<2.5"'))
    assert "<2.5" in only(problems(broken), "sm_90/flex.toml", "versions.torch")


@pytest.mark.parametrize("file", ["any/flex.toml", "shared/flex_triton.toml"])
@pytest.mark.parametrize("said", ['needs = ["torch"]', "first_call_seconds = [1, 2]"])
def test_needs_of_no_architecture(broken, file, said):
    path = broken / file
    path.write_text(f"{said}\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
    only(problems(broken), file, said.partition(" ")[0])


@pytest.mark.parametrize("need", ["triton|cudnn", "triton | triton", "Triton"])
def test_a_need_that_nobody_can_read(broken, need):
    replace(broken / "any" / "flex.toml", 'needs = ["torch"', f'needs = ["torch", "{need}"')
    assert f'got "{need}"' in only(problems(broken), "any/flex.toml", "needs")


def test_a_need_of_an_architecture_that_nobody_can_read(broken):
    path = broken / "cpu" / "flex.toml"
    replace(path, 'needs = ["torch"', 'needs = ["torch or nothing"')
    assert 'got "torch or nothing"' in only(problems(broken), "cpu/flex.toml", "needs")


def test_two_preferences_of_one_name(broken):
    replace(broken / "sm_90" / "arch.toml", 'name = "wide-heads"', 'name = "float32"')
    assert "prefer float32: name requires a unique value" in only(problems(broken), "", "")


def test_a_feature_without_an_answer(broken):
    path = broken / "any" / "flash.toml"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(x for x in lines if not x.startswith("softcap =")), encoding="utf-8")
    assert "got no answer" in only(problems(broken), "any/flash.toml", "features.softcap")


def test_a_file_about_no_backend(broken):
    (broken / "sm_90" / "flahs.toml").write_text(row(), encoding="utf-8")
    assert "got flahs" in only(problems(broken), "sm_90/flahs.toml", "")


def test_a_folder_of_no_architecture(broken):
    (broken / "sm_99").mkdir()
    (broken / "sm_99" / "flash.toml").write_text(row(), encoding="utf-8")
    assert "requires sm_99/arch.toml" in only(problems(broken), "sm_99/flash.toml", "")


def test_a_shared_file_that_nobody_includes(broken):
    (broken / "shared" / "forgotten.toml").write_text(row(), encoding="utf-8")
    assert "got none" in only(problems(broken), "shared/forgotten.toml", "")


def test_an_include_that_is_not_there(broken):
    replace(broken / "sm_90" / "flash.toml", "shared/flash_cuda", "shared/flash_cubs")
    assert "got shared/flash_cubs" in only(problems(broken), "", "")


def test_files_that_include_each_other(broken):
    replace(broken / "shared" / "torch_2_7.toml", "shared/cuda_12_8", "sm_100/flash")
    assert "requires files that do not include it" in only(problems(broken), "", "")


def test_a_measurement_without_a_data_file(broken):
    append(broken / "sm_90" / "flash.toml", row(evidence="measured"))
    assert "benchmarks/results/nowhere.json" in only(problems(broken), "sm_90/flash.toml", "evidence.ref")


def test_a_feature_measured_nowhere(broken):
    replace(broken / "any" / "math.toml", 'ref = "h100-torch2.11-faults"', 'ref = "nowhere"')
    assert "features.causal" in only(problems(broken), "any/math.toml", "evidence.ref")


def test_a_wheel_has_no_measurements_to_look_for(broken):
    shutil.rmtree(broken.parent / "benchmarks")
    append(broken / "sm_90" / "flash.toml", row(evidence="measured"))
    assert problems(broken) == []


@pytest.mark.parametrize("versions", [">=2.9, <2.8", ">2.9.0, <2.9.1", "<2.5", ">=2.16"])
def test_a_range_without_a_known_version(broken, versions):
    append(broken / "sm_90" / "flash.toml", row(versions=f'torch = "{versions}"'))
    assert f"got {versions}" in only(problems(broken), "sm_90/flash.toml", "versions.torch")


@pytest.mark.parametrize("versions", [">=2.9, <2.10", "==2.9.1", ">=2.15", "<2.6", "==2.9.*"])
def test_a_range_with_a_known_version(broken, versions):
    append(broken / "sm_90" / "flash.toml", row(versions=f'torch = "{versions}"'))
    assert problems(broken) == []


def test_the_same_said_twice_of_one_version(broken):
    first, second = row("one", versions='torch = "<2.10"'), row("two", versions='torch = ">=2.9"')
    append(broken / "sm_90" / "flash.toml", first + second)
    assert "sm_90/flash/one" in only(problems(broken), "sm_90/flash.toml", "versions")


def test_the_same_said_of_neighbouring_versions(broken):
    first, second = row("one", versions='torch = "<2.10"'), row("two", versions='torch = ">=2.10"')
    append(broken / "sm_90" / "flash.toml", first + second)
    assert problems(broken) == []


@pytest.mark.parametrize(("other", "told"), [('cudnn = "<9.10"', False), ('torch = "<2.10"', True)])
def test_what_never_runs_is_told_apart_by_the_distributions_that_rows_name(broken, other, told):
    rows = row("one", versions='torch = "<2.9"') + row("two", versions=other)
    append(broken / "sm_90" / "flash.toml", rows.replace('{ head_dim_qk = "<=100" }', '"never"'))
    assert any("sm_90/flash/one" in problem.sentence for problem in problems(broken)) is told


def test_a_reason_why_not_for_another_backend_is_a_clause(broken):
    said = row(evidence="issue", more='not_for = { flash = "not here." }').replace("nowhere", "owner/name#1")
    append(broken / "any" / "fa2.toml", said)
    assert 'got "not here.".' in only(problems(broken), "any/fa2.toml", "not_for")


@pytest.mark.parametrize("argued", ["", "Too slow.", "nobody would gain by it.", "Nobody would gain by it"])
def test_an_argument_that_is_no_sentence(broken, argued):
    append(broken / "sm_90" / "flash.toml", row(more=f'argued = "{argued}"'))
    assert "requires a sentence" in only(problems(broken), "sm_90/flash.toml", "argued")


def test_an_argument(broken):
    append(broken / "sm_90" / "flash.toml", row(more='argued = "Nobody would gain by it."'))
    assert problems(broken) == []


def test_a_fault_whose_day_has_passed(broken):
    append(broken / "sm_90" / "flash.toml", row(kind="crash", more="recheck_after = 2026-12-30"))
    assert "2026-12-30" in only(problems(broken), "sm_90/flash.toml", "recheck_after")


def test_a_fault_whose_day_is_today(broken):
    append(broken / "sm_90" / "flash.toml", row(kind="crash", more="recheck_after = 2026-12-31"))
    assert problems(broken) == []


def prefer(first, when="{}", name="odd"):
    row = f'[[prefer]]\nname = "{name}"\nwhen = {when}\nfirst = {first}\nbecause = "of this test"'
    return f'\n{row}\nevidence = [{{ kind = "own", ref = "this test" }}]\n'


def test_a_base_order_that_leaves_a_backend_out(broken):
    replace(broken / "any" / "arch.toml", '"te", ', "")
    assert "missing are te" in only(problems(broken), "any/arch.toml", "prefer")


def test_a_preference_with_a_stranger(broken):
    append(broken / "sm_75" / "arch.toml", prefer('["efficient", "fast"]'))
    said = only(problems(broken), "", "")
    assert "sm_75/arch.toml: prefer odd: first requires backends" in said
    assert "got fast" in said


def test_no_preference_that_always_applies(broken):
    replace(broken / "any" / "arch.toml", 'name = "default"', 'name = "default"\nphase = "training"')
    found = [p for p in problems(broken) if "requires a last row without a condition" in p.sentence]
    assert "sm_80/arch.toml" in {p.file for p in found}


CAUSAL = "{ causal = true }"


@pytest.mark.parametrize(
    ("arch", "row"),
    [
        ("sm_80", prefer('["fa3"]', CAUSAL)),
        ("sm_90", prefer('["efficient", "chunked"]', '{ dtype = ["float32"] }')),
        ("sm_110", prefer('["flash"]', CAUSAL)),
    ],
    ids=["not described here", "said before", "behind a base"],
)
def test_a_preference_that_moves_nothing(broken, arch, row):
    append(broken / arch / "arch.toml", row)
    assert "got an order that they make" in only(problems(broken), f"{arch}/arch.toml", "first")


def test_a_preference_that_keeps_another_from_moving_something(broken):
    append(broken / "sm_80" / "arch.toml", prefer('["flash"]', "{ causal = true, prefix = true }"))
    assert problems(broken) == []


def test_an_architecture_without_evidence(broken):
    path = broken / "sm_121" / "arch.toml"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(x for x in lines if not x.startswith("evidence")), encoding="utf-8")
    assert "got none" in only(problems(broken), "sm_121/arch.toml", "evidence")


def test_a_backend_of_an_overlay_needs_no_place(broken, tmp_path):
    ours = own_overlay(tmp_path / "ours")
    assert "first" not in {p.field for p in problems(broken, ours)}


def test_a_stock_order_with_a_stranger(broken):
    replace(broken / "any" / "stock.toml", 'order = ["flash", "math"]', 'order = ["fast", "math"]')
    said = only(problems(broken), "", "")
    assert "any/stock.toml: order cpu requires backends" in said
    assert "got fast" in said


def test_a_stock_order_without_math(broken):
    replace(broken / "any" / "stock.toml", 'order = ["flash", "math"]', 'order = ["flash"]')
    assert "requires backends of the tables and math" in only(problems(broken), "any/stock.toml", "order")


def test_a_stock_order_for_a_strange_architecture(broken):
    replace(broken / "any" / "stock.toml", 'archs = ["cpu"]', 'archs = ["sm_99"]')
    assert "got sm_99" in only(problems(broken), "any/stock.toml", "archs")


def test_no_stock_order_that_always_applies(broken):
    replace(broken / "any" / "stock.toml", 'name = "default"', 'name = "default"\narchs = ["cpu"]')
    assert "without a condition" in only(problems(broken), "any/stock.toml", "order")


def test_a_backend_whose_module_is_nowhere(broken):
    replace(broken / "any" / "cudnn.toml", "attnroute.executors.aten.cudnn", "attnroute.executors.gone")
    sentence = only(problems(broken), "any/cudnn.toml", "backend.module")
    assert "got attnroute.executors.gone, which is not found" in sentence


def test_inheritance_from_nowhere(broken):
    replace(broken / "sm_121" / "arch.toml", 'inherits = "sm_120"', 'inherits = "sm_999"')
    assert 'got "sm_999"' in str(problems(broken)[0])


def test_inheritance_in_a_circle(broken):
    replace(broken / "sm_120" / "arch.toml", "backends = ", 'inherits = "sm_121"\nbackends = ')
    found = problems(broken)
    assert {p.field for p in found} == {"inherits"}
    assert any("sm_120 -> sm_121 -> sm_120" in str(p) for p in found)


def test_an_overlay_is_checked_too(broken, tmp_path):
    overlay = tmp_path / "overlay" / "sm_90"
    overlay.mkdir(parents=True)
    (overlay / "cudnn.toml").write_text(row(versions='torch = "<2.5"'), encoding="utf-8")
    assert "got <2.5" in only(problems(broken, overlay.parent), "sm_90/cudnn.toml", "versions.torch")
