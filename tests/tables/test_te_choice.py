"""What the tables say of TransformerEngine's own choice, against what its function was recorded to pick."""

from __future__ import annotations

import json

import pytest
from support.row_calls import TABLES

from attnroute.audit import te_choice as audit
from attnroute.cli import main
from attnroute.engine import te_choice
from attnroute.engine.te_choice import PathAnswer, TeChoice, predict
from attnroute.errors import TableError
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.report.te_choice import render_te_choice
from attnroute.tables.load import load

TABLE = TABLES.te_choice
FLASH = {
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0",
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.1",
}
H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cudnn": "9.19.0", **FLASH})


def test_every_pick_of_the_release_is_the_tables():
    """And each filter decided some, but for those about releases of flash-attn, which it does not ask."""
    asked, picks, decided = audit.calls(), set(), set()
    for situation, picked in audit.recorded():
        refused = () if situation.cudnn_takes else ("refused",)
        off = frozenset(situation.off)
        for call, theirs in zip(asked, picked, strict=True):
            answers = te_choice.answer(call, situation.host, TABLE, refused, off)
            ours = te_choice.chosen(answers)
            assert (ours, call, situation) == (theirs, call, situation)
            picks.add(theirs)
            before = next((n for n, a in enumerate(answers) if a.path == ours), len(answers))
            decided.update(a.reasons[0] for a in answers[:before] if len(a.reasons) == 1)
    assert picks == {"fused", "flash-4", "flash-3", "flash-2", "unfused"}
    silent = {row.name for row in TABLE.filter if row.because not in decided}
    assert silent == {row.name for row in TABLE.filter if any("flash-attn" in name for name in row.versions)}


def test_the_recording_is_of_every_situation_and_of_the_release_of_the_table():
    assert [situation for situation, _ in audit.recorded()] == list(audit.situations(TABLES))


def answer(line, host=H100, ours="te"):
    return predict(parse(line), host, TABLES, ours)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("bf16 b2 hq8 sq512 d64 causal", "fused"),
        ("bf16 b1 hq8 sq512 d64 documents=200,312 causal", "fused"),
        ("bf16 b2 hq8 sq512 d64 keys=100,512 causal", "fused"),
        ("bf16 b2 hq8 sq512 d64 keys-left=100,512", "unfused"),
        ("bf16 b2 hq8 sq512 d64 prefix=64,64", "unfused"),
        ("bf16 b2 hq8 sq512 d64 any(causal|window=4,4)", "unfused"),
        ("bf16 b2 hq8 sq512 d64 softcap=30", "flash-3"),
        ("bf16 b2 hq8 sq512 d264 train", "unfused"),
        ("fp32 b2 hq8 sq512 d64", "unfused"),
        ("bf16 b2 hq8 sq512 d64 lse", "none"),
        ("bf16 b2 hq8 sq512 d64 function_bias", "none"),
        ("fp8e4 b2 hq8 sq512 d64", "none"),
    ],
)
def test_what_a_call_becomes(line, path):
    assert answer(line).path == path


def test_lengths_of_documents_count_as_the_longest():
    """The deterministic backward of ragged batches is kept out from 2**30 scores on."""
    tail = "causal deterministic train"
    assert answer(f"bf16 b1 hq8 sq16384 d64 thd {tail}").path == "flash-3"
    documents = ",".join(["1024"] * 16)
    assert answer(f"bf16 b1 hq8 sq16384 d64 documents={documents} {tail}").path == "fused"


def test_cudnn_has_the_last_word_of_the_fused_path():
    wide = answer("bf16 b2 hq8 sq512 d264 train")
    assert (
        "TransformerEngine trains head dims up to 256 here [sm_90/te/backward-head-dim]"
        in wide.answers[0].reasons
    )
    assert answer("bf16 b2 hq8 sq512 d256 train").path == "fused"


