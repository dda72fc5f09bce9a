"""Pages say what the code does: names, signatures, variables, options, exit codes, files and commands."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
import shlex
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

import attnroute
from attnroute import errors
from attnroute.api.recording import Recording, TracedCall
from attnroute.cli import COMMANDS, main
from attnroute.cli.explain import SLOW_ONLY
from attnroute.question.facts import FACTS
from attnroute.question.host import Host
from attnroute.settings import VARIABLES, ExplainMode
from attnroute.vocabulary import FEATURES, REPAIRS

ROOT = Path(__file__).resolve().parents[1]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
READING = (ROOT / "docs" / "reading-explain.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "capability_tables" / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference")


def section(title):
    return re.search(rf"^## \d+\. {title}\n(.*?)(?=^## |\Z)", DESIGN, re.MULTILINE | re.DOTALL)[1]


def shown(function, skipped=()):
    """A signature as the page writes it: names and defaults, no types."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.name in skipped:
            continue
        default = parameter.default
        said = '"' + default + '"' if isinstance(default, str) else str(default)
        parts.append(parameter.name + ("" if default is parameter.empty else f"={said}"))
    return ", ".join(parts)


NAMES = " ".join(section("The public names").split())


def test_signatures_of_the_functions():
    assert f"attnroute.attention({shown(attnroute.attention)})" in NAMES
    assert f"attnroute.override({shown(attnroute.override)})" in NAMES
    decide = shown(attnroute.decide, skipped=("advise",)).replace(", *", "")
    assert f"attnroute.decide({decide})" in NAMES


@pytest.mark.parametrize("home", [attnroute.masks, attnroute.biases], ids=["masks", "biases"])
def test_mask_and_bias_objects(home):
    told = NAMES[NAMES.index(f"{home.__name__}:") :]
    told = told[: told.index("base " + ("Mask" if home is attnroute.masks else "Bias"))]
    for name in home.__all__:
        if name not in ("Mask", "Bias"):
            assert f"{name}({shown(getattr(home, name))})" in told, name
    assert set(re.findall(r"\b([A-Z]\w+)\(", told)) <= set(home.__all__)


@pytest.mark.parametrize("name", ["Decision", "Verdict", "Finding"])
def test_fields_of_the_answer(name):
    line = re.search(rf"{name}: (.*?)(?= [A-Z]\w+: |```|$)", NAMES)[1]
    without_words = re.sub(r"\(.*?\)", "", line)
    fields = [f for f in re.findall(r"\.(\w+)", without_words) if f != "..."]
    assert fields == list(getattr(attnroute, name).model_fields)
    for told in re.findall(rf"`{name}\(([^`]*)\)`", DESIGN):
        assert {f.strip() for f in told.split(",")} - {"..."} <= set(fields)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_that_pages_mention_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"\battnroute\.(masks|biases)\.(\w+)", text)):
        assert hasattr(getattr(attnroute, name[0]), name[1]), name
    for home, name in set(re.findall(r"(?<![\w.])(masks|biases)\.([A-Z]\w+)", text)):
        assert hasattr(getattr(attnroute, home), name), f"{home}.{name}"
    for name in set(re.findall(r"\battnroute\.([a-zA-Z]\w+)\(", text)):
        assert hasattr(attnroute, name), name
    for name in set(re.findall(r"\b([A-Z]\w+(?:Error|Warning))\b", text)):
        assert hasattr(errors, name) or hasattr(builtins, name) or name == "ValidationError", name
    for name in set(re.findall(r"\bATTNROUTE_\w+", text)) - {"ATTNROUTE_TEST_TORCH"}:
        assert name in VARIABLES or name == "ATTNROUTE_", name


def test_every_variable_is_explained_with_its_values():
    rows = dict(re.findall(r"^\| `(ATTNROUTE_\w+)(?:=\w+)?` \| (.*) \|$", READING, re.MULTILINE))
    rows.pop("ATTNROUTE_EXPLAIN")
    assert set(rows) | {"ATTNROUTE_EXPLAIN"} == set(VARIABLES)
    assert set(re.findall(r"`(ATTNROUTE_[A-Z_]+)\b", section("Overrides"))) == set(VARIABLES)
    table = READING[READING.index("| `ATTNROUTE_EXPLAIN` | prints |") :].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == (
        "ATTNROUTE_EXPLAIN",
        *get_args(ExplainMode),
    )


