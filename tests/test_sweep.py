"""The sweep of benchmarks: its calls cover what they say, and a second run goes on."""

from __future__ import annotations

import json
import sys
import time
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import sweep
import sweep_calls
import sweep_inputs
import sweep_models
import sweep_process

from benchmarks import recorded

CALLS = [call for unit in sweep_calls.units() for call in unit]
HERE = {"card": "cpu", "driver": "", "torch": "2.11.0", "cuda": "", "cudnn": "91900", "packages": {}}


def options(folder, **changed):
    given = {
        "out": str(folder),
        "device": "cpu",
        "seconds": 300.0,
        "workers": 1,
        "seed": 0,
        "set": "drawn",
        "sizes": 1,
    }
    return SimpleNamespace(**given | {"backends": "flash,chunked", "structures": 1} | changed)


def test_several_hundred_calls_have_bounded_work_and_a_third_is_kept_from_fits():
    assert len(set(CALLS)) >= 400
    assert max(call.flops for call in CALLS) <= 7e12
    assert max(call.bytes for call in CALLS) <= 3 * 2**30
    assert max(call.dense_bytes for call in CALLS) <= 2**30
    assert 0.28 < sum(call.part == "unseen" for call in CALLS) / len(CALLS) < 0.39
    assert sweep_calls.units() == sweep_calls.units()


@pytest.mark.parametrize("count", [len(CALLS), len(CALLS) // 3])
def test_every_value_is_in_the_set_and_in_its_first_third(count):
    for name, values in sweep_calls.FACTORS.items():
        assert {getattr(call, name) for call in CALLS[:count]} == set(values), name
    lengths = {max(call.seqlen_q, call.seqlen_kv) for call in CALLS[:count]}
    assert {1, 1024, 65536} <= lengths
    assert any(length % 2 for length in lengths)
    assert any(call.seqlen_kv == 77 < call.seqlen_q for call in CALLS[:count])
    assert any(call.seqlen_q == 1 and call.seqlen_kv > 8000 for call in CALLS[:count])
    assert {call.batch for call in CALLS[:count]} == set(sweep_calls.BATCHES)


@pytest.mark.parametrize(
    ("left", "right"), list(combinations(("dtype", "memory", "mask", "dims", "heads", "phase"), 2))
)
def test_pairs_of_values_are_covered(left, right):
    meant = set(product(sweep_calls.FACTORS[left], sweep_calls.FACTORS[right]))
    drawn = {(getattr(call, left), getattr(call, right)) for call in CALLS}
    # 150 structures hold at most 150 of the 240 pairs of masks and head dims, and thd has one memory.
    assert len(drawn) >= min(0.9 * len(meant), 110)


def test_a_call_is_its_line():
    assert all(sweep_calls.read(call.key) == call for call in CALLS)


def test_calls_of_models_are_meant_and_come_once():
    calls = [call for unit in sweep_models.models() for call in unit]
    assert len(set(calls)) == len(calls) > 200
    assert all(map(sweep_calls.is_meant, calls))
    assert {"fit", "unseen"} == {call.part for call in calls}


@pytest.mark.parametrize("mask", [mask for mask in sweep_calls.MASKS if not mask.startswith("thd")])
def test_stock_is_given_the_same_question(mask):
    call = sweep_calls.SweepCall(
        "f16", mask=mask, heads=(2, 2), dims=(8, 8), batch=2, seqlen_q=20, seqlen_kv=20
    )
    problem = sweep_inputs.build(call, "cpu")
    query, key, value = (t.float() for t in problem.tensors)
    from attnroute import attention

    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, **problem.stock())
    got = attention(query, key, value, **problem.ours)
    # Left padding leaves queries without keys, where stock's answer depends on its backend.
    kept = torch.isfinite(want) & (got != 0)
    torch.testing.assert_close(got[kept], want[kept])


def test_a_second_run_goes_on(tmp_path):
    first = sweep.Results(tmp_path, HERE)
    sweep.Sweep(options(tmp_path), first).run()
    assert len(first.calls) == 1
    with (tmp_path / "calls.jsonl").open("a") as file:
        file.write('{"key": "half a li')
    second = sweep.Results(tmp_path, HERE)
    assert second.calls == first.calls
    sweep.Sweep(options(tmp_path, structures=2), second).run()
    second.close()
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["calls"][0] == next(iter(first.calls.values()))
    assert len(found["calls"]) == 2
    for call in found["calls"]:
        auto = call["backends"]["auto"]
        assert auto["fwd_ms"] > 0
        assert auto["fwd_host_us"] > 0
        assert auto["first_call_s"] > 0
        assert ("bwd_ms" in auto) == (json.loads(call["key"])["phase"] == "training")
    records = recorded.swept(tmp_path / "sweep.json")
    assert [record.ours.forward_ms for record in records] == [
        call["backends"]["auto"]["fwd_ms"] for call in found["calls"]
    ]


def test_another_card_does_not_go_on(tmp_path):
    sweep.Results(tmp_path, HERE)
    with pytest.raises(SystemExit, match="card cpu before, h200 now"):
        sweep.Results(tmp_path, HERE | {"card": "h200"})


def test_a_backend_that_ends_its_process_is_left_out_of_the_next_try():
    asked = []

    class Dying:
        def ask(self, command, limit, until):
            asked.append(command["backends"])
            if "fa4" not in command["backends"]:
                return {"at": "fa4", "status": "crashed", "text": "illegal address"}
            return {"done": {"backends": command["backends"]}}

    found = sweep.Sweep._asked(None, Dying(), "prepare", CALLS[0], {}, 1.0, time.monotonic() + 60)
    assert found["backends"]["fa4"]["status"] == "crashed"
    assert len(asked) == 2


def test_a_process_that_was_killed_is_started_again(tmp_path):
    process = sweep_process.Process("cpu", "flash", 1.0, tmp_path / "stderr")
    command = {"do": "prepare", "key": sweep_calls.shrunk(CALLS[0]).key, "backends": {}}
    until = time.monotonic() + 300
    try:
        assert "done" in process.ask(command, 300.0, until)
        process._process.kill()
        process._process.wait()
        assert process.ask(command, 300.0, until)["status"] == "crashed"
        assert "done" in process.ask(command, 300.0, until)
    finally:
        process.end()


def test_a_run_whose_time_is_over_is_not_held_against_the_backend():
    class Slow:
        def ask(self, command, limit, until):
            return {"at": "fa4", "status": "took too long", "text": ""}

    assert sweep.Sweep._asked(None, Slow(), "time", CALLS[0], {}, 1.0, time.monotonic() - 1) is None