@pytest.mark.parametrize(
    ("ours", "variables", "path"),
    [
        ("te", (), ""),
        ("cudnn", (), ""),
        ("fa3", ("NVTE_FUSED_ATTN",), "flash-3"),
        ("fa4", ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN_V3"), "flash-4"),
        ("fa2", ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN_V4", "NVTE_FLASH_ATTN_V3"), "flash-2"),
        ("math", ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN"), "unfused"),
        ("flex", (), ""),
    ],
)
def test_the_fewest_variables_that_bring_it_to_our_choice(ours, variables, path):
    found = answer("bf16 b2 hq8 sq512 d64 causal", ours=ours)
    assert (found.environment, found.brought) == (variables, path)


def said(line, host=H100, ours="te"):
    return " ".join(render_te_choice(answer(line, host, ours), parse(line), host).split())


def test_the_text_names_the_release_and_what_is_installed_beside_it():
    host = H100.with_versions({"transformer-engine": "2.16.1"})
    text = said("bf16 b2 hq8 sq512 d64 causal", host)
    assert "te FusedAttention, cuDNN's kernels; by the order and filters of TransformerEngine 2.20.2" in text
    assert "(2.16.1 is installed)" in text
    assert "attnroute selects te: the same kernels" in text


def test_the_text_says_which_variables_or_why_none():
    line = "bf16 b2 hq8 sq512 d64 causal"
    assert "selects fa3; NVTE_FUSED_ATTN=0 brings TransformerEngine to those kernels" in said(
        line, ours="fa3"
    )
    assert "there: none of its paths runs those kernels" in said(line, ours="flex")
    assert "there: its flash-3 is kept out (they have no dropout)" in said(f"{line} dropout=0.1", ours="fa3")
    assert "DotProductAttention has no argument for the log-sum-exp" in said(f"{line} lse")
    assert "flash-attn-4 is not installed" in said(line, H100.with_versions({"flash-attn-4": None}))
    assert "selects nothing" in said(line, ours=None)


def test_nothing_runs_on_a_cpu():
    found = answer("fp32 b2 hq8 sq512 d64", Host(arch="cpu", versions={"torch": "2.13.0"}), "flash")
    assert found.path == "none"
    assert {a.reasons for a in found.answers} == {("TransformerEngine runs on CUDA devices",)}
    assert "each of its kernels is kept out" in said("fp32 b2 hq8 sq512 d64", Host(arch="cpu"))


def test_an_answer_survives_json():
    found = answer("bf16 b2 hq8 sq512 d64 causal", ours="fa3")
    assert TeChoice.model_validate_json(found.model_dump_json()) == found
    assert found.answers[0] == PathAnswer(path="fused", title="FusedAttention, cuDNN's kernels")


ON = ["--arch", "sm_90", "--with", "torch=2.11.0"]


def test_the_command_prints_it_for_people_and_for_programs(capsys):
    assert main(["explain", "--as", "te", "bf16 b2 hq8 sq512 d64 causal", *ON]) == 0
    said, line = capsys.readouterr().out, "bf16 b2 hq8 hkv8 sq512 skv512 d64 causal"
    assert said.startswith("te         FusedAttention, cuDNN's kernels")
    assert f"call       {line}" in said
    assert "assumed cuda 13.0, cudnn 9.19.0" in " ".join(said.split())
    assert main(["explain", "--as", "te", line, *ON, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "fused"


def test_the_command_ends_with_the_code_of_nothing_where_nothing_runs(capsys):
    assert main(["explain", "--as", "te", "bf16 b2 hq8 sq512 d64 lse", *ON]) == 4
    assert "nothing: DotProductAttention has no argument" in capsys.readouterr().out


def test_an_audit_counts_picks_that_differ(monkeypatch, capsys):
    """The release is the recording here, in which one pick is changed."""
    (first, picked), *rest = audit.recorded()
    wrong = "unfused" if picked[0] != "unfused" else "fused"
    changed = [(first, [wrong, *picked[1:]]), *rest]
    monkeypatch.setattr(audit, "picks", lambda *_: iter(changed[:8]))
    assert main(["tables", "audit", "te_choice"]) == 1
    assert f"it picks {wrong}, and the table says {picked[0]}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[[switch]]\nname = 'NVTE_X'\npaths = ['warp']", "requires paths among .*got warp"),
        ("[[order]]\nname = 'late'\norder = ['fused']", "order late requires every path once"),
        ("[[filter]]\nname = 'x'\npaths = ['fused']\nrequires = { hed = 1 }\nbecause = 'x'", 'got "hed"'),
    ],
)
def test_a_table_that_says_nothing_is_refused(tmp_path, change, said):
    shipped = (TABLES.folders[0] / "any/te_choice.toml").read_text(encoding="utf-8")
    (tmp_path / "any").mkdir()
    (tmp_path / "any/te_choice.toml").write_text(f"{shipped}\n{change}\n", encoding="utf-8")
    with pytest.raises(TableError, match=said):
        _ = load(tmp_path).te_choice
