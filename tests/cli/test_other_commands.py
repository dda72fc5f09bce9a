"""`attnroute rule`, `matrix`, `tables`, `probe`, and the program itself."""

from __future__ import annotations

import json

import pytest

from attnroute import __version__
from attnroute.cli import COMMANDS, main
from attnroute.cli.matrix import CALLS
from attnroute.cli.tables import SCHEMA_FILE, schema_text
from attnroute.engine.decide import decide
from attnroute.memory import reset
from attnroute.question.host import Host
from attnroute.question.line import WORDS, parse, render
from attnroute.tables import lint
from attnroute.tables.archs import ArchTable, StockTable
from attnroute.tables.read import shipped_folder
from attnroute.tables.schema import BackendTable


def test_without_a_command_the_commands_and_exit_codes_are_listed(capsys) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name}" in out for name in COMMANDS)
    assert "4 nothing can" in out


def test_the_version_is_printed(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnroute {__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys) -> None:
    assert main(["explian"]) == 2
    assert capsys.readouterr().err.endswith('got "explian"; did you mean "explain"?\n')


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: attnroute {command}")


def test_the_help_of_explain_lists_every_word(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    out = capsys.readouterr().out
    assert [form for form in WORDS if form not in out] == []


def rules_that_findings_name():
    """Return every id that a decision can print for the calls of the matrix."""
    hosts = [
        Host(arch=arch, versions={"torch": "2.13.0", "cudnn": "9.20.0"})
        for arch in ("sm_90", "sm_120", "cpu")
    ]
    found = (decide(parse(line), host) for line in CALLS.values() for host in hosts)
    return {f.rule for decision in found for v in decision.verdicts for f in v.findings}


def test_every_rule_that_a_finding_names_can_be_printed(capsys) -> None:
    ids = rules_that_findings_name()
    assert len(ids) > 50
    for name in sorted(ids):
        assert main(["rule", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}\n")


def test_a_rule_as_json_has_its_id_and_its_file(capsys) -> None:
    assert main(["rule", "any/cudnn/dtype", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["id"], data["file"]) == ("any/cudnn/dtype", "any/several.toml")
    assert "float16" in data["requires"]["dtype"]


@pytest.mark.parametrize("words", [["any/cudnn/dtyp"], ["any/cudn/dtype"]])
def test_an_unknown_rule_names_the_nearest(words, capsys) -> None:
    assert main(["rule", *words]) == 2
    assert capsys.readouterr().err.endswith('did you mean "any/cudnn/dtype"?\n')


def test_standard_calls_are_lines_in_canonical_form() -> None:
    assert [render(parse(line)) for line in CALLS.values()] == list(CALLS.values())


def test_the_shipped_schema_is_what_the_models_say(capsys) -> None:
    """After a change of the models: `attnroute tables schema > capability_tables/schema.json`."""
    assert main(["tables", "schema", "--check"]) == 0
    assert main(["tables", "schema"]) == 0
    out = capsys.readouterr().out
    assert out.endswith((shipped_folder() / SCHEMA_FILE).read_text(encoding="utf-8"))


def test_a_schema_that_differs_is_exit_code_5(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / SCHEMA_FILE).write_text(schema_text().replace("BackendTable", "Table"), encoding="utf-8")
    monkeypatch.setattr("attnroute.cli.tables.shipped_folder", lambda: tmp_path)
    assert main(["tables", "schema", "--check"]) == 5
    assert SCHEMA_FILE in capsys.readouterr().err


def test_the_schema_is_closed_and_has_every_kind_of_file() -> None:
    document = json.loads(schema_text())
    models = {definition["$ref"].rpartition("/")[2] for definition in document["files"].values()}
    assert models >= {m.__name__ for m in (ArchTable, BackendTable, StockTable)}
    assert all(
        d["additionalProperties"] is False for d in document["$defs"].values() if d["type"] == "object"
    )


def test_the_shipped_tables_are_clean(capsys) -> None:
    assert main(["tables", "lint"]) == 0
    assert capsys.readouterr().out.endswith("clean\n")


def test_a_problem_is_printed_with_its_place_and_is_exit_code_5(monkeypatch, capsys) -> None:
    problem = lint.Problem(file="sm_90/cudnn.toml", rule="nan", field="recheck_after", sentence="it is over.")
    monkeypatch.setattr("attnroute.cli.tables.lint", lambda *_: [problem])
    assert main(["tables", "lint"]) == 5
    assert capsys.readouterr().out == "sm_90/cudnn.toml: nan: recheck_after: it is over.\n"


def test_probe_prints_a_host_that_explain_reads(capsys, tmp_path) -> None:
    assert main(["probe"]) == 0
    out, err = capsys.readouterr()
    assert Host.model_validate_json(out).versions["torch"]
    assert err == ""
    path = tmp_path / "here.json"
    path.write_text(out, encoding="utf-8")
    assert main(["explain", "fp32 b1 hq4 sq64 d64 causal", "--host", str(path)]) == 0
    assert main(["explain", "fp32 b1 hq4 sq64 d64 causal"]) == 0
    recorded, here = capsys.readouterr().out.split("\nselected")
    assert f"selected{here}" == recorded + "\n"


def test_probe_prints_what_cannot_be_imported(capsys, monkeypatch) -> None:
    from attnroute.probes import imports

    def check_installed(*_):
        imports.mark_broken("flash-attn-4", "importing it raises AttributeError")

    monkeypatch.setattr(imports, "check_installed", check_installed)
    try:
        assert main(["probe"]) == 0
    finally:
        reset()
    host = Host.model_validate_json(capsys.readouterr().out)
    assert host.broken["flash-attn-4"] == "importing it raises AttributeError"


def test_probe_says_which_of_torchs_switches_are_off(capsys) -> None:
    import torch

    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert main(["probe"]) == 0
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnroute: torch.backends.cuda.flash_sdp_enabled() is False here")
