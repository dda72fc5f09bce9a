"""Stock attention's choice, predicted from the tables, against `_fused_sdp_choice` of eleven releases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnroute.engine.stock import predict
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.tables.load import load

DATA = Path(__file__).parent / "data"
RECORDS = [
    json.loads(line)
    for line in (DATA / "torch_default_choice.jsonl").read_text(encoding="utf-8").splitlines()
]
RECORDED_CALLS = json.loads((DATA / "torch_acceptance_calls.json").read_text(encoding="utf-8"))
RELEASES = sorted({record["torch"] for record in RECORDS})

BASE = {
    "dtype": "float16",
    "batch": 2,
    "num_heads_q": 8,
    "num_heads_kv": 8,
    "seqlen_q": 128,
    "seqlen_kv": 128,
    "head_dim_qk": 64,
    "head_dim_v": 64,
}
BY_HAND = {
    "base": {},
    "dtype_f32": {"dtype": "float32"},
    "D192": {"head_dim_qk": 192, "head_dim_v": 192},
    "drop0.1": {"dropout_p": 0.1},
    "S100": {"seqlen_q": 100, "seqlen_kv": 100},
    "mask_3d_HSS": {"mask": [{"kind": "dense", "dtype": "bool", "shape": [8, 128, 128]}]},
}
# No Call and no field of attnroute.question.facts says these: inputs of other ranks than 4, masks of rank 1,
# nested tensors, and unequal heads without enable_gqa.
CANNOT_BE_SAID = {
    "dim2",
    "dim3",
    "dim3_mask",
    "dim5",
    "mask_bool_1d_kv",
    "nested_130_256",
    "nogqa_8_1",
    "nogqa_8_2",
}
CALLS = {name: Call.model_validate({**BASE, **changes}) for name, changes in BY_HAND.items()} | {
    name: Call.model_validate(case["call"]) for name, case in RECORDED_CALLS.items()
}


def test_every_recorded_choice_is_compared_or_listed():
    recorded = set().union(*(record["default"] for record in RECORDS))
    assert recorded - set(CALLS) == CANNOT_BE_SAID
    assert len(RECORDS) == 110


@pytest.mark.parametrize("release", RELEASES)
def test_stock_chooses_what_the_tables_predict(release):
    wrong = []
    for record in (r for r in RECORDS if r["torch"] == release):
        host = Host(arch=record["arch"], versions={"torch": record["torch"], "cudnn": record["cudnn"]})
        for name, choice in record["default"].items():
            if name not in CANNOT_BE_SAID:
                predicted = predict(CALLS[name], host, load()).backend
                if predicted != choice:
                    wrong.append((record["arch"], name, choice, predicted))
    assert wrong == []
