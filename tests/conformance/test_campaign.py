"""`attnroute conformance` on the CPU, for real: verdicts, planted rows, an interrupted run that goes on."""

from __future__ import annotations

import json

import pytest
from support.own_tables import put

from attnroute.cli import main
from attnroute.conformance import campaign as campaigns
from attnroute.conformance import pool
from attnroute.conformance.campaign import Campaign, planned
from attnroute.conformance.pool import Pool
from attnroute.conformance.report import Report
from attnroute.errors import ArgumentError
from attnroute.memory import reset
from attnroute.probes.torch_host import default_host
from attnroute.tables.load import load

EVIDENCE = 'because = "of this test"\nevidence = [{ kind = "own", ref = "this test" }]\n'
LOOSE = f"""
[[rule]]
name = "causal-nan-scale"
kind = "wrong_result"
when = {{ causal = true }}
requires = {{ scale = ["positive", "zero"] }}
refuses = "fp32 b2 hq4 sq33 d16 causal scale=negative"
takes = "fp32 b2 hq4 sq33 d16 causal scale=zero"
recheck_after = 2099-01-01
{EVIDENCE}"""
STRICT = f"""
[[rule]]
name = "odd-lengths"
requires = {{ seqlen_q = "%2" }}
refuses = "fp32 b2 hq4 sq33 d16"
takes = "fp32 b2 hq4 sq34 d16"
{EVIDENCE}"""
ARGUED = STRICT.replace('because = "', 'argued = "Nobody has an odd number."\nbecause = "')
HOLDS = f"""
[[rule]]
name = "causal-nan-scale"
kind = "wrong_result"
when = {{ causal = true }}
requires = {{ scale = ["positive"] }}
refuses = "fp32 b2 hq4 sq33 d16 causal scale=zero"
takes = "fp32 b2 hq4 sq33 d16 causal"
recheck_after = 2099-01-01
{EVIDENCE}"""


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Lay rows over those of the CPU's flash kernel."""

    def laid(rows):
        monkeypatch.setenv("ATTNROUTE_TABLES", str(put(tmp_path / "tables", {"cpu/flash.toml": rows})))
        reset()

    monkeypatch.chdir(tmp_path)
    yield laid
    reset()


def conformance(*words):
    return main(["conformance", "--processes", "1", *words])


@pytest.mark.parametrize(
    ("rows", "rule", "verdict", "code"),
    [
        (HOLDS, "cpu/flash/causal-nan-scale", "holds", 0),
        (LOOSE, "cpu/flash/causal-nan-scale", "too loose", 1),
        (STRICT, "cpu/flash/odd-lengths", "too strict", 0),
        (ARGUED, "cpu/flash/odd-lengths", "argued", 0),
    ],
)
def test_a_planted_row_gets_its_verdict_and_a_command_that_repeats_it(
    tables, capsys, tmp_path, rows, rule, verdict, code
):
    tables(rows)
    assert conformance("--rule", rule) == code
    out = capsys.readouterr().out
    assert f"1 {verdict}" in out
    (entry,) = Report.read(tmp_path / "conformance.json").entries
    assert (entry.rule, entry.backend, entry.verdict) == (rule, "flash", verdict)
    assert entry.inside
    assert entry.outside
    if verdict == "argued":
        assert f"argued: {rule} for flash: {entry.reason}" in out
    elif verdict != "holds":
        assert f"{verdict}: {rule} for flash" in out
        assert entry.reason.split("; ")[-1].startswith("attnroute conformance --call")


def test_a_failure_is_repeated_by_its_command(tables, capsys, tmp_path):
    tables(LOOSE)
    conformance("--rule", "cpu/flash/causal-nan-scale")
    (entry,) = Report.read(tmp_path / "conformance.json").entries
    failed = next(r for r in entry.inside if r.outcome.status == "wrong")
    capsys.readouterr()
    given = ["--backend", "flash", "--values", failed.trial.values, "--device", "cpu"]
    assert main(["conformance", "--call", failed.trial.line, *given]) == 1
    assert capsys.readouterr().out.startswith("wrong on flash: the relative error of the output")


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    host = default_host(load().providers)
    plan = planned(load(), host, ["math"])
    ran, said = [], []

    def run_job(worker, job):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(job.key)
        return ()

    class Alone(Pool):
        def run(self, jobs, handle):
            for job in jobs:
                handle(job, run_job(None, job))

    first = Campaign(tmp_path / "r.json", host, said.append)
    with pytest.raises(KeyboardInterrupt):
        first.run(plan, Alone(1))
    assert [e.verdict for e in first.report(plan).entries].count("not reached") >= 1
    path = tmp_path / "r.jsonl"
    # The process may end in the middle of a line.
    path.write_text(path.read_text(encoding="utf-8") + '{"key": "cut', encoding="utf-8")
    monkeypatch.setattr(pool, "run_job", run_job)
    before, ran[:] = list(ran), []
    again = Campaign(tmp_path / "r.json", host, said.append, resume=True)
    with pytest.raises(KeyboardInterrupt):
        again.run(plan, Alone(1))
    assert not set(before) & set(ran)
    assert any("3 of" in line and "finished before" in line for line in said)
    keys = [
        json.loads(line)["key"]
        for line in path.read_text(encoding="utf-8").splitlines()
        if '"results"' in line
    ]
    assert keys == before + ran


def test_what_another_machine_wrote_is_not_taken(tmp_path):
    host, said = default_host(load().providers), []
    other = host.with_versions({"torch": "2.12.0"})
    plan = planned(load(), host, ["math"])

    class Alone(Pool):
        def run(self, jobs, handle):
            for job in jobs:
                handle(job, ())

    Campaign(tmp_path / "r.json", other, said.append).run(plan, Alone(1))
    Campaign(tmp_path / "r.json", host, said.append, resume=True)
    assert any("begins anew" in line for line in said)
    assert not (tmp_path / "r.jsonl").exists()


def test_the_budget_ends_a_run(tables, tmp_path):
    tables(HOLDS)
    assert conformance("--rule", "cpu/flash/causal-nan-scale", "--budget", "0s") == 0
    (entry,) = Report.read(tmp_path / "conformance.json").entries
    assert entry.verdict == "not reached"


def test_a_dry_run_lists_the_calls_of_another_machine(capsys):
    assert (
        main(["conformance", "--dry-run", "--arch", "sm_90", "--with", "torch=2.11.0", "--backend", "cudnn"])
        == 0
    )
    out = capsys.readouterr().out
    assert "sm_90/cudnn/backward-nan-keys-64-mod-128 for cudnn" in out
    assert "    outside  bf16 b2 hq8" in out
    assert "rows, " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "flsh"], 'did you mean "flash"'),
        (["--rule", "cpu/flash/nothing"], "requires a row that applies to cpu"),
        (["--arch", "sm_90"], "require --dry-run"),
        (["--budget", "long"], "a time like 20m"),
        (["--call", "bf16 b2"], "requires num_heads_q"),
    ],
)
def test_what_is_wrong_is_a_sentence(words, said, capsys):
    assert main(["conformance", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_report_that_is_none_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="a report as `attnroute conformance` writes it"):
        Report.read(tmp_path / "nowhere.json")


def test_more_processes_than_a_card_takes_are_not_started():
    assert 1 <= campaigns.processes("cuda") <= 12
    assert campaigns.processes("cpu") >= 1
