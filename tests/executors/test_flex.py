"""FlexAttention through `attention()` on the CPU: right at every length, compiled twice for a structure."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.reference import TOLERANCE, attend, error
from support.spy import profiled
from torch.nn.attention.flex_attention import create_block_mask

import attnroute
from attnroute import biases
from attnroute.executors.flex import compile as flex_compile
from attnroute.masks import Blocks, Causal, Dense, Documents, Function, KeyPadding, Window
from attnroute.masks.lowered import mods
from attnroute.memory import reset

HEADS_Q, HEADS_KV, HEAD_DIM = 4, 2, 16
GREAT = -30.0
"""Makes scores of a hundred and more, of both signs."""


class Sizes(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_kv: int


FIRST = (Sizes(2, 180, 200), Sizes(3, 300, 270))
"""Between these every size changes, so after them dynamo takes none for a constant. Fewer than 129 tokens are
one block, for which it compiles again whatever the second size was."""
SIZES = st.builds(
    Sizes,
    st.integers(2, 3),
    st.sampled_from([181, 200, 256, 257, 301]),
    st.sampled_from([190, 212, 243, 270, 284]),
)
"""Two lengths are never so near that a limit at the bottom right is 0, which is another text. Tensors with
an entry for each pair are all of one order of size: on the CPU another one is compiled again."""


@pytest.fixture(autouse=True)
def one_constant_band(monkeypatch):
    """A few limits of bands are compiled as numbers, whichever come first; here it is that of `Window(3)`."""
    monkeypatch.setattr(mods, "CONSTANT_BANDS", 1)
    monkeypatch.setattr(mods, "_CONSTANTS", {-3})


def near(b, h, i, j):
    return (i - j).abs() % (h + 2) != 0


def squared(score, b, h, i, j):
    return score - 0.001 * (i - j) * (i - j)


def counts(pick, sizes):
    return torch.tensor([pick(0, sizes.seqlen_kv) for _ in range(sizes.batch)])


def ids_of_documents(pick, sizes):
    torch.manual_seed(pick(0, 99))
    return Window(3) & Documents(ids=torch.randint(0, 3, (sizes.batch, sizes.seqlen_kv))), {}


def window_with_alibi(pick, sizes):
    torch.manual_seed(pick(0, 99))
    return Window(7, 1, "bottom_right"), {"softcap": 5.0, "alibi_slopes": torch.rand(HEADS_Q)}


def many_nodes_with_score_function(pick, sizes):
    mask = (Causal() | ~KeyPadding(left=counts(pick, sizes))) & ~(Window(3) & Function(near))
    return mask, {"bias": biases.Function(squared)}


def dense_with_bias(pick, sizes):
    torch.manual_seed(pick(0, 99))
    batch, *lengths = sizes
    tensor = torch.rand(batch, 1, *lengths) < pick(1, 9) / 10
    tensor[:, :, pick(0, 99) :: 3] = False
    return Dense(tensor), {"bias": torch.randn(batch, HEADS_Q, *lengths)}


def block_mask(pick, sizes):
    shift = torch.tensor(pick(0, 99))

    def shifted(b, h, i, j):
        return (i + shift >= j) & ((h < 2) | (j % 2 == 0))

    _, *lengths = sizes
    return Blocks(create_block_mask(shifted, None, HEADS_Q, *lengths, device="cpu")), {}


class Case(NamedTuple):
    """One structure: `make(pick, sizes)` gives the mask and the other arguments of a call."""

    make: object
    dtype: torch.dtype = torch.float32
    layout: str = "bhsd"
    square: bool = False


CASES = {
    "documents by ids per row in bshd": Case(ids_of_documents, torch.bfloat16, "bshd", square=True),
    "window, softcap and ALiBi": Case(window_with_alibi),
    "many nodes and a score function": Case(many_nodes_with_score_function),
    "dense and a bias": Case(dense_with_bias, torch.float16),
    "block mask": Case(block_mask),
}


def check(case, pick, sizes, scale=1.0):
    """Run one call and hold it against float64."""
    if case.square:
        sizes = sizes._replace(seqlen_kv=sizes.seqlen_q)
    mask, rest = case.make(pick, sizes)
    torch.manual_seed(pick(0, 99))
    shapes = ((HEADS_Q, sizes.seqlen_q), (HEADS_KV, sizes.seqlen_kv), (HEADS_KV, sizes.seqlen_kv))
    query, key, value = (torch.randn(sizes.batch, h, n, HEAD_DIM).to(case.dtype) for h, n in shapes)
    query *= scale
    given = (query, key, value)
    if case.layout == "bshd":
        given = [t.transpose(1, 2).contiguous() for t in given]
    with profiled("flex"), torch.no_grad():
        out = attnroute.attention(*given, mask, layout=case.layout, backend="flex", **rest)
    if isinstance(rest.get("bias"), biases.Function):
        rest["bias"] = squares(sizes)
    allowed = mask.materialize(sizes.seqlen_q, sizes.seqlen_kv, batch=sizes.batch, num_heads_q=HEADS_Q)
    expected, lse = attend(query, key, value, allowed=allowed, **rest)
    out = out.transpose(1, 2) if case.layout == "bshd" else out
    assert error(out, expected) < TOLERANCE[case.dtype]
    assert (out[lse == -torch.inf] == 0).all()


def squares(sizes):
    distance = torch.arange(sizes.seqlen_q)[:, None] - torch.arange(sizes.seqlen_kv)
    return -0.001 * distance**2.0


@pytest.mark.parametrize("name", CASES)
def test_a_structure_is_right_at_every_length_and_compiled_for_the_first_two(name):
    reset()
    for sizes in FIRST:
        check(CASES[name], Random(0).randint, sizes)

    @settings(max_examples=15, phases=(Phase.generate,))  # Shrinking would search for minutes.
    @given(data=st.data(), sizes=SIZES, scale=st.sampled_from([1.0, GREAT]))
    def always(data, sizes, scale):
        check(CASES[name], lambda low, high: data.draw(st.integers(low, high)), sizes, scale)

    always()
    (entry,) = flex_compile.entries()
    assert len(entry.seconds) == 2, entry


def test_lengths_below_a_block_compile_no_code_of_their_own():
    reset()
    case = Case(lambda pick, sizes: (KeyPadding(left=counts(pick, sizes)), {}))
    for length in (33, 70, 127, 129, 257, 34, 256, 128, 300):
        check(case, Random(length).randint, Sizes(2, length, length))
    (entry,) = flex_compile.entries()
    assert len(entry.seconds) <= 3, entry


def test_one_query_at_the_end_of_keys_that_grow():
    reset()
    case = Case(lambda *_: (Window(140, 0, "bottom_right") & KeyPadding(left=[3, 250]), {}))
    for length in (251, 257, 258, 259, 300, 384, 385):
        check(case, Random(length).randint, Sizes(2, 1, length))
    (entry,) = flex_compile.entries()
    assert len(entry.seconds) <= 2, entry
