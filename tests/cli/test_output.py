"""What the command line prints: nothing that a terminal acts on, and quiet ends where nobody reads on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from attnroute.cli import main
from attnroute.engine.decide import decide
from attnroute.errors import ArgumentError, OutputError, TableError, printable
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.report.json import decision_from_json, decision_json
from attnroute.settings import from_environment, reload

CALL = "bf16 b1 hq8 sq64 d64"
COMMANDS = {
    "explain": (["explain", CALL, "--arch", "sm_90"], 0),
    "explain-slow": (["explain", CALL, "--arch", "sm_90", "--backend", "math"], 3),
    "explain-none": (["explain", "fp64 b1 hq8 sq64 d64", "--arch", "sm_90", "--backend", "flash"], 4),
    "json": (["explain", CALL, "--arch", "sm_90", "--format", "json"], 0),
    "rule": (["rule", "any/flash/head-dims-equal"], 0),
    "matrix": (["matrix"], 0),
    "matrix of one": (["matrix", "--arch", "sm_90"], 0),
    "schema": (["tables", "schema"], 0),
    "help": (["explain", "--help"], 0),
    "commands": (["--help"], 0),
    "version": (["--version"], 0),
}


def shell(command, words):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ATTNROUTE_")}
    quoted = " ".join(f"'{word}'" for word in words)
    line = f"set -o pipefail; {sys.executable} -m attnroute {quoted} {command}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environ, check=False)


@pytest.mark.parametrize("name", ["explain-slow", "explain-none", "json", "matrix", "schema", "help"])
def test_a_reader_that_has_seen_enough_changes_nothing(name):
    words, code = COMMANDS[name]
    for reader in ("| head -1", "| true"):
        done = shell(reader, words)
        assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_sentence_and_its_own_exit_code(name):
    done = shell("> /dev/full", COMMANDS[name][0])
    assert done.returncode == OutputError.exit_code
    assert (
        done.stderr == "attnroute: stdout requires room for what is printed; got: No space left on device.\n"
    )


def test_a_full_error_stream_changes_no_exit_code():
    assert shell("2> /dev/full", ["explain", "nonsense"]).returncode == ArgumentError.exit_code
    assert shell(">&- 2>&-", COMMANDS["explain"][0]).returncode == 0


def test_every_exit_code_is_told_by_help_and_design(capsys):
    main(["--help"])
    told = capsys.readouterr().out
    for code in range(7):
        assert f"{code} " in told
    assert f"{OutputError.exit_code} what was found out could not be written" in told


ESCAPE = "\x1b[31m\x9b2J\x07\u202e"


def is_clean(text):
    return text == printable(text)


def test_texts_of_a_host_file_hold_no_control_characters(tmp_path, capsys):
    host = {"arch": "sm_90", "device_name": f"card {ESCAPE}", "versions": {"torch": "2.13.0+cu130"}}
    host["broken"] = {"cudnn": f"ImportError {ESCAPE}"}
    path = tmp_path / "host.json"
    path.write_text(json.dumps(host), encoding="utf-8")
    for words in (["--format", "text"], ["--format", "json"]):
        main(["explain", CALL, "--host", str(path), *words])
        printed = capsys.readouterr()
        assert "x1b[31m" in printed.out or "u001b[31m" in printed.out
        assert is_clean(printed.out + printed.err)
    decision = decide(parse(CALL), Host.model_validate(host))
    assert decision_from_json(decision_json(decision, verbose=True)) == decision
    main(["matrix", "--host", str(path)])
    assert is_clean(capsys.readouterr().out)
    path.write_text(json.dumps({**host, "versions": {"torch": f"2.13{ESCAPE}"}}), encoding="utf-8")
    assert main(["explain", CALL, "--host", str(path)]) == ArgumentError.exit_code
    assert is_clean("".join(capsys.readouterr()))


WORDS = [
    ["explain", f"bf16 {ESCAPE}"],
    ["explain", f"bf16 causal={ESCAPE}"],
    ["explain", CALL, "--arch", ESCAPE],
    ["explain", CALL, "--with", f"torch={ESCAPE}"],
    ["explain", CALL, "--with", f"{ESCAPE}=1"],
    ["explain", CALL, "--host", f"/{ESCAPE}"],
    ["explain", CALL, "--backend", ESCAPE],
    ["explain", "--q", ESCAPE],
    ["explain", "--mask", f"({ESCAPE}"],
    ["explain", CALL, f"--{ESCAPE}"],
    ["rule", ESCAPE],
    ["tables", ESCAPE],
    [ESCAPE],
]


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_words_of_the_command_line_are_repeated_without_control_characters(words, capsys):
    assert main(words) == ArgumentError.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert is_clean(printed.err)


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_a_long_word_is_repeated_shortened(words, capsys):
    long = [word.replace(ESCAPE, "x" * 5000) for word in words]
    assert main(long) in (ArgumentError.exit_code, TableError.exit_code)
    said = capsys.readouterr().err
    assert "x" * 300 not in said
    assert len(said) < 1500


def test_variables_are_repeated_without_control_characters():
    names = ["BACKEND", "BACKENDS", "STRICT", "TABLES", "TUNING", "EXPLAIN"]
    for name in names:
        with pytest.raises(ValueError, match="requires") as raised:
            from_environment({f"ATTNROUTE_{name}": ESCAPE})
        assert is_clean(str(raised.value))
    with pytest.warns(UserWarning, match="is no variable") as warned:
        from_environment({f"ATTNROUTE_{ESCAPE}": "1"})
    assert is_clean(str(warned[0].message))


def test_texts_of_a_table_hold_no_control_characters(tmp_path, monkeypatch, capsys):
    quoted = json.dumps(f"because {ESCAPE}")
    row = f'[[rule]]\nname = "mine"\nrequires = {{ head_dim_qk = "<=1" }}\nbecause = {quoted}\n'
    row += f'evidence = [{{ kind = "own", ref = {quoted}, note = {quoted} }}]\n'
    (tmp_path / "sm_90").mkdir()
    (tmp_path / "sm_90" / "flash.toml").write_text(row, encoding="utf-8")
    monkeypatch.setenv("ATTNROUTE_TABLES", str(tmp_path))
    reload()
    for words in (
        ["explain", CALL, "--arch", "sm_90"],
        ["explain", CALL, "--arch", "sm_90", "--format", "json"],
        ["explain", CALL, "--arch", "sm_90", "--backend", "flash"],
        ["rule", "sm_90/flash/mine"],
        ["rule", "sm_90/flash/mine", "--format", "json"],
        ["tables", "lint"],
    ):
        main(words)
        printed = capsys.readouterr()
        assert is_clean(printed.out + printed.err)
        if words[1] != "lint":
            assert "because" in printed.out
    monkeypatch.undo()
    reload()
