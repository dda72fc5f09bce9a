"""`attnroute explain` takes every mask that a call line can say, as words and as `--mask`."""

from __future__ import annotations

import pytest

from attnroute.cli import main
from attnroute.cli._call import _mask_words
from attnroute.question.line import parse
from attnroute.report.json import decision_from_json

CALL = "bf16 b2 hq8 sq4096 d64"


def explained(capsys, *words):
    assert main(["explain", *words, "--arch", "sm_90", "--format", "json"]) in (0, 3, 4)
    return decision_from_json(capsys.readouterr().out).call.mask


@pytest.mark.parametrize(
    "mask",
    [
        "any(causal+window=3,0|prefix)",
        "not(causal+any(keys=100,37|documents=1000,3096:cross))",
        "prefix=3,5:bottom_right",
        "dense=4096x4096:recognized=(documents=1000,3096+causal)",
        "function=4096x4096:no_batch:no_head",
    ],
)
def test_a_mask_is_said_in_words_or_as_a_flag(mask, capsys) -> None:
    wanted = parse(f"{CALL} {mask}").mask
    assert explained(capsys, f"{CALL} {mask}") == explained(capsys, CALL, "--mask", mask) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("causal,window=4096", ["causal", "window=4096"]),
        ("window=4095,0,keys=100,37", ["window=4095,0", "keys=100,37"]),
        ("window=open,0,bottom_right,causal", ["window=open,0,bottom_right", "causal"]),
        ("documents=3,5:scattered:cross,causal", ["documents=3,5:scattered:cross", "causal"]),
        ("prefix=3,5:bottom_right,sink", ["prefix=3,5:bottom_right", "sink"]),
        ("any(window=3,0|keys=1,2),causal", ["any(window=3,0|keys=1,2)", "causal"]),
        ("not(any(causal|window=3,0)+keys=1,2)", ["not(any(causal|window=3,0)+keys=1,2)"]),
    ],
)
def test_commas_part_words_but_for_those_inside_one(text, words) -> None:
    assert _mask_words(text) == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([CALL, "--mask", "any(causal"], '--mask requires every parenthesis in pairs; got "any(causal".'),
        (
            [CALL, "--mask", "causal),keys=1"],
            '--mask requires every parenthesis in pairs; got "causal),keys=1".',
        ),
        ([CALL, "--mask", "any(casual|keys)"], 'got "casual"; did you mean "causal"?'),
        (
            [f"{CALL} any(causal"],
            'a call line requires words like any(causal+window=3,0|prefix); got "any(causal".',
        ),
    ],
)
def test_a_mask_that_cannot_be_read_is_refused_in_one_sentence(words, said, capsys) -> None:
    assert main(["explain", *words, "--arch", "sm_90"]) == 2
    assert said in capsys.readouterr().err


def test_the_help_lists_how_masks_combine(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--help"])
    out = capsys.readouterr().out
    for form in ("any(causal+window=3,0|prefix)", "not(causal+documents)", ":bottom_right", ":no_batch"):
        assert form in out
