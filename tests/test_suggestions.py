"""What is suggested for a wrong word: what was meant, or nothing."""

from __future__ import annotations

import re

import pytest

from attnroute.cli import main
from attnroute.errors import ArgumentError, did_you_mean
from attnroute.question.line import parse
from attnroute.settings import from_environment
from attnroute.tables.cards import named
from attnroute.tables.load import load

# What https://developer.nvidia.com/cuda-gpus says of each card, written down apart from the tables.
CAPABILITIES = {
    "7.5": ["T4", "rtx2060", "RTX 2080 Ti", "quadro rtx 8000", "titan-rtx"],
    "8.0": ["a100", "A100-SXM4-80GB", "a30", "a800"],
    "8.6": ["a2", "a10", "a10g", "a16", "a40", "a6000", "RTX A5000", "rtx3050", "rtx3060", "rtx3090ti"],
    "8.7": ["orin", "Jetson AGX Orin"],
    "8.9": ["l4", "l20", "l40", "l40s", "rtx4060", "rtx4070", "4090", "rtx4090", "rtx-6000-ada"],
    "9.0": [
        "h20",
        "h100",
        "H200",
        "h800",
        "gh200",
        "NVIDIA H100 80GB HBM3",
        "h100sxm",
        "H100 PCIe",
        "h100 nvl",
    ],
    "10.0": ["b200", "gb200"],
    "10.3": ["b300", "gb300"],
    "11.0": ["thor", "Jetson AGX Thor"],
    "12.0": ["rtx5050", "rtx5060", "rtx5070ti", "rtx5080", "RTX 5090", "rtxpro6000", "RTX PRO 5000"],
    "12.1": ["gb10", "dgx-spark", "DGX Spark", "spark"],
}
ARCH_OF = {card: f"sm_{number.replace('.', '')}" for number, cards in CAPABILITIES.items() for card in cards}
SPELLINGS = {"sm_90": "sm_90", "sm90": "sm_90", "sm_90a": "sm_90", "9.0": "sm_90", "compute_120": "sm_120"}
REFUSED = {
    "cpus": 'did you mean "cpu"?',
    "h10": "known and alike: H100 (sm_90)",
    "v100": "known and alike: ",
    "rtx5009": "known and alike: GeForce RTX 5090 (sm_120)",
    "rtx6000": "several cards: Quadro RTX 6000 (sm_75), RTX 6000 Ada (sm_89), RTX PRO 6000 (sm_120).",
    "sm_91": 'got "sm_91".',
    "sm_1000": 'got "sm_1000".',
    "13.0": 'got "13.0".',
    "blackwell": 'got "blackwell".',
    "cuda": 'got "cuda".',
    "x": 'got "x".',
    "": 'got "".',
}


@pytest.mark.parametrize("word", {**ARCH_OF, **SPELLINGS})
def test_a_card_is_taken_for_its_architecture(word):
    assert named(word, load(), "--arch").arch == {**ARCH_OF, **SPELLINGS}[word]


def test_a_card_is_called_as_the_tables_call_it():
    cards = {"h200": "H200", "h100 pcie": "H100 PCIe", "rtx5090": "GeForce RTX 5090", "9.0": "", "cpu": ""}
    assert {word: named(word, load(), "--arch").card for word in cards} == cards


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_no_card_is_refused_with_what_is_alike(word, capsys):
    assert main(["explain", "bf16 b1 hq8 sq64 d64", "--arch", word]) == ArgumentError.exit_code
    assert REFUSED[word] in capsys.readouterr().err


def test_every_card_of_the_tables_is_taken_for_its_architecture():
    for arch in load().arch_names:
        for card in load().arch(arch).cards:
            # A Quadro RTX 6000 and an RTX 6000 Ada are said alike.
            if arch != "cpu" and card != "Quadro RTX 6000":
                assert named(card, load(), "--arch").arch == arch, card


def test_the_time_of_a_card_is_its_own(capsys):
    """An H20 has a seventh of an H100's operations a second, and the time says so."""
    times = {}
    for card in ("h100", "h20"):
        main(["explain", "bf16 b2 hq32 sq4096 d128 train", "--arch", card])
        times[card] = float(re.search(r"predicted ([\d.]+) ms", capsys.readouterr().out)[1])
    assert times["h20"] > 3 * times["h100"]


WORDS = {
    "sq1e9": "sq requires a whole number behind it, like sq16",
    "hkv-1": "hkv requires a whole number behind it",
    "d12.5": "d requires a whole number behind it, like d128",
    "b+1": "b requires a whole number behind it",
    "int8": "dtype requires one of fp16, bf16, fp32",
    "float16": 'did you mean "fp16"?',
    "bfloat16": 'did you mean "bf16"?',
    "torch.float8_e4m3fn": 'did you mean "fp8e4"?',
    "tf32x": "words that it knows",
    "casual": 'did you mean "causal"?',
    "Causal": 'did you mean "causal"?',
    "documnets=3,4": 'did you mean "documents"?',
    "dropuot=0.1": 'did you mean "dropout"?',
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_answered_by_its_kind(word):
    with pytest.raises(ArgumentError) as raised:
        parse(f"b1 hq8 sq64 d64 {word}")
    assert WORDS[word] in str(raised.value)
    assert ("did you mean" in str(raised.value)) == ("did you mean" in WORDS[word])


@pytest.mark.parametrize(("word", "choices"), [("sq1e9", ["lse"]), ("int8", ["not"]), ("cuda", ["cudnn"])])
def test_unlike_words_are_not_suggested(word, choices):
    assert did_you_mean(word, choices) == ""


def test_what_all_choices_share_makes_none_alike():
    with pytest.warns(UserWarning, match="the known ones are ATTNROUTE_BACKEND"):
        from_environment({"ATTNROUTE_HELLO": "1"})
    with pytest.warns(UserWarning, match='did you mean "ATTNROUTE_STRICT"'):
        from_environment({"ATTNROUTE_STRCT": "1"})
