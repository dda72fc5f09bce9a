"""Loading: which files speak about a backend on an architecture, overlays, and errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_tables import BACKEND, EVIDENCE, arch, feature, ids, rule, small_tables, write

from attnroute.errors import TableError
from attnroute.tables import read as read_module
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.preferences import in_order, placed, preferences
from attnroute.tables.read import shipped_folder


@pytest.fixture
def base(tmp_path):
    return small_tables(tmp_path)


def test_rows_are_those_of_any_and_of_the_nearest_file(base):
    tables = Tables((base,))
    assert ids(tables, "sm_80") == ["any/fast/everywhere", "sm_80/fast/ampere"]
    assert ids(tables, "sm_86") == ["any/fast/everywhere", "sm_80/fast/ampere"]
    assert ids(tables, "sm_89") == ["any/fast/everywhere", "sm_89/fast/ada"]


def test_a_backend_that_no_file_describes_here_has_no_rows(base):
    tables = Tables((base,))
    assert ids(tables, "sm_90") is None
    assert ids(tables, "sm_90", "other") is None


def test_a_backend_that_is_listed_has_those_of_any(base):
    tables = Tables((base,))
    assert ids(tables, "sm_80", "other") == []
    assert ids(tables, "sm_89", "other") == []


def test_the_nearest_answer_about_a_feature_holds(base):
    tables = Tables((base,))
    for name in ("sm_80", "sm_86"):
        answers = tables.features(name, "fast")
        assert (answers["causal"].answer.value, answers["causal"].id) == (True, "any/fast/feature-causal")
        assert (answers["window"].answer.value, answers["window"].id) == (False, "sm_80/fast/feature-window")
    assert tables.features("sm_89", "fast")["window"].answer.value == "unknown"


def test_included_rows_keep_their_ids(base):
    write(
        base,
        {"shared/common": rule("shared-row"), "sm_80/fast": 'include = ["shared/common"]\n' + rule("ampere")},
    )
    assert ids(Tables((base,)), "sm_86")[1:] == ["shared/common/shared-row", "sm_80/fast/ampere"]


def test_an_include_of_nothing_is_refused(base):
    write(base, {"sm_80/fast": 'include = ["shared/comon"]'})
    with pytest.raises(
        TableError, match=r"sm_80/fast\.toml: include requires an existing file; got shared/comon"
    ):
        Tables((base,)).rules("sm_80", "fast")


def test_an_include_of_itself_is_refused(base):
    write(base, {"sm_80/fast": 'include = ["shared/a"]', "shared/a": 'include = ["sm_80/fast"]'})
    with pytest.raises(TableError, match="include requires files that do not include it"):
        Tables((base,)).rules("sm_80", "fast")


def test_architectures_that_inherit_each_other_are_refused(base):
    write(base, {"sm_80/arch": arch(inherits="sm_89")})
    with pytest.raises(
        TableError, match="inherits requires an end; got the circle sm_86 -> sm_80 -> sm_89 -> sm_86"
    ):
        Tables((base,)).rules("sm_86", "other")


def test_an_overlay_adds_rows_to_what_is_inherited(base, tmp_path):
    mine = write(tmp_path / "mine", {"sm_86/fast": rule("mine"), "sm_80/fast": rule("also-mine")})
    assert ids(Tables((base, mine)), "sm_86") == [
        "any/fast/everywhere",
        "sm_86/fast/mine",
        "sm_80/fast/ampere",
        "sm_80/fast/also-mine",
    ]


def test_an_overlay_replaces_the_row_of_the_same_id(base, tmp_path):
    mine = write(tmp_path / "mine", {"sm_80/fast": rule("ampere", "head_dim_qk = 16")})
    rows = {row.id: row for row in Tables((base, mine)).rules("sm_80", "fast")}
    assert rows["sm_80/fast/ampere"].rule.requires == {"head_dim_qk": 16}
    assert rows["sm_80/fast/ampere"].file == mine / "sm_80" / "fast.toml"
    assert len(rows) == 2


def test_an_overlay_answers_about_features(base, tmp_path):
    mine = write(tmp_path / "mine", {"sm_80/fast": feature("window", "true")})
    assert Tables((base, mine)).features("sm_86", "fast")["window"].answer.value is True


def preferred(tables, arch):
    return [row.id for row in preferences(tables, arch)]


def test_preferences_are_read_from_the_architecture_itself_then_its_parents_then_all(base):
    write(base, {"any/arch": arch(), "sm_80/arch": arch(prefer="near"), "sm_86/arch": arch(inherits="sm_80")})
    assert preferred(Tables((base,)), "sm_86") == [
        "sm_86/arch/default",
        "sm_80/arch/near",
        "any/arch/default",
    ]
    assert preferred(Tables((base,)), "sm_99") == ["any/arch/default"]


def test_a_backend_stands_where_the_first_row_that_names_it_puts_it(base):
    def row(name, first):
        return f'[[prefer]]\nname = "{name}"\nfirst = {first}\nbecause = "of this test"\n{EVIDENCE}\n'

    near, far = row("near", '["other"]'), row("far", '["fast", "other"]')
    write(base, {"sm_80/arch": f"{EVIDENCE}\n{near}{far}"})
    rows = preferences(Tables((base,)), "sm_80")
    assert in_order(rows) == ("other", "fast")
    assert placed(rows, ["new", "fast", "also"]) == ("fast", "also", "new")


def test_an_overlay_puts_its_preferences_first(base, tmp_path):
    write(base, {"any/arch": arch(prefer="all")})
    mine = write(tmp_path / "mine", {"any/arch": arch(prefer="mine"), "sm_80/arch": arch()})
    tables = Tables((base, mine))
    assert preferred(tables, "sm_80") == ["sm_80/arch/default", "any/arch/mine", "any/arch/all"]
    assert preferences(tables, "sm_80")[0].file.is_relative_to(mine)


def test_an_overlay_adds_a_preference_and_leaves_the_rest_as_it_is(base, tmp_path):
    text = arch(prefer="mine").partition("[[")
    mine = write(tmp_path / "mine", {"sm_86/arch": "".join(text[1:])})
    tables = Tables((base, mine))
    assert preferred(tables, "sm_86")[0] == "sm_86/arch/mine"
    assert tables.arch("sm_86") == Tables((base,)).arch("sm_86").model_copy(
        update={"prefer": tables.arch("sm_86").prefer}
    )


def test_two_preferences_of_one_name(base):
    write(base, {"sm_80/arch": arch() + "[[prefer]]" + arch().partition("[[prefer]]")[2]})
    with pytest.raises(TableError, match=r"sm_80/arch.toml: prefer default: name .* stands twice"):
        preferences(Tables((base,)), "sm_80")


def test_an_overlay_describes_a_backend_and_an_architecture_of_its_own(base, tmp_path):
    mine = write(tmp_path / "mine", {"any/mine": BACKEND, "sm_99/arch": arch(), "sm_99/mine": rule("own")})
    tables = Tables((base, mine))
    assert set(tables.backends) == {"fast", "other", "mine"}
    assert ids(tables, "sm_99", "mine") == ["sm_99/mine/own"]
    assert ids(tables, "sm_80", "mine") is None


def test_the_overlay_comes_over_the_shipped_tables(tmp_path):
    mine = write(tmp_path / "mine", {"sm_90/flash": rule("mine")})
    tables = load(mine)
    assert tables.folders == (shipped_folder(), mine)
    shipped = [row.id for row in load().rules("sm_90", "flash")]
    assert [row.id for row in tables.rules("sm_90", "flash")][: len(shipped)] == shipped
    assert "sm_90/flash/mine" in [row.id for row in tables.rules("sm_90", "flash")]


def test_an_overlay_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(TableError, match=r"ATTNROUTE_TABLES requires a folder .* got .*nowhere"):
        load(tmp_path / "nowhere")


def test_every_row_is_listed_once(base):
    write(
        base,
        {"shared/common": rule("shared-row"), "sm_80/fast": 'include = ["shared/common"]\n' + rule("ampere")},
    )
    assert sorted(row.id for row in Tables((base,)).all_rows()) == [
        "any/fast/everywhere",
        "shared/common/shared-row",
        "sm_80/fast/ampere",
        "sm_89/fast/ada",
    ]


def test_an_architecture_without_a_folder_has_what_holds_on_any(base):
    write(base, {"any/arch": arch()})
    tables = Tables((base,))
    assert tables.arch("sm_70") == tables.arch("any")
    assert "any" not in tables.arch_names


def test_an_architecture_without_any_table_is_refused(base):
    with pytest.raises(TableError, match=r"requires sm_70/arch.toml or any/arch.toml; got neither"):
        Tables((base,)).arch("sm_70")


def test_architectures_are_listed_as_numbers_with_the_cpu_last(base):
    write(base, {"sm_100/arch": arch(), "cpu/arch": arch()})
    assert Tables((base,)).arch_names == ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "cpu")


def test_a_backend_without_its_section_is_refused(base):
    write(base, {"any/strange": rule("alone")})
    with pytest.raises(TableError, match=r"any/strange\.toml requires a \[backend\] section"):
        _ = Tables((base,)).backends


def test_a_name_that_stands_twice_in_a_file_is_refused(base):
    write(base, {"sm_80/fast": rule("ampere") + rule("ampere")})
    with pytest.raises(TableError, match="rule ampere: name requires a unique value"):
        Tables((base,)).rules("sm_80", "fast")


def test_stock_orders_of_an_overlay_come_first(base, tmp_path):
    def stock(name):
        return f'[[order]]\nname = "{name}"\norder = ["fast"]\n{EVIDENCE}\n'

    write(base, {"any/stock": stock("shipped")})
    mine = write(tmp_path / "mine", {"any/stock": stock("mine")})
    tables = Tables((base, mine))
    assert [order.name for order in tables.stock] == ["mine", "shipped"]
    assert set(tables.backends) == {"fast", "other"}


MALFORMED = {
    "no toml": ("[[rule", "requires TOML"),
    "a key too many": (
        rule("odd") + "speed = 3\n",
        r"rule odd: speed: Extra inputs are not permitted; got 3",
    ),
    "an unknown field": (
        rule("odd", "head_dims = 8"),
        r'rule odd: requires.*: .*got "head_dims"; did you mean',
    ),
    "a malformed term": (rule("odd", 'head_dim_qk = "8"'), r'rule odd: requires.*terms like .*; got "8"'),
    "a word that cannot be": (rule("odd", 'dtype = ["fp16"]'), "rule odd: requires.*dtype requires"),
    "an order of words": (rule("odd", 'alignment = ">=none"'), "rule odd: requires.*alignment requires"),
    "a range of no version": (
        rule("odd") + 'versions = { torch = "2.9" }\n',
        r'rule odd: versions: .*PEP 440 terms.*got "2\.9"',
    ),
    "no evidence": (rule("odd").replace(EVIDENCE, ""), "rule odd: evidence: Field required"),
    "empty evidence": (rule("odd").replace(EVIDENCE, "evidence = []"), "rule odd: evidence"),
    "an unknown repair": (rule("odd") + 'repair = "hope"\n', "rule odd: repair: .*got 'hope'"),
    "a fault that never expires": (rule("odd") + 'kind = "crash"\n', r'rule "odd" requires recheck_after'),
    "an unknown feature": (feature("speed", "true"), "features.*speed"),
    "a name with capitals": (rule("Odd"), "rule Odd: name"),
    "a row without a name": ('[[rule]]\nrequires = "never"\n', "rule number 1: name: Field required"),
    "rule as a table": ('[rule]\nname = "odd"\n', "rule: Input should be a valid list"),
}


@pytest.mark.parametrize(("text", "said"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_names_itself_the_rule_and_the_field(base, text, said):
    write(base, {"sm_80/fast": text})
    with pytest.raises(TableError, match=said) as raised:
        Tables((base,)).rules("sm_80", "fast")
    assert str(raised.value).startswith(("sm_80/fast.toml: ", str(base / "sm_80" / "fast.toml")))


def test_a_file_in_another_encoding_is_refused(base):
    (base / "sm_80" / "fast.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(TableError, match=r"fast\.toml: requires TOML"):
        Tables((base,)).rules("sm_80", "fast")


def test_an_order_of_an_older_arch_toml_is_told_its_new_name(base):
    older = arch().replace("[[prefer]]", "[[order]]").replace("first = ", "order = ")
    write(base, {"sm_80/arch": older})
    with pytest.raises(TableError) as raised:
        Tables((base,)).arch("sm_80")
    assert str(raised.value) == (
        "sm_80/arch.toml: requires [[prefer]] rows, of which each names in first the backends that come "
        "first; got [[order]]; rename [[order]] to [[prefer]], and in each row order to first; "
        "backends left out come behind."
    )


def test_several_problems_are_counted(base):
    write(base, {"sm_80/fast": rule("odd") + "speed = 3\nwidth = 4\n"})
    with pytest.raises(TableError, match=r"\(and 1 more\)"):
        Tables((base,)).rules("sm_80", "fast")


def test_an_installation_without_tables_says_so(monkeypatch):
    monkeypatch.setattr(read_module, "_PACKAGED", Path("/nowhere/packaged"))
    monkeypatch.setattr(read_module, "_SIBLING", Path("/nowhere/sibling"))
    with pytest.raises(TableError, match=r"requires its capability tables at .*; got neither; reinstall it"):
        shipped_folder()


def test_packaged_tables_come_before_a_sibling_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(read_module, "_PACKAGED", tmp_path)
    assert shipped_folder() == tmp_path


def test_tables_are_read_once():
    assert load() is load()


def test_a_backend_is_rejected_on_a_kind_of_device_that_it_has_no_kernel_for(base):
    devices = f'devices = {{ kinds = ["cuda"], {EVIDENCE} }}\n'
    write(base, {"any/gpu": BACKEND + devices, "cpu/arch": arch(backends='["other"]')})
    tables = Tables((base,))
    (row,) = tables.rules("cpu", "gpu")
    assert (row.id, row.rule.requires) == ("cpu/gpu/cuda-only", "never")
    assert row.rule.because == "the kernel exists for CUDA devices only"
    assert [item.ref for item in row.rule.evidence] == ["this test"]
    assert ids(tables, "sm_80", "gpu") is None
    assert ids(tables, "cpu", "other") == []
