"""The recipes of CONTRIBUTING.md, applied to a copy of the tables, do what they promise."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from support.strategies import calls, hosts

from attnroute.engine.decide import decide
from attnroute.engine.examples import Examples
from attnroute.engine.pins import loose_ends
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.tables.folders import Tables
from attnroute.tables.lint import lint
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder

ROOT = Path(__file__).resolve().parents[1]
RECIPES = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TODAY = datetime.date(2026, 12, 1)
VERSIONS = {"torch": "2.13.0+cu130", "cudnn": "9.20.0", "triton": "3.7.1", "flash-attn": "2.8.3"}
LIMIT = "sm_122/flash/head-dim-max-sm-122"
FAULT = "any/fa2/softcap-head-dim-96"


def diff_of(title):
    """Return the changes that a recipe shows: file, lines that go, lines that come."""
    section = re.search(rf"^### {title}.*?\n(.*?)(?=^##)", RECIPES, re.MULTILINE | re.DOTALL)[1]
    (block,) = re.findall(r"^```diff\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    for change in re.split(r"^--- .*\n", block, flags=re.MULTILINE)[1:]:
        head, _, *lines = change.splitlines()
        yield (
            head.removeprefix("+++ b/"),
            *("".join(f"{line[1:]}\n" for line in lines if line.startswith(sign)) for sign in "-+"),
        )


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Apply the recipe of a title to a copy of the shipped tables, once."""
    made = {}

    def tables(title):
        if title not in made:
            folder = tmp_path_factory.mktemp("recipe") / "capability_tables"
            shutil.copytree(shipped_folder(), folder)
            for file, gone, added in diff_of(title):
                path = folder.parent / file
                path.parent.mkdir(exist_ok=True)
                text = path.read_text(encoding="utf-8") if path.exists() else ""
                assert gone in text
                path.write_text(text.replace(gone, added) if gone else text + added, encoding="utf-8")
            made[title] = Tables((folder,))
        return made[title]

    return tables


def sums(decision, without=()):
    """Return what each backend's verdict comes to, rows aside, and the order."""
    found = {v.backend: (v.status, v.repairs) for v in decision.verdicts if v.backend not in without}
    return found, [name for name in decision.order if name not in without]


def is_failed(decision, backend, rule):
    """Return whether a row rejects a call."""
    finding = next(f for f in decision.verdict(backend).findings if f.rule == rule)
    return finding.outcome == "fail"


@pytest.mark.parametrize("title", ["An architecture", "A known fault"])
def test_the_tables_stay_sound(changed, title):
    tables = changed(title)
    assert lint(tables, TODAY) == []
    assert list(Examples(tables).problems()) == []
    assert list(loose_ends(tables)) == []


def test_what_each_recipe_touches():
    titles = re.findall(r"^### (.*?):", RECIPES, re.MULTILINE)
    arch, backend, release, fault = [[Path(file) for file, _, _ in diff_of(title)] for title in titles]
    assert {file.parent.as_posix() for file in arch} == {"capability_tables/sm_122"}
    assert [file.name for file in backend] == ["fa5.toml", "fa5.py", "fa5.toml"]
    assert len(release) == len(fault) == 1


@settings(max_examples=25)
@given(calls(), hosts())
def test_the_architecture_decides_like_its_parent_but_for_the_limit(changed, call, host):
    tables = changed("An architecture")
    parent = decide(call, host.model_copy(update={"arch": "sm_120"}), tables)
    child = decide(call, host.model_copy(update={"arch": "sm_122"}), tables)
    limited = ["flash"] if is_failed(child, "flash", LIMIT) else []
    assert sums(child, limited) == sums(parent, limited)


def test_the_limit_is_met_where_the_parent_has_none(changed):
    tables = changed("An architecture")
    call = parse("bf16 b2 hq8 sq512 d136")
    assert decide(call, Host(arch="sm_120", versions=VERSIONS), tables).selected == "flash"
    child = decide(call, Host(arch="sm_122", versions=VERSIONS), tables)
    assert child.verdict("flash").status == "rejected"
    assert f"the kernel is compiled for no wider head here) [{LIMIT}]" in " ".join(
        child.text(verbose=True).split()
    )


@settings(max_examples=25)
@given(calls(), hosts())
def test_the_fault_changes_nothing_else(changed, call, host):
    host = host.with_versions({"flash-attn": "2.8.3"})
    before, after = decide(call, host, load()), decide(call, host, changed("A known fault"))
    described = [f for v in after.verdicts for f in v.findings if f.rule == FAULT]
    hit = ["fa2"] if any(f.outcome == "fail" for f in described) else []
    assert sums(after, hit) == sums(before, hit)


def test_the_fault_rejects_its_example_with_its_sentence(changed):
    host = Host(arch="sm_80", versions=VERSIONS)
    example = parse("bf16 b2 hq8 sq512 d96 softcap=30 train")
    assert decide(example, host, load()).selected == "fa2"
    after = decide(example, host, changed("A known fault"))
    assert after.verdict("fa2").status == "rejected"
    said = "wrong result: requires head_dim_qk !=96; got head_dim_qk = 96, softcap = 30.0, flash-attn 2.8.3 "
    said += f"(because the gradient of the key lacks the factor of the softcap) [{FAULT}]"
    assert said in " ".join(after.text(verbose=True).split())


def test_a_release_is_known_to_every_backend_by_one_line(tmp_path):
    ((file, gone, added),) = diff_of("A new release")
    package = gone.partition(" ")[0]
    shutil.copytree(shipped_folder(), tmp_path / "capability_tables")
    path = tmp_path / file
    text, count = re.subn(rf'^{package} = ".*\n', added, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text, encoding="utf-8")
    new = Tables((tmp_path / "capability_tables",))
    host = Host(arch="sm_90", versions={**VERSIONS, package: "4.0.0b37", "nvidia-cutlass-dsl": "4.8.1"})
    call = parse("bf16 b2 hq8 sq4096 d128 causal")
    known = [name for name, info in new.backends.items() if package in info.versions_known]
    assert known == ["fa4", "flex_fa4"]
    assert all(decide(call, host, new).verdict(name).status == "eligible" for name in known)
