"""`attnroute tables record acceptance`: what it asks about and writes; the checks themselves need a GPU."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch

from attnroute.audit.torch import BACKENDS, recorded, recording
from attnroute.cli import main
from attnroute.conformance import acceptance

RECORDS, CALLS = recorded(recording())
HERE = next(one for one in RECORDS if (one.torch, one.cudnn, one.arch) == ("2.11.0+cu130", "9.19.0", "sm_90"))


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    shutil.copytree(recording(), tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(acceptance, "recording", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def gpu(monkeypatch, checkout):
    """A GPU on which torch answers as recorded, but for the cases of a dictionary."""

    def make(**otherwise):
        answers = {**HERE.cases, **otherwise}
        monkeypatch.setattr(torch, "__version__", HERE.torch)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(acceptance, "_cudnn", lambda: HERE.cudnn)
        monkeypatch.setattr(acceptance, "letters", lambda name, *_: answers[name])

    return make


def run(capsys):
    code = main(["tables", "record", "acceptance"])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(("B6", "BH"))])
def test_tensors_are_those_of_the_call(name):
    call = CALLS[name]
    query, key, value = acceptance.tensors(name, call, "cpu")
    assert query.shape == (call.batch, call.num_heads_q, call.seqlen_q, call.head_dim_qk)
    assert key.shape == (call.batch, call.num_heads_kv, call.seqlen_kv, call.head_dim_qk)
    assert value.shape == (call.batch, call.num_heads_kv, call.seqlen_kv, call.head_dim_v)
    assert query.requires_grad == (call.phase == "training")
    assert (query.stride(3) == 1) == call.strides.last_dim_contiguous
    assert (value.stride(1) == 0 != value.numel()) == call.strides.kv_heads_expanded
    if "misalign" in name:
        assert query.storage_offset() * query.element_size() % 16 == 0 or not call.strides.aligned_16
    assert set(acceptance.letters(name, call, "cpu")) == {"n"}
    assert len(acceptance.letters(name, call, "cpu")) == len(BACKENDS)


def test_answers_as_recorded_change_nothing(gpu, checkout, capsys):
    gpu()
    code, said, _ = run(capsys)
    assert code == 0
    assert said == "torch 2.11.0+cu130, cuDNN 9.19.0, sm_90: 124 calls, answered as recorded"
    assert recorded(checkout)[0] == RECORDS


def test_another_answer_is_named_and_written(gpu, checkout, capsys):
    gpu(D256="nnn", D64_Dv128="yyy")
    _, said, _ = run(capsys)
    assert "answered otherwise: cudnn D256 (y to n), efficient D256 (y to n), flash D256 (y to n)" in said
    assert "flash D64_Dv128 (n to y)" in said
    written = next(one for one in recorded(checkout)[0] if one[:3] == HERE[:3])
    assert written.cases == {**HERE.cases, "D256": "nnn", "D64_Dv128": "yyy"}


def test_a_release_that_nobody_recorded_is_added(gpu, checkout, capsys, monkeypatch):
    gpu()
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu140")
    _, said, _ = run(capsys)
    assert said == "torch 2.99.0+cu140, cuDNN 9.19.0, sm_90: 124 calls, which nobody had recorded"
    assert recorded(checkout)[0][:-1] == RECORDS
    assert recorded(checkout)[0][-1] == HERE._replace(torch="2.99.0+cu140")


def test_without_a_gpu_it_says_where_to_get_one(checkout, capsys):
    code, _, said = run(capsys)
    assert code == 2
    assert "requires a CUDA build of torch that sees a GPU, or made-up ones; got none" in said


def test_a_version_cannot_be_chosen(capsys):
    assert main(["tables", "record", "acceptance", "--version", "2.11.0"]) == 2
    assert "it asks what is installed" in capsys.readouterr().err
