"""Calls under tables of one's own: what they declare is asked, and `reset()` reads them again."""

from __future__ import annotations

import pytest
import torch
from support.own_tables import ROW, own_overlay, put

import attnroute
from attnroute.api import routes
from attnroute.errors import OverrideError, TableError
from attnroute.memory import reset
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.settings import call_policy, current

CALL = parse("bf16 b1 hq8 sq64 d64")
CPU = Host(arch="cpu", versions={"torch": "2.13.0+cpu", "c++": "12", "avx2": "present"})


@pytest.fixture
def in_force(tmp_path, monkeypatch):
    folder = own_overlay(tmp_path / "mine")
    monkeypatch.setenv("ATTNROUTE_TABLES", str(folder))
    reset()
    yield folder
    monkeypatch.undo()
    reset()


def test_a_backend_that_nothing_runs_says_so(in_force):
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    path = in_force / "any" / "ours.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("attnroute.executors.chunked.run", "ours.nowhere"), encoding="utf-8")
    with pytest.raises(TableError, match=r"any/ours\.toml: backend\.module requires .*; got ours\.nowhere"):
        attnroute.attention(*tensors, backend="ours")


def test_forget_reads_tables_again(in_force):
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    before = attnroute.explain(*tensors)
    attnroute.attention(*tensors)
    assert attnroute.decide(CALL, CPU, policy=current()).selected == before.selected
    put(in_force, {f"cpu/{before.selected}.toml": ROW})
    assert attnroute.explain(*tensors).selected == before.selected
    reset()
    assert attnroute.explain(*tensors).selected != before.selected
    assert routes.lookup(None) is None
    assert attnroute.decide(CALL, CPU, policy=current()).verdict(before.selected).status == "rejected"
    (in_force / "any" / "ours.toml").unlink()
    (in_force / "cpu" / "ours.toml").unlink()
    call_policy("ours", None)
    reset()
    with pytest.raises(OverrideError, match='got "ours"'):
        call_policy("ours", None)
