"""The glossary names every word that decisions, rows and explanations are made of, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from attnroute.engine.decision import Exclusion, Hint
from attnroute.question.facts import FACTS
from attnroute.tables.load import load
from attnroute.vocabulary import (
    FEATURES,
    REPAIRS,
    Alignment,
    Distributed,
    EmptyRows,
    EvidenceKind,
    Outcome,
    RuleKind,
    RuleScope,
    Status,
    Transform,
)

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8")
VALUES = {word for fact in FACTS.values() for word in fact.words}
VALUES |= {word for words in (Alignment, Distributed, EmptyRows, Transform) for word in get_args(words)}
LISTS = {
    "Backends": load().backends,
    "Verdicts": (*get_args(Status), "selected"),
    "Outcomes of a finding": get_args(Outcome),
    "Kinds of rule": get_args(RuleKind),
    "Whom a rule binds": get_args(RuleScope),
    "Evidence": get_args(EvidenceKind),
    "Why an eligible backend may not run": get_args(Exclusion.model_fields["reason"].annotation),
    "Hints": get_args(Hint.model_fields["kind"].annotation),
    "Features": FEATURES,
    "Repairs": REPAIRS,
    "Options of kernels": {name for row in load().all_options() for name in row.option.set},
    "Values of facts": VALUES,
}


def rows(title):
    """Return what the first column of the table below a heading has."""
    section = re.search(rf"^##+ {title}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)


@pytest.mark.parametrize("title", LISTS)
def test_every_word_of_a_closed_list_is_explained_and_no_other(title):
    explained = [word for words in rows(title) for word in re.findall(r"`(\w+)`", words)]
    assert sorted(explained) == sorted(LISTS[title])
