"""Every example that a help shows runs, and shells complete what commands take."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from attnroute.cli import COMMANDS, demo, main
from attnroute.cli._examples import EXAMPLES
from attnroute.cli.completion import Option, options_of, values_of
from attnroute.tables.cards import named
from attnroute.tables.load import load

SHOWN = [words for shown in EXAMPLES.values() for words, _ in shown]
RECORDED = """
import torch, attnroute
query = torch.randn(1, 2, 16, 16)
attnroute.attention(query, query, query, is_causal=True)
torch.nn.functional.scaled_dot_product_attention(query, query, query)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Where `tune` writes what it measured.
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Path("train.py").write_text(RECORDED, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_its_examples(command, capsys) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert EXAMPLES[command]
    assert all(f"\n  attnroute {words}\n      {does}" in out for words, does in EXAMPLES[command])


@pytest.mark.parametrize("shown", SHOWN)
def test_an_example_runs(shown, folder, monkeypatch, capsys) -> None:
    # The demo's own tests run its calls, which take a while.
    monkeypatch.setattr(demo, "_run", lambda device: {"cpu": 0}[device])
    if shown.startswith("tune"):
        assert main(["run", "--out", "attnroute-calls.json", "train.py"]) == 0
    assert main(shlex.split(shown.partition(" > ")[0])) == 0
    assert shown.startswith(("run", "demo")) or capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["explain", "--help"], ["matrix", "--help"]])
def test_help_fits_the_terminal_but_for_commands_that_are_pasted(words, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if words[1:]:
        with pytest.raises(SystemExit):
            main(words)
    else:
        main(words)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and "attnroute " not in line] == []


def test_the_flags_of_a_command_are_read_from_its_help() -> None:
    found = {option.name: option for option in options_of("matrix")}
    assert found["--arch"].metavar == "ARCH"
    assert found["--verbose"] == Option("-v", "--verbose", "", "the calls, and every cell in words")
    assert values_of(found["--format"], load()) == ["text", "json", "markdown"]
    assert "--as" in {option.name for option in options_of("explain")}


def test_every_card_that_is_offered_is_taken() -> None:
    (arch,) = (option for option in options_of("matrix") if option.name == "--arch")
    offered = values_of(arch, load())
    assert {"h100", "rtx5090", "gb10", "t4", "sm_90", "cpu"} <= set(offered)
    said_alike = {"rtx6000ada", "quadrortx6000"}
    assert all(named(word, load(), "--arch") for word in offered if word not in said_alike)


def completed(line, script):
    """Return what bash offers behind a line."""
    code = """
source /dev/stdin <<< "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _attnroute; printf '%s\\n' "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "-c", code, "bash", script, *line], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_flags_and_names(capsys) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert completed(["attnroute", "ex"], script) == ["explain"]
    assert completed(["attnroute", "explain", "--ver"], script) == ["--verbose"]
    assert set(completed(["attnroute", "matrix", "--arch", "h"], script)) == {"h20", "h100", "h200", "h800"}
    assert completed(["attnroute", "explain", "--backend", "eff"], script) == ["efficient"]
    assert set(completed(["attnroute", "matrix", "--format", ""], script)) == {"text", "json", "markdown"}
    assert set(completed(["attnroute", "explain", "--format", ""], script)) == {"text", "json"}
    assert completed(["attnroute", "explain", "--host", "x"], script) == []
    assert completed(["attnroute", "completion", "z"], script) == ["zsh"]
    assert completed(["attnroute", "tables", "l"], script) == ["lint"]


def test_zsh_takes_the_script_of_bash_and_fish_has_its_own(capsys) -> None:
    main(["completion", "bash"])
    bash = capsys.readouterr().out
    main(["completion", "zsh"])
    assert capsys.readouterr().out.endswith(f"bashcompinit\n{bash}")
    main(["completion", "fish"])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c attnroute ") for line in lines)
    (format_line,) = (x for x in lines if "from matrix'" in x and "-l format " in x)
    assert "-x -a 'text json markdown'" in format_line
    assert all(len(shlex.split(line.replace("\\'", ""))) > 4 for line in lines)
