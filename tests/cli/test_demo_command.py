"""`attnroute demo`: runs, and notices a wrong kernel and a wrong result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnroute.cli import _demo_cases, _demo_run, main
from attnroute.cli._demo_cases import CASES, Sizes
from attnroute.cli._demo_run import Outcome, run_case

CPU = torch.device("cpu")


def shrunk(case):
    """Return the case at a size that takes milliseconds."""
    shares_heads = case.small.num_heads_q != case.small.num_heads_kv
    return dataclasses.replace(case, small=Sizes(2, 4, 2 if shares_heads else 4, 64, 32))


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
    out = capsys.readouterr().out
    assert [case.title for case in CASES if f"\n{case.title}\n" not in out] == []
    assert "stock ran" in out
    assert "wrong:" not in out


def test_a_wrong_result_is_exit_code_1(short, monkeypatch, capsys) -> None:
    right = _demo_run.attention
    monkeypatch.setattr(_demo_run, "attention", lambda *tensors, **said: right(*tensors, **said) * 1.5)
    assert main(["demo", "--device", "cpu"]) == 1
    assert "wrong: causal, GQA: the error requires at most" in capsys.readouterr().out


def test_another_kernel_than_the_named_one_is_a_problem(monkeypatch) -> None:
    case = next(case for case in CASES if case.title == "float32")

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
    case = next(case for case in CASES if case.title == "rows with no key")
    sizes = shrunk(case).small
    tensors = tuple(t.double() for t in shrunk(case).tensors(CPU))
    allowed = case.allowed(sizes, CPU)
    empty = ~allowed.any(-1)
    (out,) = _demo_run._truth(tensors, allowed, None)
    assert empty.any()
    assert (out[empty.expand(out.shape[:3])] == 0).all()
    expected = scaled_dot_product_attention(*tensors, attn_mask=allowed | empty[..., None])
    seen = ~empty.expand(out.shape[:3])
    torch.testing.assert_close(out[seen], expected[seen])


def test_a_device_that_is_not_there_is_one_sentence(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "--device cuda requires a CUDA device" in capsys.readouterr().err