def test_exit_codes():
    table = READING[READING.index("## Exit codes") :]
    told = {int(code) for code in re.findall(r"^\| (\d) \|", table, re.MULTILINE)}
    raised = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and hasattr(e, "exit_code")}
    assert told == raised | {0, SLOW_ONLY}
    line = section("The command line")
    assert {int(code) for code in re.findall(r"[ ,](\d) (?=[a-z])", line[line.index("Exit codes") :])} == told


def test_closed_lists_hold_what_the_design_says():
    tables = section("Capability tables")
    features = re.search(r"\* Features \((.*?)\) are a closed list", tables, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", features)) <= set(FEATURES)
    repairs = section("Repairs: how a rejected call becomes acceptable").split(", ...")[0]
    assert set(re.findall(r"`(\w+)`", repairs)) <= set(REPAIRS) | {"attnroute"}


def test_the_tree_of_the_design_is_that_of_the_files():
    tree = re.search(r"```\nattnroute/\n(.*?)```", section("The tree"), re.DOTALL)[1]
    folder, named = "", set()
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        if not line.startswith(" "):
            break
        folder = name if len(indent) == 2 and name.endswith("/") else "" if len(indent) == 2 else folder
        path = ROOT / "attnroute" / folder / ("" if name == folder else name)
        assert path.exists(), line
        named.add(name if len(indent) == 2 else folder)
    there = {p.name + "/" * p.is_dir() for p in (ROOT / "attnroute").iterdir() if p.name[0] not in "_."}
    assert there <= named | {"py.typed", "_capability_tables/"}


def names_in(path):
    """Return what a step of a walk may name: functions, methods, module variables; the rows of a table."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return {row["name"] for row in tomllib.loads(text).get("rule", ())}
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_every_step_of_a_walk_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walks = re.search(r"^## Where things happen\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)[1]
    assert len(re.findall(r"^\*\*", walks, re.MULTILINE)) == 5
    steps = re.findall(r"`([\w/]+\.(?:py|toml)):([\w.-]+)`", walks)
    assert len(steps) > 15
    assert [f"{file}:{name}" for file, name in steps if name not in names_in(ROOT / file)] == []


def commands():
    """Every command line of attnroute in a block of code, and the page it stands on."""
    for page in PAGES:
        # Blocks of every language: the end of a block that is passed over would count as a beginning.
        blocks = re.findall(
            r"^```([^\n]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        for block in [text for kind, text in blocks if kind in ("", "bash")]:
            for line in re.findall(
                r"^\$ (attnroute .*)" if block.startswith("$ ") else r"^attnroute .*", block, re.MULTILINE
            ):
                words = shlex.split(line, comments=True)
                # The backend `toy` is the one that the reader of its page writes.
                if ">" not in words and "toy" not in words and words[1] not in ("demo", "probe"):
                    yield pytest.param(words[1:], id=f"{page.name}: {line[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_of_pages_run(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    host = Host(arch="sm_90", versions={"torch": "2.13.0+cu130"})
    (tmp_path / "other-machine.json").write_text(host.model_dump_json(), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text("import attnroute", encoding="utf-8")
    call = TracedCall(line="fp32 b1 hq2 sq8 d8 causal train", device="cpu", backend="flash", count=1)
    Recording(hosts={}, calls=(call,)).save(tmp_path / "attnroute-calls.json")
    given = ["bf16 b1 hq8 sq64 d64" if word == "CALL" else word for word in words]
    if given[0] in ("explain", "why-not") and not {"--arch", "--host"} & set(given):
        given += ["--arch", "sm_90"]
    if given[0] == "conformance" and not {"--call", "--dry-run"} & set(given):
        given += ["--dry-run", "--arch", "sm_90"]
    if given[:1] == ["tables"] and given[1] in ("audit", "record"):
        # They ask an index.
        import_module(f"attnroute.cli._{given[1]}").parser().parse_args(given[2:])
        return
    # A call that a page shows as wrong is wrong.
    assert main(given) == 1 if "--call" in given else main(given) in (0, 3), capsys.readouterr().err


def test_options_of_the_command_line(capsys):
    text = section("The command line")
    told = text[: text.index("Exit codes")]
    helps = {}
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helps[command] = capsys.readouterr().out
    explained = told[: told.index("`attnroute why-not")]
    for option in set(re.findall(r"--[a-z]+", explained)):
        assert option in helps["explain"], option
    assert set(re.findall(r"`attnroute ([\w-]+)", told)) == set(COMMANDS)


def test_the_page_of_facts_is_the_registry():
    kinds = {"bool": "true or false", "number": "a number"}
    page = (ROOT / "docs" / "facts.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert listed == [
        (name, kinds.get(fact.kind) or ", ".join(fact.words), fact.doc) for name, fact in FACTS.items()
    ]
