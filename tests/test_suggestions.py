"""What is suggested for a wrong word: what was meant, or nothing."""

from __future__ import annotations

import pytest

from attnroute.cli import main
from attnroute.errors import ArgumentError, did_you_mean
from attnroute.question.line import parse
from attnroute.settings import from_environment
from attnroute.tables.cards import suggestion
from attnroute.tables.load import load

CARDS = {
    "h100": "sm_90",
    "H200": "sm_90",
    "NVIDIA H100 80GB HBM3": "sm_90",
    "h100sxm": "sm_90",
    "gh200": "sm_90",
    "a100": "sm_80",
    "A100-SXM4-80GB": "sm_80",
    "a10": "sm_86",
    "rtx3090ti": "sm_86",
    "rtx4090": "sm_89",
    "4090": "sm_89",
    "l40s": "sm_89",
    "l4": "sm_89",
    "rtx-6000-ada": "sm_89",
    "b200": "sm_100",
    "gb300": "sm_103",
    "thor": "sm_110",
    "RTX 5090": "sm_120",
    "rtx5070ti": "sm_120",
    "rtxpro6000": "sm_120",
    "gb10": "sm_121",
    "dgx-spark": "sm_121",
    "orin": "sm_87",
    "t4": "sm_75",
    "rtx2080": "sm_75",
    "sm90": "sm_90",
    "sm_90a": "sm_90",
    "9.0": "sm_90",
    "compute_120": "sm_120",
    "cpus": "cpu",
}
NOTHING = [
    "v100",
    "h10",
    "b2000",
    "sm_91",
    "sm_1000",
    "13.0",
    "rtx6000",
    "6000",
    "blackwell",
    "cuda",
    "x",
]


@pytest.mark.parametrize("word", CARDS)
def test_a_card_is_answered_with_its_architecture(word, capsys):
    assert suggestion(word, load()) == f'; did you mean "{CARDS[word]}"?'
    assert main(["explain", "bf16 b1 hq8 sq64 d64", "--arch", word]) == ArgumentError.exit_code
    assert f'did you mean "{CARDS[word]}"?' in capsys.readouterr().err


@pytest.mark.parametrize("word", NOTHING)
def test_no_suggestion_is_better_than_a_wrong_one(word):
    assert suggestion(word, load()) == "."


def test_every_example_card_is_answered_with_its_architecture():
    for arch in load().arch_names:
        for card in load().arch(arch).cards:
            # A Quadro RTX 6000 and an RTX 6000 Ada are said alike.
            if arch != "cpu" and card != "Quadro RTX 6000":
                assert suggestion(card, load()) == f'; did you mean "{arch}"?', card


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
