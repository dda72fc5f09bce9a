"""`attnroute demo`: runs, notices a wrong kernel and a wrong result, and shows what was measured on a GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attnroute
from attnroute.cli import _demo_cases, _demo_run, main
from attnroute.cli._demo_cases import CASES, Sizes
from attnroute.cli._demo_recorded import measured
from attnroute.cli._demo_run import Outcome, run_case
from attnroute.cli.demo import _without_mask
from attnroute.question.line import render
from attnroute.tables.load import load

CPU = torch.device("cpu")


def shrunk(case):
    """Return the case at a size that takes milliseconds."""
    shares_heads = case.small.num_heads_q != case.small.num_heads_kv
    return dataclasses.replace(case, small=Sizes(2, 4, 2 if shares_heads else 4, 64, 32))


def row_of(out, case, table=0):
    """The words of a call's row in the first or the second table."""
    rows = [line for line in out.splitlines() if line.startswith(f"{case.title}  ")]
    return rows[table].removeprefix(case.title).split()


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(_demo_cases, "CASES", tuple(shrunk(case) for case in CASES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_each_case_says_the_same_both_ways(case) -> None:
    report = run_case(shrunk(case), CPU)
    assert report.problems == []
    assert report.ours.backends == (report.decision.selected,)
    assert report.stock.error <= _demo_run.TOLERANCE[case.dtype]


def test_the_demo_shows_every_case_and_exits_with_0(short, capsys) -> None:
    assert main(["demo", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert [case.title for case in CASES if row_of(shown.out, case)[1] != "right"] == []
    assert f"{len(CASES)} of {len(CASES)} right" in shown.out
    assert "wrong:" not in shown.out
    assert shown.err == ""
    assert max(len(line.rstrip()) for line in shown.out.splitlines() if "  " in line) <= 80


@pytest.mark.parametrize("faster", ["stock", "ours"])
def test_a_call_that_is_slower_for_its_memory_says_so(faster) -> None:
    """At its own size stock holds a mask with an entry for every query and key."""
    case = next(case for case in CASES if case.title == "sliding window")
    report = run_case(case, CPU)
    assert (report.decision.selected, report.stock.backends) == ("chunked", ("flash",))
    ours, stock = (2.0, 1.0) if faster == "stock" else (1.0, 2.0)
    report = dataclasses.replace(
        report,
        ours=dataclasses.replace(report.ours, milliseconds=ours),
        stock=dataclasses.replace(report.stock, milliseconds=stock),
    )
    said = _without_mask(report)
    assert said == (
        "sliding window: chunked comes first for its memory; flash needs a mask of 12 MiB, "
        "four times as much at twice the length."
        if faster == "stock"
        else ""
    )


def test_a_call_that_builds_its_mask_too_says_nothing_of_memory() -> None:
    case = next(case for case in CASES if case.title == "causal mask tensor")
    report = run_case(shrunk(case), CPU)
    slower = dataclasses.replace(report.ours, milliseconds=2 * report.stock.milliseconds + 1)
    assert _without_mask(dataclasses.replace(report, ours=slower)) == ""


def test_the_demo_is_quiet_in_a_process_of_its_own() -> None:
    code = (
        "import os, sys; from attnroute.cli import main\n"
        "os.environ.pop('KINETO_LOG_LEVEL', None)\n"
        "import attnroute.cli._demo_cases as cases; cases.CASES = cases.CASES[:1]\n"
        "sys.exit(main(['demo', '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_on_a_cpu_it_shows_what_a_gpu_takes_for_the_same_calls(short, capsys) -> None:
    assert main(["demo", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    found = measured(load())
    assert f"{found.card}, measured on {found.date}" in " ".join(out.split())
    for case in CASES:
        call = found.calls[case.recorded]
        words = row_of(out, case, table=1)
        assert words[0] == (f"{call.stock_ms:.3g}" if call.stock_is_right else "wrong")
        assert {call.alone.backend, call.everything.backend} <= set(words)
        assert f"{call.everything.recorded_ms:.3g}" in words


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_at_its_large_sizes_each_case_is_the_recorded_call(case) -> None:
    tensors = dataclasses.replace(case, small=case.large).tensors(CPU)
    decision = attnroute.explain(*tensors, **case.ours(case.large, CPU))
    assert render(decision.call) == measured(load()).calls[case.recorded].line


def test_a_wrong_result_is_exit_code_1(short, monkeypatch, capsys) -> None:
    right = _demo_run.attention
    monkeypatch.setattr(_demo_run, "attention", lambda *tensors, **said: right(*tensors, **said) * 1.5)
    assert main(["demo", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert row_of(out, CASES[0])[1] == "wrong"
    assert "wrong: causal, GQA, train: the error requires at most" in out


def test_another_kernel_than_the_named_one_is_a_problem(monkeypatch) -> None:
    case = next(case for case in CASES if case.title == "float32, train")

    def composed(query, key, value, **said):
        out, _ = torch._scaled_dot_product_attention_math(query, key, value, is_causal=True)
        return out

    monkeypatch.setattr(_demo_run, "attention", composed)
    report = run_case(shrunk(case), CPU)
    assert report.ours.error < 1e-5
    assert report.problems == [
        f"{report.decision.selected} was selected and {', '.join(report.ours.backends)} ran"
    ]
    assert report.ours.backends != (report.decision.selected,)


def test_stock_attention_without_enough_memory_is_a_result(monkeypatch) -> None:
    def too_large(*tensors, **said):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(_demo_run, "scaled_dot_product_attention", too_large)
    report = run_case(shrunk(CASES[0]), CPU)
    assert report.stock.failure == "out of memory"
    assert report.problems == []


def test_a_result_that_is_not_finite_is_a_problem() -> None:
    report = run_case(shrunk(CASES[0]), CPU)
    broken = dataclasses.replace(report, ours=Outcome(report.ours.backends, float("inf"), 1.0))
    assert broken.problems == ["the error requires at most 0.05; got inf"]


def test_the_reference_is_attention_and_gives_zeros_for_rows_with_no_key() -> None:
    case = next(case for case in CASES if case.title == "padded on the left")
    sizes = shrunk(case).small
    tensors = tuple(t.double() for t in shrunk(case).tensors(CPU))
    allowed = case.allowed(sizes, CPU)
    empty = ~allowed.any(-1)
    (out,) = _demo_run._truth(tensors, allowed, None)
    assert empty.any()
    assert (out[empty.expand(out.shape[:3])] == 0).all()
    expected = scaled_dot_product_attention(*tensors, attn_mask=allowed | empty[..., None], enable_gqa=True)
    seen = ~empty.expand(out.shape[:3])
    torch.testing.assert_close(out[seen], expected[seen])


def test_without_torch_it_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr("attnroute.cli.demo.find_spec", lambda _: None)
    assert main(["demo"]) == 2
    assert "attnroute demo requires torch" in capsys.readouterr().err


def test_long_times_and_names_are_not_cut(short, monkeypatch, capsys) -> None:
    slow = Outcome(("flex_fa4",), 1e-3, 12345.6)

    def long(case, device):
        return dataclasses.replace(
            run_case(case, device), ours=slow, stock=Outcome(("efficient",), 2e-3, 98765.4)
        )

    monkeypatch.setattr(_demo_run, "run_case", long)
    main(["demo", "--device", "cpu"])
    out = capsys.readouterr().out
    assert row_of(out, CASES[0]) == [
        "flex_fa4",
        "wrong",
        "1e-03",
        "12346",
        "efficient",
        "right",
        "98765",
        "8.0x",
    ]


def test_a_device_that_is_not_there_is_one_sentence(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "--device cuda requires a CUDA device" in capsys.readouterr().err
