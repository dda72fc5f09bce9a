"""`attnroute tables record compiled` and `audit fa4 --compile`, with a package made here for flash-attn-4."""

from __future__ import annotations

import os

import pytest

from attnroute.audit import compiled as beside
from attnroute.cli import main
from attnroute.conformance import compiled
from attnroute.errors import ArgumentError
from attnroute.question.line import parse, render
from attnroute.question.normalize import normalize

INTERFACE = """
import os
import torch

def _flash_attn_fwd(q, k, v, causal=False, softcap=None, return_lse=False, window_size_left=None,
                    window_size_right=None, cu_seqlens_q=None, max_seqlen_q=None, learnable_sink=None):
    assert os.environ["CUTE_DSL_ARCH"] == "sm_90a" and os.environ["FLASH_ATTENTION_ARCH"] == "sm_90"
    assert q.device.type == "cuda" and q.dtype == torch.bfloat16
    if q.shape[-1] == 200:
        os._exit(6)
    assert v.shape[-1] <= 128, "\\x1b[91mtoo wide\\x1b[0m:\\n  a kernel"
    assert (cu_seqlens_q is None) == (q.ndim == 4) and (max_seqlen_q is None) == (cu_seqlens_q is None)
    return torch.empty_like(q), torch.empty(2, 8, 512, device="cuda"), None

def _flash_attn_bwd(q, k, v, out, dout, lse, softcap=0.0, deterministic=False):
    assert not deterministic, "no order"
"""
WORDS = ("d64", "d136", "d64 train deterministic", "d200", "d64 thd causal train", "d64 window=64,64 sink")
LINES = [render(normalize(parse(f"bf16 b2 hq8 sq512 {words}"))) for words in WORDS]


def environment(folder, files):
    """Write modules, and return the path on which processes find them beside a compiler."""
    for name, text in {"cutlass/utils.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the package says, asked once: that takes processes which import torch."""
    site = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment(site, {"flash_attn/cute/interface.py": INTERFACE}))
        return compiled.compiled("sm_90", LINES)


@pytest.fixture
def checkout(monkeypatch, tmp_path, answers):
    """A checkout without a recording, where the package answers as it did."""
    monkeypatch.setattr(beside, "recording", lambda: tmp_path)
    monkeypatch.setattr(compiled, "compiled", lambda *_: answers)
    monkeypatch.setattr(compiled, "lines", lambda: LINES)
    versions = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1"}
    monkeypatch.setattr(compiled, "version", versions.__getitem__)


def run(capsys, *words):
    code = main(["tables", *words])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_what_compiles_and_what_does_not_is_said_even_where_the_process_ends(answers):
    assert list(answers) == LINES
    assert list(answers.values()) == [
        "",
        "AssertionError: too wide: a kernel",
        "AssertionError: no order",
        "the compiler ended the process with code 6",
        "",
        "",
    ]


def test_answers_are_recorded(checkout, capsys, answers):
    code, said, _ = run(capsys, "record", "compiled", "--arch", "sm_90")
    assert code == 0
    assert said == "flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8.1, sm_90: 6 calls, 3 do not compile"
    assert beside.recorded() == [beside.Record("4.0.0b36", "4.8.1", "sm_90", answers)]


def test_the_audit_asks_for_a_release_that_was_recorded(checkout, capsys):
    run(capsys, "record", "compiled", "--arch", "sm_90")
    code, _, said = run(capsys, "audit", "fa4", "--compile", "--version", "1")
    assert code == 2
    assert "requires a release that was recorded (4.0.0b36)" in said


def test_recording_again_replaces_what_was_recorded(checkout, capsys):
    for _ in range(2):
        run(capsys, "record", "compiled", "--arch", "sm_90")
    assert len(beside.recorded()) == 1


def test_the_audit_counts_what_the_tables_accept_and_nothing_compiles(checkout, capsys):
    run(capsys, "record", "compiled", "--arch", "sm_90")
    code, said, _ = run(capsys, "audit", "fa4", "--compile")
    assert code == 1
    assert "flash-attn-4 4.0.0b36: 6 answers" in said
    assert "too loose sm_90: bf16 b2 hq8 hkv8 sq512 skv512 d136: AssertionError: too wide: a kernel" in said
    assert "d64 train deterministic: AssertionError: no order" in said


def test_a_package_that_does_not_import_is_one_sentence(monkeypatch, tmp_path):
    files = {"flash_attn/__init__.py": "import quack_of_another_world"}
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path, files))
    with pytest.raises(ArgumentError, match=r"all that it imports beside this torch; got .*quack_of_another"):
        compiled.compiled("sm_90", LINES[:1])


def test_without_a_recording_it_says_how_to_make_one(checkout, capsys):
    code, _, said = run(capsys, "audit", "fa4", "--compile")
    assert code == 2
    assert "requires a recording; got none; make one: attnroute tables record compiled" in said


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    code, _, said = run(capsys, "record", "compiled")
    assert code == 2
    assert "got no flash-attn-4; install it with pip" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("record", "compiled", "--version", "1"), "record compiled requires no --version"),
        (("record", "te", "--arch", "sm_90"), "--arch requires compiled"),
        (("audit", "te", "--compile"), "--compile requires fa4"),
    ],
)
def test_words_that_do_not_fit_are_one_sentence(words, said, capsys):
    code, _, error = run(capsys, *words)
    assert code == 2
    assert said in error


def test_every_call_that_is_asked_about_is_there_once():
    calls = beside.lines()
    assert len(calls) == len(set(calls)) > 100


def test_the_tables_accept_nothing_that_was_recorded_not_to_compile(capsys):
    code, said, _ = run(capsys, "audit", "fa4", "--compile", "--all")
    assert code == 0, said
    assert "flash-attn-4 4.0.0b36:" in said
    assert said.count(" 0 too loose") == said.count("answers")
