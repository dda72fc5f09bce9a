"""`attnroute tables record` on small releases made here, in a checkout that has the records alone."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.wheels import put_wheel

from attnroute.audit import packages, record, signatures
from attnroute.cli import main

ROOT = Path(__file__).parents[2]
SIGNATURES = "tests/executors/data/signatures"
VALIDATOR = "tests/tables/data/fa4_validator.json.gz"
INTERFACE = """
def _validate_head_dims(head_dim, head_dim_v, compute_capability, alignment):
    assert head_dim % alignment == 0 and head_dim <= {most}

def _flash_attn_fwd(q, k, v, causal=False, {more}): ...

def _flash_attn_bwd(q, *, deterministic=False): ...
"""


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    for name in (*(f"{SIGNATURES}/{source.package}.json" for source in record.SOURCES.values()), VALIDATOR):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(record, "shipped_folder", lambda: tmp_path / "capability_tables")
    return tmp_path


@pytest.fixture
def release(monkeypatch, tmp_path):
    def make(version, most=256, more="softcap=None"):
        text = INTERFACE.replace("{most}", str(most)).replace("{more}", more)
        put_wheel(monkeypatch, tmp_path, "flash-attn-4", version, {"flash_attn/cute/interface.py": text})

    return make


def run(capsys, *words):
    code = main(["tables", "record", *words])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def groups(checkout, package="flash-attn-4"):
    return json.loads((checkout / SIGNATURES / f"{package}.json").read_text(encoding="utf-8"))


def test_a_release_that_takes_something_new_is_a_group_of_its_own(checkout, release, capsys):
    release("4.0.0b90")
    before = groups(checkout)
    code, said, _ = run(capsys, "fa4", "--version", "4.0.0b90")
    assert code == 0
    assert "take something new: look at the executor" in said
    assert groups(checkout)[:-1] == before
    new = groups(checkout)[-1]
    assert new["releases"] == ["4.0.0b90"]
    assert new["functions"]["_flash_attn_fwd"][-2:] == [
        ["causal", "POSITIONAL_OR_KEYWORD", True],
        ["softcap", "POSITIONAL_OR_KEYWORD", True],
    ]
    assert new["functions"]["_flash_attn_bwd"][-1] == ["deterministic", "KEYWORD_ONLY", True]


def test_releases_that_take_the_same_stand_together_however_often_they_are_recorded(
    checkout, release, capsys
):
    for version in ("4.0.0b90", "4.0.0b91", "4.0.0b91"):
        release(version)
        _, said, _ = run(capsys, "fa4", "--version", version)
    assert "take what those of another release take" in said
    assert groups(checkout)[-1]["releases"] == ["4.0.0b90", "4.0.0b91"]


def test_what_the_check_accepts_is_recorded_as_a_set_of_its_own(checkout, release, capsys):
    release("4.0.0b90", most=16)
    _, said, _ = run(capsys, "fa4", "--version", "4.0.0b90")
    assert "accepts pairs that no release before accepted" in said
    recorded = json.loads(gzip.decompress((checkout / VALIDATOR).read_bytes()))
    rows = recorded["sets"][recorded["releases"]["b90"]["9/8"]]
    assert [qk for qk, _ in rows] == [8, 16]
    assert (
        recorded["releases"]["b36"]
        == json.loads(gzip.decompress((ROOT / VALIDATOR).read_bytes()))["releases"]["b36"]
    )


@pytest.mark.parametrize("package", [source.package for source in record.SOURCES.values()])
def test_what_stands_in_the_records_is_what_recording_would_write(checkout, package):
    """Adding a release that is there, with what it takes, changes nothing."""
    path = checkout / SIGNATURES / f"{package}.json"
    before = path.read_text(encoding="utf-8")
    last = groups(checkout, package)[-1]
    signatures.add(path, last["releases"][-1], last["functions"])
    assert path.read_text(encoding="utf-8") == before


def test_a_function_that_is_gone_is_one_sentence(checkout, monkeypatch, tmp_path, capsys):
    put_wheel(monkeypatch, tmp_path, "flash-attn-4", "4.0.0b90", {"flash_attn/cute/interface.py": "x = 1"})
    code, _, said = run(capsys, "fa4", "--version", "4.0.0b90")
    assert code == 2
    assert "requires '_flash_attn_fwd' in flash_attn/cute/interface.py; got a release without" in said


def test_without_a_checkout_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "shipped_folder", lambda: tmp_path / "capability_tables")
    code, _, said = run(capsys, "te", "--version", "2.20.2")
    assert code == 2
    assert "requires a checkout of attnroute" in said


NEEDS = [
    "sympy",
    'nvidia-cudnn-cu13==9.99.1.7; platform_system == "Linux"',
    'cuda-toolkit[cublas]==13.4.1; platform_system == "Linux"',
    'triton~=3.11.0; platform_system == "Linux"',
    'opt-einsum; extra == "opt-einsum"',
]


@pytest.mark.parametrize("needs", [NEEDS, NEEDS[:1]])
def test_what_a_wheel_of_torch_brings_along_comes_from_its_metadata(monkeypatch, capsys, needs):
    report = {"install": [{"metadata": {"requires_dist": needs}}]}
    done = subprocess.CompletedProcess((), 0, json.dumps(report), "")
    monkeypatch.setattr(packages, "_pip", lambda *_: done)
    code, said, error = run(capsys, "torch", "--version", "2.99.0")
    if needs is NEEDS:
        assert code == 0
        assert 'torch = ["2.99.0"] cuda = "13.4" cudnn = "9.99.1" triton = "3.11.0"' in said
        assert "nvidia-cudnn-cu13 9.99.1.7, triton 3.11.0" in said
    else:
        assert code == 7
        assert "requires a wheel for CUDA; got torch 2.99.0 for the CPU" in error
