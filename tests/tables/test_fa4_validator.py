"""The rows named validator- accept what flash-attn-4's own check of head dims accepts, in every release.

The recording asked `_validate_head_dims` of each release for every pair of head dims of a grid, each major
compute capability and each alignment. Other rows are set aside: they say what passes that check and fails.
"""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path

import pytest

from attnroute.tables import conditions
from attnroute.tables.load import load
from attnroute.tables.schema import AnyOf
from attnroute.tables.versions import contains

DATA = Path(__file__).parent / "data"
RECORDED = json.loads(gzip.decompress((DATA / "fa4_validator.json.gz").read_bytes()))
GRID = RECORDED["grid"]
PAIRS = tuple(product(GRID, GRID))
SETS = {
    name: frozenset((qk, v) for qk, wide in rows for v in wide) for name, rows in RECORDED["sets"].items()
}
RELEASES = tuple(RECORDED["releases"])
ARCHS = {
    8: ("sm_80", "sm_86", "sm_87", "sm_89"),
    9: ("sm_90",),
    10: ("sm_100", "sm_103"),
    11: ("sm_110",),
    12: ("sm_120", "sm_121"),
}
DTYPES = {8: ("float16", "bfloat16"), 16: ("float8_e4m3fn", "float8_e5m2")}
TABLES = load()


def validator_rows(arch, release, backend="fa4"):
    """The rows that repeat the check of a release, those of other releases left out."""
    return tuple(
        row
        for row in TABLES.rules(arch, backend)
        if row.rule.name.startswith("validator-")
        and contains(row.rule.versions["flash-attn-4"], "flash-attn-4", f"4.0.0{release}")
    )


def holds(box, facts):
    if isinstance(box, AnyOf):
        return any(holds(option, facts) for option in box.any_of)
    return all(conditions.evaluate(spec, facts[field], facts) == "true" for field, spec in box.items())


class Judge:
    """Says which pairs a set of rows accepts, once for all releases and architectures that share it."""

    def __init__(self):
        self.known = {}

    def accepted(self, rows, dtype):
        asked = [row for row in rows if holds(row.rule.when, {"dtype": dtype})]
        key = tuple(row.id for row in asked)
        if key not in self.known:
            boxes = [row.rule.requires for row in asked]
            self.known[key] = frozenset(pair for pair in PAIRS if self.takes(boxes, *pair))
        return self.known[key]

    @staticmethod
    def takes(boxes, head_dim_qk, head_dim_v):
        facts = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v}
        return all(holds(box, facts) for box in boxes)


JUDGE = Judge()


def differences(release, rows=validator_rows):
    """Every pair about which rows and recording differ, by architecture and dtype."""
    found = {}
    for key, name in RECORDED["releases"][release].items():
        major, alignment = map(int, key.split("/"))
        for arch, dtype in product(ARCHS[major], DTYPES[alignment]):
            differing = JUDGE.accepted(rows(arch, release), dtype) ^ SETS[name]
            if differing:
                found[arch, dtype] = sorted(differing)
    return found


def test_the_recording_is_all_here():
    answers = sum(len(answers or {}) for answers in RECORDED["releases"].values()) * len(PAIRS)
    assert (len(RELEASES), RELEASES[0], RELEASES[-1], len(GRID), answers) == (33, "b3", "b36", 84, 2187360)
    assert {int(key.split("/")[0]) for key in RECORDED["releases"]["b36"]} == set(ARCHS)


@pytest.mark.parametrize("release", [r for r in RELEASES if RECORDED["releases"][r]])
def test_release_accepts_what_the_rows_say(release):
    assert differences(release) == {}


@pytest.mark.parametrize("release", [r for r in RELEASES if not RECORDED["releases"][r]])
def test_a_release_without_that_check_has_no_row_for_it(release):
    assert [arch for archs in ARCHS.values() for arch in archs if validator_rows(arch, release)] == []


def test_flexattention_is_held_to_the_same_rows():
    for arch, release in product(("sm_90", "sm_100", "sm_103", "sm_110"), RELEASES):
        of_flex, own = validator_rows(arch, release, "flex_fa4"), validator_rows(arch, release)
        assert [(row.id, row.rule) for row in of_flex] == [(row.id, row.rule) for row in own]


@pytest.mark.parametrize(
    ("missing", "arch", "pair"),
    [
        ("validator-head-dims", "sm_90", (264, 64)),
        ("validator-head-dims", "sm_100", (192, 192)),
        ("validator-multiple-of-8", "sm_110", (12, 64)),
    ],
)
def test_a_row_that_is_taken_away_is_missed(missing, arch, pair):
    """The comparison can fail."""

    def fewer(arch, release):
        return tuple(row for row in validator_rows(arch, release) if row.rule.name != missing)

    assert pair in differences("b36", fewer)[arch, "bfloat16"]
