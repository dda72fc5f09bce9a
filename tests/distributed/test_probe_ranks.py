"""`attnroute probe --all-ranks` on two processes: both learn whether they are alike, and one prints it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys

import torch.distributed as dist

from attnroute.cli import main


def probe(*words, **environ):
    """Run the command with a variable that only rank 1 has; return its code and what it printed."""
    mine = environ if dist.get_rank() == 1 else {}
    os.environ.update(mine)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            return main(["probe", "--all-ranks", *words]), out.getvalue()
    finally:
        for name in mine:
            del os.environ[name]


def probe_json():
    return probe("--json")


def probe_with_a_setting():
    return probe(ATTNROUTE_EXPECTED_CALLS="1000")


def test_ranks_of_one_machine_are_alike(two_ranks):
    (code, out), (other, nothing) = two_ranks.run(probe_json)
    assert (code, other, nothing) == (0, 0, "")
    data = json.loads(out)
    assert data["differences"] == []
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert data["ranks"][0]["host"]["versions"]["torch"]


def test_a_setting_of_one_rank_is_named(two_ranks):
    (code, out), (other, _) = two_ranks.run(probe_with_a_setting)
    assert (code, other) == (1, 1)
    assert "ATTNROUTE_EXPECTED_CALLS: nothing on rank 0; 1000 on rank 1" in out


def test_torchrun_starts_it():
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "attnroute", "probe"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--all-ranks"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "All 2 ranks are alike" in done.stdout


def test_without_torchrun_the_command_is_named(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["probe", "--all-ranks"]) == 2
    error = capsys.readouterr().err
    assert "got one without RANK" in error
    assert "`torchrun --nproc-per-node=gpu -m attnroute probe --all-ranks`" in error
