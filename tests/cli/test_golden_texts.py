"""What people read, whole, with the shipped tables: a changed row shows here as a changed text.

How to accept a change stands in `tests/golden_files.py`.
"""

from __future__ import annotations

import pytest
from support.golden_files import FOLDER, check

from attnroute.cli import main
from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.report.text import render_failure, render_quadratic

H100 = Host(
    arch="sm_90",
    device_name="NVIDIA H100 80GB HBM3",
    versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"},
)
COMMANDS = {
    "explain-training": "explain bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train --arch sm_90",
    "explain-everything": "explain -v bf16 b2 hq32 hkv8 sq4000 d128 causal --arch h200 --with torch=2.10",
    "explain-head-dim-512": "explain bf16 b1 hq8 hkv4 sq4096 d512 causal --arch sm_120 --with torch=2.11",
    "explain-wrong": "explain bf16 b1 hq1 sq704 d64 dense=704x704 train --arch sm_90 --with torch=2.13",
    "explain-recognised": "explain fp16 b1 hq8 sq4096 d64 dense=1x1x4096x4096:recognized=causal --arch sm_90",
    "explain-softcap": "explain bf16 b1 hq16 hkv8 sq8192 d256 window=4095,0 softcap=50 train --arch sm_100",
    "explain-slow-tier": "explain bf16 b1 hq16 sq8192 d64 causal train double_backward --arch sm_90",
    "explain-nothing": "explain bf16 b1 hq8 sq4096 d64 softcap=30 double_backward --arch sm_90",
    "explain-options": "explain bf16 b1 hq8 hkv4 sq4096 d256 prefix=100 train --arch sm_120",
    "explain-required": "explain bf16 b1 hq8 sq4096 d320 causal --arch sm_90 --backend cudnn",
    "explain-unknown-torch": "explain bf16 b1 hq8 sq64 d64 causal --arch sm_90 --with torch=2.99",
    "explain-cpu": "explain fp32 b2 hq4 sq256 d64 causal keys-left=192,256 train --arch cpu",
    "why-not": "why-not fa4 bf16 b1 hq8 hkv4 sq16384 d512 causal train --arch sm_90",
    "rule": "rule sm_90/cudnn/backward-nan-keys-64-mod-128",
    "rule-feature": "rule any/cudnn/feature-window",
    "rule-option": "rule shared/flex_99_kib/backward-head-dim-up-to-256",
    "rule-preference": "rule sm_90/arch/window-small",
    "matrix": "matrix --arch sm_90 --with torch=2.11",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_file_holds(name, capsys) -> None:
    main(COMMANDS[name].split())
    out, err = capsys.readouterr()
    assert err == ""
    check(name, out)


def test_an_exception_reads_as_its_file_holds() -> None:
    policy = Policy(require="cudnn", origin={"require": "attention()"})
    line = "bf16 b2 hq16 hkv8 sq4096 skv4096 d320 causal train"
    check("failure-required", render_failure(decide(parse(line), H100, policy=policy)) + "\n")


def test_a_warning_reads_as_its_file_holds() -> None:
    line = "bf16 b1 hq32 hkv32 sq16384 skv16384 d64 causal train double_backward"
    check("warning-quadratic", render_quadratic(decide(parse(line), H100)) + "\n")


def test_every_file_is_compared_with_something() -> None:
    names = {*COMMANDS, "failure-required", "warning-quadratic"}
    assert {path.stem for path in FOLDER.glob("*.txt")} == names
