"""What `attention()` refuses of its tensors, `decide` refuses of a `Call`, with the same sentence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import attnroute
from attnroute import masks
from attnroute.cli import main
from attnroute.errors import ArgumentError
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import parse, render
from attnroute.question.nodes import (
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
)

HOST = Host(arch="cpu", versions={"torch": "2.13.0+cpu"})
LENGTHS = st.sampled_from([0, 1, 4, 6])
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])


def nodes(batch, seqlen_q, seqlen_kv):
    """Nodes of which some do not fit the sizes."""
    count = st.integers(0, seqlen_kv + 1)
    lengths = st.lists(count, min_size=batch, max_size=batch) | st.lists(count, max_size=3)
    cut = st.integers(0, seqlen_kv).map(lambda n: (n, seqlen_kv - n)) | st.lists(count, max_size=2)
    simple = st.one_of(
        st.builds(CausalNode, alignment=ALIGNMENTS),
        st.builds(WindowNode, left=st.none() | count, right=st.none() | count, alignment=ALIGNMENTS),
        st.builds(DocumentsNode, lengths=cut),
        st.builds(KeyPaddingNode, lengths=lengths),
        st.builds(PrefixNode, lengths=lengths, alignment=ALIGNMENTS),
        st.builds(DenseNode, shape=shapes(batch, seqlen_q, seqlen_kv)),
    )
    part = st.lists(simple, max_size=2).map(tuple)
    either = st.builds(AnyNode, parts=st.lists(part, max_size=2).map(tuple))
    return st.lists(simple | simple | either | st.builds(NotNode, part=part), max_size=2).map(tuple)


def shapes(batch, seqlen_q, seqlen_kv):
    whole = (batch, 2, seqlen_q, seqlen_kv)
    fitting = [(1,), (seqlen_kv,), whole[2:], whole, (1, 1, 1, seqlen_kv)]
    other = [(), (3,), whole[1:], (batch + 1, *whole[1:]), (seqlen_kv + 1, seqlen_q + 2), (1, *whole)]
    return st.sampled_from(fitting) | st.sampled_from(other)


@st.composite
def calls(draw):
    """Any call whose query, key and value can be made, heads that do not divide and none at all aside."""
    sizes = {"batch": draw(st.sampled_from([1, 2, 0])), "seqlen_q": draw(LENGTHS), "seqlen_kv": draw(LENGTHS)}
    if draw(st.booleans()):
        sizes["seqlen_kv"] = sizes["seqlen_q"]
    return Call(
        dtype="float32",
        num_heads_q=2,
        num_heads_kv=1,
        head_dim_qk=8,
        head_dim_v=8,
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        mask=draw(nodes(*sizes.values())),
        bias=draw(st.none() | st.builds(DenseBias, dtype=st.just("float32"), shape=shapes(*sizes.values()))),
        **sizes,
    )


def mask_of(node):
    """The mask object that says what a node says."""
    if isinstance(node, AnyNode):
        return masks.Either(tuple(conjunction(part) for part in node.parts))
    if isinstance(node, NotNode):
        return masks.Not(conjunction(node.part))
    made = {
        "causal": lambda: masks.Causal(node.alignment),
        "window": lambda: masks.Window(node.left, node.right, node.alignment),
        "documents": lambda: masks.Documents(lengths=node.lengths),
        "key_padding": lambda: masks.KeyPadding(lengths=node.lengths),
        "prefix": lambda: masks.PrefixLM(node.lengths, node.alignment),
        "dense": lambda: masks.Dense(torch.ones(node.shape, dtype=torch.bool)),
    }
    return made[node.kind]()


def conjunction(part):
    return masks.All(tuple(map(mask_of, part)))


def tensor(call, heads, length, head_dim):
    made = torch.zeros(call.batch, heads, length, head_dim)
    return made.transpose(1, 2) if call.layout == "bshd" else made


def arguments(call):
    return {
        "query": tensor(call, call.num_heads_q, call.seqlen_q, call.head_dim_qk),
        "key": tensor(call, call.num_heads_kv, call.seqlen_kv, call.head_dim_qk),
        "value": tensor(call, call.num_heads_kv, call.seqlen_kv, call.head_dim_v),
        "mask": conjunction(call.mask) if call.mask else None,
        "bias": None if call.bias is None else torch.zeros(call.bias.shape),
        "layout": call.layout,
    }


def refusal(ask):
    try:
        ask()
    except ArgumentError as error:
        return str(error)
    except attnroute.NoBackendError:
        return ""
    return ""


@given(calls())
def test_a_call_is_refused_by_both_or_by_none(call):
    said = refusal(lambda: attnroute.decide(call, HOST))
    assert refusal(lambda: attnroute.attention(**arguments(call))) == said
    assert refusal(lambda: attnroute.explain(**arguments(call))) == said
    assert refusal(lambda: attnroute.decide(parse(render(call)), HOST)) == said


WRONG = {
    "bf16 b1 hq4 sq10 d64 documents=3,4": "a sum of seqlen = 10",
    "bf16 b1 hq4 sq10 d64 any(documents=3,4|causal)": "a sum of seqlen = 10",
    "bf16 b1 hq4 sq10 d64 not(not(documents=3,4))": "a sum of seqlen = 10",
    "bf16 b1 hq4 sq10 skv12 d64 documents=5,5": "as many queries as keys",
    "bf16 b1 hq4 sq10 d64 keys=100": "counts from 0 to seqlen_kv = 10",
    "bf16 b1 hq4 sq10 d64 keys=1,2": r"one entry per batch row \(1\)",
    "bf16 b1 hq4 sq10 d64 prefix=99": "counts from 0 to seqlen_kv = 10",
    "bf16 b1 hq4 sq10 d64 dense=10x11": "a shape that broadcasts",
    "bf16 b1 hq4 sq10 d64 bias=bf16:3x1x10x10": "a shape that broadcasts",
    "bf16 b1 hq4 sq10 d64 bias=bf16:4x10x10": "with 1, 2 or 4 dimensions",
    "bf16 b1 hq4 sq10 d64 function=16x10": "a BlockMask made for seqlen_q = 10",
    "bf16 b1 hq0 sq10 d64": "at least one head",
    "bf16 b1 hq3 hkv2 sq10 d64": "heads divide",
    "bf16 b1 hq4 hkv0 sq10 d64": "heads divide",
    "bf16 b100000000000000000000 hq4 sq10 d64": "at most 9223372036854775807 elements",
    "bf16 b1 hq4 sq0 skv100000000000000000000 d64": "at most 9223372036854775807 elements",
    f"bf16 b{'9' * 10_000} hq4 sq4 d64": r"b requires a whole number behind it.*\(10001 characters\)",
    "bf16 b1 hq4 sq4 d64 dropout=1.5": r"dropout_p requires a probability in \[0, 1\); got 1.5; pass 0.0",
    "bf16 b1 hq4 sq4 d64 dropout=nan": "dropout_p requires a probability",
    "bf16 b1 hq4 sq4 d64 softcap=-1": "softcap requires a finite number of at least 0; got -1.0; pass 0.0",
    "bf16 b1 hq4 sq4 d64 softcap=1e39": "softcap requires 0.0, or a number from",
    "bf16 b1 hq4 sq5 skv8 d64 causal": "causal_alignment requires",
    "bf16 b1 hq4 sq5 skv8 d64 window=3,0": "causal_alignment requires",
    "bf16 b1 hq4 sq5 d64 thd documents:cross causal": "beside a cu_seqlens_kv of its own",
}


@pytest.mark.parametrize("line", WRONG)
def test_the_command_line_refuses_what_attention_refuses(line, capsys):
    with pytest.raises(ArgumentError, match=WRONG[line]):
        attnroute.decide(parse(line), HOST)
    assert main(["explain", line, "--arch", "sm_90"]) == ArgumentError.exit_code
    assert capsys.readouterr().out == ""


def test_flags_are_refused_like_words(capsys):
    sizes = ["--dtype", "bf16", "--arch", "sm_90"]
    for flags in (
        ["--q", "1,0,10,64"],
        ["--q", "1,4,10,64", "--kv", "3,10"],
        ["--q", "1,4,10,64", "--kv", "4,12", "--mask", "causal"],
        ["--q", "1,4,10,64", "--mask", "documents=3,4"],
        ["--q", "1,4,10,64", "--bias", "bf16:11x10"],
    ):
        assert main(["explain", *sizes, *flags]) == ArgumentError.exit_code
    assert capsys.readouterr().out == ""


def test_blocks_and_heads_are_refused_with_one_sentence():
    lengths, shape = (16, 10), (1, 4, 10, 8)
    blocks = create_block_mask(lambda _b, _h, i, j: j <= i, None, None, *lengths, device="cpu")
    call = parse("fp32 b1 hq4 sq10 d8").with_(mask=(FunctionNode(block_mask_shape=lengths),))
    tensors = [torch.zeros(shape)] * 3
    said = refusal(lambda: attnroute.decide(call, HOST))
    assert said == refusal(lambda: attnroute.attention(*tensors, blocks)) != ""
    one = tensors[0][:, :3]
    with pytest.raises(ArgumentError) as from_line:
        parse("fp32 b1 hq4 hkv3 sq10 d8")
    assert str(from_line.value) == refusal(lambda: attnroute.attention(tensors[0], one, one))


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [("dropout", "dropout_p", 1.0), ("dropout", "dropout_p", -0.5), ("softcap", "softcap", -1.0)]
    + [("softcap", "softcap", value) for value in (float("inf"), float("nan"), 1e39, 1e-300)],
)
def test_numbers_are_refused_with_one_sentence(word, name, value):
    tensors = [torch.zeros(1, 4, 10, 8)] * 3
    said = refusal(lambda: attnroute.attention(*tensors, **{name: value}))
    assert refusal(lambda: parse(f"fp32 b1 hq4 sq10 d8 {word}={value!r}")) == said != ""


def test_a_stated_corner_is_taken_and_said_again():
    for word in ("causal=top_left", "window=3,0,bottom_right", "window=4,top_left"):
        call = parse(f"bf16 b1 hq4 sq5 skv8 d64 {word}")
        assert parse(render(call)) == call
    assert render(parse("bf16 b1 hq4 sq8 d64 causal=top_left")).endswith("d64 causal")
