"""Overlay folders: what they declare counts everywhere, and no file of one is ignored without a word."""

from __future__ import annotations

import shutil

import pytest
from support.own_tables import EVIDENCE, ROW, own_overlay, put

import attnroute
from attnroute.cli import main
from attnroute.errors import OverrideError, TableError
from attnroute.memory import reset
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.settings import call_policy, current, from_environment, override, reload
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder

CALL = parse("bf16 b1 hq8 sq64 d64")
CPU = Host(arch="cpu", versions={"torch": "2.13.0+cpu", "c++": "12", "avx2": "present"})


@pytest.fixture
def overlay(tmp_path):
    return own_overlay(tmp_path / "mine")


@pytest.fixture
def in_force(overlay, monkeypatch):
    monkeypatch.setenv("ATTNROUTE_TABLES", str(overlay))
    reload()
    yield overlay
    monkeypatch.undo()
    reload()


def test_a_backend_of_an_overlay_can_be_required(in_force, monkeypatch):
    assert call_policy("ours", None).require == "ours"
    assert call_policy(None, "ours").prefer == ("ours",)
    with override(backend="ours"):
        assert current().require == "ours"
    with override(prefer=["ours"], allow=["ours", "math"], ban="ours"):
        policy = current()
    assert (policy.prefer, policy.allow, policy.ban) == (("ours",), ("ours", "math"), ("ours",))
    environ = {"ATTNROUTE_TABLES": str(in_force)}
    assert from_environment({**environ, "ATTNROUTE_BACKEND": "ours"}).require == "ours"
    assert from_environment({**environ, "ATTNROUTE_BACKENDS": "ours,-math"}).allow == ("ours",)
    with override(backend="ours"):
        assert attnroute.decide(CALL, CPU, policy=current()).selected == "ours"
    monkeypatch.setenv("ATTNROUTE_BACKEND", "ours")
    reload()
    assert current().require == "ours"


def test_the_command_line_takes_it(in_force, capsys):
    words = ["explain", "bf16 b1 hq8 sq64 d64", "--arch", "cpu", "--backend", "ours"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("selected   ours")
    assert in_force.is_dir()


def test_without_the_overlay_it_is_unknown(overlay):
    for ask in (
        lambda: call_policy("ours", None),
        lambda: override(backend="ours").__enter__(),
        lambda: from_environment({"ATTNROUTE_BACKEND": "ours"}),
    ):
        with pytest.raises(OverrideError, match='got "ours"'):
            ask()
    assert "ours" in load(overlay).backends


def test_rows_of_another_reading_are_others():
    before = load()
    reset()
    assert load() is not before
    assert load() != before


def test_a_relative_folder_survives_a_change_of_directory(overlay, tmp_path, monkeypatch):
    monkeypatch.chdir(overlay.parent)
    policies = from_environment({"ATTNROUTE_TABLES": "mine"}), Policy(tables="mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for policy in policies:
        assert policy.tables == overlay
        assert "ours" in load(policy.tables).backends


STRAYS = {
    "sm_9O/flash.toml": ("requires sm_9O/arch.toml", 'did you mean "sm_90"?'),
    "hopper/flash.toml": ("requires hopper/arch.toml", "known folders are any, shared, sm_75"),
    "sm_90/flsh.toml": ("got flsh", 'did you mean "flash"?'),
    "sm_90/stock.toml": ("requires a backend's name", "got stock"),
    "sm_90/flash.tml": ("ends in .toml", 'did you mean "flash.toml"?'),
    "sm_90/flash.toml.bak": ("ends in .toml", 'did you mean "flash.toml"?'),
    "any/costs/flash.toml": ("any/costs", "ends in .toml"),
    "sm_90/costs/flsh.toml": ("requires a backend", "did you mean"),
    "any/flsh.toml": ("requires a [backend] section", 'did you mean "flash"?'),
    "any/stocks.toml": ("requires a [backend] section", "as every new backend"),
    "shared/flex_tritn.toml": ("requires a file that includes it", 'did you mean "flex_triton"?'),
    "flash.toml": ("requires a folder around it", "one of any, shared"),
    "releases.toml": ("requires a folder around it", "nothing reads it here"),
    "sm_9/arch.toml": ("sm_9", "sm_9/arch.toml"),
}


@pytest.mark.parametrize("name", STRAYS)
def test_a_file_that_nothing_reads_is_an_error(name, tmp_path, monkeypatch, capsys):
    folder = put(tmp_path / "mine", {name: ARCH if name.endswith("arch.toml") else ROW})
    with pytest.raises(TableError) as raised:
        load(folder)
    for part in STRAYS[name]:
        assert part in str(raised.value)
    monkeypatch.setenv("ATTNROUTE_TABLES", str(folder))
    reload()
    assert main(["explain", "bf16 b1 hq8 sq64 d64", "--arch", "sm_90"]) == TableError.exit_code
    monkeypatch.undo()
    reload()
    assert STRAYS[name][0] in capsys.readouterr().err


ARCH = f"""
cards = []
backends = ["math"]
{EVIDENCE}
[[prefer]]
name = "default"
first = ["math"]
because = "of this test"
{EVIDENCE}
"""


def test_what_is_read_or_meant_for_people_is_no_stray(tmp_path):
    files = {
        "README.md": "rows of ours",
        ".gitignore": "*",
        ".git/config": "",
        ".cache/flash.toml": "no table",
        "sm_90/.flash.toml": "a copy that an editor keeps",
        "any/.ours.toml": "the same",
        "sm_90/flash.toml": ROW,
        "sm_90/notes.md": "why",
        "sm_99/arch.toml": ARCH,
        "sm_99/flash.toml": ROW,
        "shared/flex_triton.toml": ROW,
        "shared/own_rows.toml": ROW,
        "any/several.toml": ROW.replace('"mine"', '"both"\nfiles = ["any/fa2", "sm_90/fa3"]'),
        "sm_90/flex.toml": 'include = ["shared/own_rows"]',
    }
    tables = load(put(tmp_path / "mine", files))
    assert "sm_90/flash/mine" in {row.id for row in tables.rules("sm_90", "flash")}
    assert "shared/own_rows/mine" in {row.id for row in tables.rules("sm_90", "flex")}
    assert "sm_99" in tables.arch_names
    assert {row.id for row in tables.all_rows()} - {row.id for row in load().all_rows()} == {
        "sm_90/flash/mine",
        "sm_99/flash/mine",
        "shared/flex_triton/mine",
        "shared/own_rows/mine",
        "any/fa2/both",
        "sm_90/fa3/both",
    }


def test_a_copy_of_the_shipped_folder_is_no_stray(tmp_path):
    shutil.copytree(shipped_folder(), tmp_path / "copy")
    assert load(tmp_path / "copy").arch_names == load().arch_names
