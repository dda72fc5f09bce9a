"""Overlays that lift rows: the rest of the tables stays."""

from __future__ import annotations

import pytest
import torch
from support.own_tables import put

import attnroute
from attnroute.conformance.past import overlay, past
from attnroute.errors import NoBackendError
from attnroute.tables.load import load


def ids(folder, arch, backend):
    return {row.id: row.rule for row in load(folder).rules(arch, backend) or ()}


@pytest.mark.parametrize(
    ("row", "arch", "backend"),
    [
        ("any/flash/head-dims-equal", "cpu", "flash"),
        ("shared/left_out_finite/zero-times-nan", "cpu", "flash"),
        ("any/fa4/dtype", "sm_100", "fa4"),
        ("sm_90/cudnn/backward-nan-keys-64-mod-128", "sm_90", "cudnn"),
    ],
)
def test_one_row_never_applies_and_the_others_are_there(tmp_path, row, arch, backend):
    before = ids(None, arch, backend)
    row = row if row in before else next(iter(before))
    overlay(tmp_path / "tables", [row], None)
    after = ids(tmp_path / "tables", arch, backend)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {row}
    assert after[row].versions == {"torch": "<0.0.1"}


def test_a_feature_is_there(tmp_path):
    overlay(tmp_path / "tables", ["cpu/flash/feature-window"], None)
    assert load(tmp_path / "tables").features("cpu", "flash")["window"].answer.value is True


def test_a_row_of_an_overlay_is_lifted_with_the_rest_of_the_overlay_in_force(tmp_path):
    evidence = 'because = "of this test"\nevidence = [{ kind = "own", ref = "this test" }]\n'
    rows = "".join(
        f'[[rule]]\nname = "{n}"\nrequires = {{ head_dim_qk = "<=1" }}\n{evidence}' for n in ("a", "b")
    )
    below = put(tmp_path / "below", {"cpu/flash.toml": rows})
    overlay(tmp_path / "tables", ["cpu/flash/a"], below)
    after = ids(tmp_path / "tables", "cpu", "flash")
    assert after["cpu/flash/a"].requires == "never"
    assert after["cpu/flash/a"].versions
    assert after["cpu/flash/b"].requires == {"head_dim_qk": "<=1"}


def test_inside_of_the_block_the_kernel_gets_what_the_row_keeps_from_it():
    query, value = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 32)
    with pytest.raises(NoBackendError, match="head-dims-equal"):
        attnroute.attention(query, query, value, backend="flash")
    with past(["any/flash/head-dims-equal"]):
        assert attnroute.explain(query, query, value, backend="flash").selected == "flash"
    with pytest.raises(NoBackendError):
        attnroute.attention(query, query, value, backend="flash")
