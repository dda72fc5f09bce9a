"""A decision in a notebook: the answer first, a row for each backend, everything escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.report.sentences import hint, stock
from attnroute.tables.load import load

VERSIONS = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"}
HOST = Host(arch="sm_90", versions=VERSIONS)
CALL = parse("bf16 b1 hq8 hkv4 sq4096 skv4096 d512 causal")


def shown(decision):
    """The texts of a decision's rows, after the element of the whole."""
    whole = ET.fromstring(decision._repr_html_().replace("<br>", "<br/>"))
    return whole, [["".join(cell.itertext()) for cell in row] for row in whole.iter("tr")]


def test_the_answer_is_first_and_every_backend_has_a_row():
    decision = decide(CALL, HOST)
    whole, (head, *rows) = shown(decision)
    assert next(whole.itertext()) == decision.selected
    assert head == ["backend", "verdict", "predicted", "why"]
    assert [row[0] for row in rows[: len(decision.order)]] == list(decision.order)
    assert {row[0] for row in rows} == {verdict.backend for verdict in decision.verdicts}
    assert rows[0][1] == "selected"
    assert rows[0][2] == f"{decision.verdict(decision.selected).predicted_ms:.3g} ms"


def test_each_row_says_what_keeps_the_backend_away():
    decision = decide(CALL, HOST)
    why = {row[0]: row[3] for row in shown(decision)[1]}
    assert "requires head_dim_qk" in why["flash"]
    assert "(because the largest compiled head_dim is 256)" in why["flash"]
    assert why["cudnn_fe"] == "needs nvidia-cudnn-frontend"
    banned = decide(CALL, HOST, policy=Policy(ban=("efficient",), origin={"ban": "a test"}))
    assert "banned by a test" in {row[0]: row[3] for row in shown(banned)[1]}["efficient"]


def test_stock_hints_and_the_text_stand_below():
    decision = decide(CALL, HOST, advise=True)
    whole, _ = shown(decision)
    texts = ["".join(part.itertext()) for part in whole]
    assert f"stock attention {stock(decision.stock, decision)}" in texts
    assert decision.hints
    assert {f"hint: {hint(found, decision.selected)}" for found in decision.hints} <= set(texts)
    assert whole.find("details/pre").text == decision.text(verbose=True)


def test_where_nothing_may_run_the_answer_says_so():
    decision = decide(CALL, HOST, policy=Policy(require="flash", origin={"require": "a test"}))
    whole, _ = shown(decision)
    assert next(whole.itertext()) == "none"
    assert "flash is required by a test" in "".join(whole.itertext())


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "a & b", "\x1b[31mred"])
def test_what_others_wrote_is_escaped(text):
    decision = decide(CALL, HOST.model_copy(update={"device_name": text}), load())
    found = decision._repr_html_()
    assert "<script" not in found
    assert "\x1b" not in found
    shown(decision)
