"""A row is printed whole."""

from __future__ import annotations

import datetime
import json

from attnroute.report.json import SCHEMA_VERSION
from attnroute.report.rules import Row, render_row, row_json
from attnroute.tables.schema import BackendInfo, Evidence, FeatureAnswer, Option, Rule

EVIDENCE = Evidence(
    kind="issue", ref="pytorch/pytorch#1", version="2.11", date=datetime.date(2026, 1, 2), note="seen"
)
RULE = Rule(
    name="nan",
    kind="wrong_result",
    scope="operator",
    versions={"cudnn": ">=9.19, <9.26", "torch": ["<2.5", ">2.6"]},
    phase="training",
    when={"any_of": [{"causal": False}, {"head_dim_qk": ">=8, %8"}]},
    requires={"dtype": ["float16", "bfloat16"], "softcap": "<=0"},
    repair="pad_head_dim",
    because="it says so",
    evidence=[EVIDENCE],
    recheck_after=datetime.date(2027, 5, 1),
)


def test_a_rule_is_printed_with_every_key() -> None:
    assert render_row(Row("any/alpha/nan", "any/alpha.toml", RULE)).splitlines() == [
        "any/alpha/nan",
        "kind       wrong result",
        "binds      attnroute's direct call of the operator only",
        "versions   cudnn >=9.19, <9.26, torch <2.5 or >2.6",
        "phase      training",
        "when       (causal = false) or (head_dim_qk >=8, %8)",
        "requires   dtype one of float16, bfloat16 and softcap <=0",
        "repair     pad_head_dim",
        "because    it says so",
        "evidence   issue: pytorch/pytorch#1, version 2.11, 2026-01-02, seen",
        "recheck    after 2027-05-01",
        "file       any/alpha.toml",
    ]


def test_what_a_limit_does_not_say_is_left_out() -> None:
    rule = Rule(
        name="no", requires="never", because="it cannot", evidence=[Evidence(kind="inferred", ref="a guess")]
    )
    assert render_row(Row("cpu/alpha/no", "cpu/alpha.toml", rule)).splitlines() == [
        "cpu/alpha/no",
        "kind       limit",
        "binds      torch's own selector and attnroute's direct call of the operator",
        "requires   never",
        "because    it cannot",
        "evidence   inferred: a guess",
        "file       cpu/alpha.toml",
    ]


def test_a_feature_answer_and_a_backend_are_printed() -> None:
    answer = FeatureAnswer(value="unknown", evidence=[EVIDENCE])
    assert "answer     unknown\n" in render_row(Row("any/alpha/feature-vmap", "any/alpha.toml", answer))
    info = BackendInfo(
        title="Alpha",
        module="attnroute.executors.aten.math",
        provider="torch",
        needs=["torch", "cudnn"],
        versions_known={"torch": ">=2.5"},
        operators=["aten::alpha"],
        memory="linear",
    )
    said = render_row(Row("any/alpha/versions-known", "any/alpha.toml", info))
    assert "needs      torch, cudnn\nknown      torch >=2.5\noperators  aten::alpha\n" in said
    assert "first call" not in said
    slow = info.model_copy(update={"first_call_seconds": (6.0, 30.0)})
    said = render_row(Row("any/alpha/versions-known", "any/alpha.toml", slow))
    assert "first call of each structure compiles, 6 to 30 s\n" in said


def test_options_are_printed_with_what_they_set() -> None:
    option = Option(
        name="tiles",
        versions={"torch": ">=2.7"},
        when={"head_dim_max": ">256"},
        set={"BLOCK_M": 32, "FORCE": True},
        because="its own do not fit",
        evidence=[EVIDENCE],
    )
    row = Row("sm_90/alpha/tiles", "sm_90/alpha.toml", option)
    assert render_row(row).splitlines()[:5] == [
        "sm_90/alpha/tiles",
        "versions   torch >=2.7",
        "when       head_dim_max >256",
        "sets       BLOCK_M = 32, FORCE = true",
        "because    its own do not fit",
    ]
    data = json.loads(row_json(row))
    assert data["set"] == {"BLOCK_M": 32, "FORCE": True}


def test_json_has_the_keys_of_the_table() -> None:
    data = json.loads(row_json(Row("any/alpha/nan", "any/alpha.toml", RULE)))
    assert data.pop("schema_version") == SCHEMA_VERSION
    assert data.pop("id") == "any/alpha/nan"
    assert data.pop("file") == "any/alpha.toml"
    assert Rule.model_validate(data) == RULE
