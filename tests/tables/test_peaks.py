"""What a card can do at most: found by the driver's name for it, and inherited by nobody."""

from __future__ import annotations

import datetime

import pytest
from support.own_tables import put

from attnroute.question.host import Host
from attnroute.tables.cards import peak_of
from attnroute.tables.folders import Tables
from attnroute.tables.lint import lint
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder

TODAY = datetime.date(2026, 12, 31)
EVIDENCE = 'evidence = [{ kind = "docs", ref = "a page" }]'
NAMES = {
    ("sm_90", "NVIDIA H100 80GB HBM3"): (989.4, 3352, 132),
    ("sm_90", "NVIDIA H100 PCIe"): (756, 2039, 114),
    ("sm_90", "NVIDIA H200"): (989.4, 4800, 132),
    ("sm_90", "NVIDIA H20-3e"): (148, 4000, 78),
    ("sm_80", "NVIDIA A100-SXM4-80GB"): (312, 2039, 108),
    ("sm_80", "NVIDIA A100-SXM4-40GB"): (312, 1555, 108),
    ("sm_86", "NVIDIA A10"): (125, 600, 72),
    ("sm_86", "NVIDIA A10G"): (70, 600, 80),
    ("sm_89", "NVIDIA L4"): (121, 300, 58),
    ("sm_89", "NVIDIA L40"): (181, 864, 142),
    ("sm_89", "NVIDIA GeForce RTX 4070 Ti"): (80.2, 504, 60),
    ("sm_75", "Quadro RTX 6000"): (130.5, 672, 72),
    ("sm_120", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"): (503.8, 1792, 188),
    ("sm_120", "NVIDIA RTX PRO 6000 Blackwell Server Edition"): (500, 1597, 188),
    ("sm_100", "a card of next year"): (2250, 8000, 148),
    ("sm_103", ""): (2250, 8000, 148),
}


@pytest.mark.parametrize(("arch", "name"), NAMES)
def test_the_longest_name_in_the_drivers_counts(arch, name):
    peak = peak_of(load(), Host(arch=arch, device_name=name))
    assert peak is not None
    assert (peak.tflops, peak.bandwidth_gbs, peak.sms) == NAMES[arch, name]


@pytest.mark.parametrize("arch", ["cpu", "sm_107", "sm_199"])
def test_no_numbers_are_those_of_another_architecture(arch):
    assert peak_of(load(), Host(arch=arch, device_name="NVIDIA B200")) is None


def overlay(folder, cards):
    rows = "\n".join(
        f'"{card}" = {{ tflops = 100, bandwidth_gbs = 200, sms = 3, {EVIDENCE} }}' for card in cards
    )
    return put(folder, {"sm_107/arch.toml": f'cards = ["R1"]\n{EVIDENCE}\n[peak]\n{rows}\n'})


def test_an_overlay_adds_a_card_to_those_that_are_there(tmp_path):
    row = f'[peak]\n"B100" = {{ tflops = 1750, bandwidth_gbs = 8000, sms = 148, {EVIDENCE} }}\n'
    tables = Tables((shipped_folder(), put(tmp_path, {"sm_100/arch.toml": row})))
    ours, theirs = (peak_of(tables, Host(arch="sm_100", device_name=name)) for name in ("B100", "GB200"))
    assert ours is not None
    assert theirs is not None
    assert (ours.tflops, theirs.tflops) == (1750, 2500)


@pytest.mark.parametrize(
    ("cards", "told"),
    [
        (["default", "R1 Ultra"], []),
        (["R1"], ["requires default, for cards that it does not name; got R1."]),
        (
            ["default", "R2"],
            ["requires the name of one of its cards; got R2; add it to cards, or correct it."],
        ),
    ],
)
def test_names_are_those_of_cards_and_one_stands_for_the_others(tmp_path, cards, told):
    found = lint(Tables((shipped_folder(), overlay(tmp_path, cards))), TODAY)
    assert [problem.sentence for problem in found if problem.field == "peak"] == told
