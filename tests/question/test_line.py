"""The one-line form of a call: it says everything, parses back to the equal call, and complains by name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from support.call_strategies import FIELDS, calls

from attnroute.errors import ArgumentError
from attnroute.question.call import Call
from attnroute.question.line import WORDS, parse, render
from attnroute.question.nodes import CausalNode, WindowNode


def test_the_strategy_says_everything_that_a_call_can() -> None:
    said = set(FIELDS) | {"num_heads_q", "num_heads_kv"}
    assert said == set(Call.model_fields)


@given(calls())
def test_every_call_parses_back_to_itself(call: Call) -> None:
    assert parse(render(call)) == call


@given(calls())
def test_a_rendered_line_is_one_line_of_the_listed_words(call: Call) -> None:
    line = render(call)
    assert "\n" not in line
    assert "  " not in line
    listed = {name for forms in WORDS for name in re.findall(r"(?<![\w=:,/-])[a-z][a-z_-]*", forms)}
    assert set(re.findall(r"(?:(?<=[ (+|])|^)[a-z][a-z_-]*", line)) - {"full"} <= listed


@pytest.mark.parametrize(
    "line",
    [
        "bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train",
        "fp16 b1 hq8 hkv8 sq1 skv4096 d192/128 bshd causal=bottom_right window=4095,0,bottom_right",
        "fp32 b1 hq8 hkv8 sq64 skv64 d64 documents=1000,3096 keys=100,37 keys-left=1 prefix=3",
        "fp8e4 b1 hq8 hkv8 sq64 skv64 d64 dense=1x1x64x64:unaligned:empty=none:recognized=causal",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 dense=64:recognized=(documents=3,61:scattered+causal=bottom_right)",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 dense=64x64:recognized=full dense=64:recognized=keys=0",
        "bf16 b1 hq8 hkv8 sq64 skv128 d64 thd documents:cross causal=bottom_right prefix=3,5:bottom_right",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 any(causal+window=3,0|prefix) not(causal) causal",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 any(not(any(causal|keys=3))+function:no_head|full) any() not(full)",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 any(dense=64x64:grad:recognized=(causal+keys=3)|function:no_batch)",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 alibi:grad",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 function_bias:grad",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 bias=fp32:1x1x64x64:grad softcap=30 dropout=0.1 train qkv_grad",
        "bf16 b1 hq8 hkv8 sq64 skv64 d64 unpacked compiled graph double_backward dynamic=seqlen_q,seqlen_kv",
    ],
)
def test_a_line_in_canonical_form_renders_back(line: str) -> None:
    assert render(parse(line)) == line


def test_the_line_of_the_design_is_the_call_of_the_design() -> None:
    call = parse("bf16 b2 hq32 hkv8 sq4096 skv4096 d128 causal train")
    assert call == Call(
        dtype="bfloat16",
        batch=2,
        num_heads_q=32,
        num_heads_kv=8,
        seqlen_q=4096,
        seqlen_kv=4096,
        head_dim_qk=128,
        head_dim_v=128,
        phase="training",
        mask=(CausalNode(),),
    )


def test_left_out_sizes_are_those_of_the_query() -> None:
    assert parse("d64 sq128 hq4 b1 fp32") == parse("fp32 b1 hq4 hkv4 sq128 skv128 d64/64")


def test_a_window_of_one_number_counts_the_diagonal() -> None:
    (node,) = parse("bf16 b1 hq1 sq64 d64 window=4096").mask
    assert node == WindowNode(left=4095, right=0)


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ("casual", 'did you mean "causal"'),
        ("b3", "batch once"),
        ("bias=bf16:1x1 alibi", "bias once"),
        ("window=a,b", "words like window=4095,0"),
        ("window=1,2,3", "words like window=4095,0"),
        ("window=0", "left: Input should be greater than or equal to 0"),
        ("dense", "words like dense=2x1x100x100"),
        ("dense=1x1:gard", "words like dense=2x1x100x100"),
        ("causal:grad", "words like causal or causal=bottom_right"),
        ("any(causal", 'words like any(causal+window=3,0|prefix); got "any(causal"'),
        ("any(causal))", 'words like any(causal+window=3,0|prefix); got "any(causal))"'),
        ("any(causal|)", 'got "any(causal|)"'),
        ("any", 'got "any"'),
        ("not()", 'words like not(causal+documents); got "not()"'),
        ("not(causal)keys", 'words like not(causal+documents); got "not(causal)keys"'),
        ("not(any(window=3,0|casual))", 'got "casual"; did you mean "causal"'),
        ("any(window=a|causal)", 'words like window=4095,0 or window=open,0,bottom_right; got "window=a"'),
        ("not(alibi)", 'a mask requires words that it knows; got "alibi"'),
        ("any(causal=lower)", '"causal=lower" requires'),
        ("dense=1x1:recognized=dense=1x1", "recognized.0"),
        ("prefix=3:top", "words like prefix or prefix=10,20"),
        ("documents:near", "words like documents or documents=1000,3096"),
        ("causal=lower", '"causal=lower" requires'),
        ("dropout=much", "words like softcap=30, sink, dropout=0.1"),
        ("dropout=1.5", "dropout_p requires a probability in [0, 1); got 1.5"),
        ("hkv3", "a number of heads that key's 3 heads divide; got 4"),
        ("dynamic=heads", "dynamic"),
    ],
)
def test_a_wrong_word_is_named(extra: str, names: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(f"bf16 b1 hq4 sq64 d64 {extra}")
    assert names in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def test_missing_sizes_are_named_together() -> None:
    with pytest.raises(ArgumentError, match=r"batch \(like b2\), head_dim_qk \(like d128\)"):
        parse("bf16 hq4 sq64")
