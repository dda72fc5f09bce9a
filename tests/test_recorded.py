"""The committed measurements in one form: `benchmarks.recorded`."""

from __future__ import annotations

import json

import pytest

from attnroute.engine.select import select
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from benchmarks import recorded

RECORDS = recorded.records()
NOT_READ = {"public-figures", "h200-torch2.11-package-host", "h200-torch2.11-grid-fresh"}
"""Results of others, which `benchmarks.public_figures` reads; what calling packages takes the host; and calls
that were timed again, as a fault made gradients wrong, for which a row cites this file."""


def has_times(found, key=""):
    """Return whether there are times by backend, of two at least, somewhere in a result."""
    if isinstance(found, list):
        return any(has_times(each, key) for each in found)
    if not isinstance(found, dict):
        return False
    if key.endswith("ms") or key == "backends":
        return len(found.keys() & load().backends.keys()) > 1
    return any(has_times(each, name) for name, each in found.items())


def test_every_result_with_times_of_several_backends_is_read():
    times = {path.stem for path in recorded.RESULTS.glob("*.json") if has_times(recorded.load(path.stem))}
    assert times - NOT_READ <= recorded.READERS.keys()
    assert len(times) > 10


def test_each_record_is_one_call_with_times_of_backends_that_are_known():
    assert len({record.id for record in RECORDS}) == len(RECORDS) > 500
    for record in RECORDS:
        assert record.times.keys() <= load().backends.keys(), record.id
        for time in filter(None, (*record.times.values(), record.stock, record.ours)):
            assert time.total_ms >= (time.device_ms or 0) > -1, record.id


@pytest.mark.parametrize("source", recorded.READERS)
def test_backends_that_were_timed_may_run_the_call_as_it_is_described(source):
    """What is not the call that was measured, or not its machine, would reject some of them."""
    rejected = {}
    for record in RECORDS:
        if record.source == source:
            judged = select(record.call, record.host, load(), Policy()).judgements
            right = {backend for backend, time in record.times.items() if time.is_right}
            rejected[record.name] = {name for name in right if judged[name].status != "eligible"}
    assert {name: backends for name, backends in rejected.items() if backends} == {}


def test_the_parts_of_a_call_hold_in_each_memory_and_on_each_card():
    parts = {}
    for record in RECORDS:
        reader = recorded.READERS[record.source]
        if reader is recorded._of_fresh_grid:
            assert record.part == "unseen"
        elif reader is not recorded._of_sweep:  # A sweep says its own parts.
            assert parts.setdefault(record.name, record.part) == record.part
            assert record.part == recorded.part_of(record.call)
    # What no fit may read must not move to where fits read it, or the other way.
    moved = {"rerank_pad_2k": "fit", "left_pad_causal_2k_b8": "unseen", "gpt2_train_1k_b16_d64": "fit"}
    assert {name: parts[name] for name in moved} == moved
    drawn = [r for r in RECORDS if recorded.READERS[r.source] is not recorded._of_fresh_grid]
    share = sum(record.part == "unseen" for record in drawn) / len(drawn)
    assert 0.25 < share < 0.4


def test_a_grid_counts_the_wall_clock_of_short_calls_alone():
    grid = json.loads((recorded.RESULTS / "h200-torch2.11-grid.json").read_text(encoding="utf-8"))
    times = {record.name: record for record in RECORDS if record.source == "h200-torch2.11-grid"}
    for found in grid["calls"]:
        record = times[found["name"]]
        device, wall = found["ms"]["ours"], found["wall_ms"]["ours"]
        assert record.ours.total_ms == (max(device, wall) if device < 0.3 else device)
