"""FlexAttention on a CUDA device: outputs, log-sum-exps and gradients equal float64, by its kernels alone.

Most cases compile a forward and a backward of their own, which takes seconds.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from support.cuda_problems import TOLERANCE
from support.kernel_names import KERNELS, names_of
from support.reference import attend, error
from support.spy import ALL_SCORES
from torch.nn.attention.flex_attention import create_block_mask

import attnroute
from attnroute import biases, masks
from attnroute.executors.flex import compile as flex_compile
from attnroute.memory import reset

pytestmark = pytest.mark.gpu

DEVICE, BACKEND = "cuda", "flex"
BATCH, HEADS_Q, HEADS_KV = 2, 4, 2
FORWARD, BACKWARD = r"flex_(attention|decoding)(?!_backward)", r"flex_attention_backward"
"""Device kernel names: templates and what is fused into them are named after the operator."""


def problem(
    seqlen_q,
    seqlen_kv=None,
    *,
    batch=BATCH,
    heads_q=HEADS_Q,
    head_dim=64,
    head_dim_v=None,
    dtype=torch.bfloat16,
    train=True,
):
    """Return query, key and value in layout bhsd."""
    torch.manual_seed(0)
    seqlen_kv = seqlen_kv or seqlen_q
    shapes = (
        (heads_q, seqlen_q, head_dim),
        (HEADS_KV, seqlen_kv, head_dim),
        (HEADS_KV, seqlen_kv, head_dim_v or head_dim),
    )
    return [torch.randn(batch, *shape, device=DEVICE).to(dtype).requires_grad_(train) for shape in shapes]


def kept(tensor):
    return tensor


def check_kernels(run, *, train):
    """Fail unless the device ran FlexAttention's templates, and no other attention."""
    _, on_device, names = names_of(run)
    assert any(re.search(FORWARD, name) for name in on_device), sorted(on_device)
    assert any(re.search(BACKWARD, name) for name in on_device) == train, sorted(on_device)
    others = "|".join(pattern for backend, pattern in KERNELS.items() if backend != "math")
    assert not [name for name in on_device if re.search(others, name)]
    assert "attnroute::flex" in names
    assert not names & ALL_SCORES


def check(inputs, mask=None, *, allowed=None, trained=(), wanted=None, turn=kept, back=kept, **rest):
    """Run one call with its backward, and hold everything against float64.

    Args:
        inputs: Query, key and value in layout bhsd.
        mask: As `attention()` takes it.
        allowed: The same as a bool tensor.
        trained: Tensors beside query, key and value that get a gradient.
        wanted: The arguments of the reference where they are others than those of the call.
        turn: From layout bhsd to the layout of the call.
        back: From the layout of the call to layout bhsd.
        **rest: Further arguments of the call.
    """
    given = [turn(t) for t in inputs]
    train = inputs[0].requires_grad
    trained = [*inputs, *trained]
    reference = {k: v for k, v in rest.items() if k in {"bias", "softcap", "sink", "alibi_slopes"}}
    want, want_lse = attend(*inputs, allowed=allowed, **(reference if wanted is None else wanted))
    cotangent = torch.randn_like(want).to(inputs[0].dtype)

    def run():
        out, lse = attnroute.attention(*given, mask, backend=BACKEND, return_lse=True, **rest)
        out, lse = back(out), lse.view(want_lse.shape)
        return out, lse, torch.autograd.grad(out, trained, cotangent) if train else ()

    out, lse, grads = run()
    check_kernels(run, train=train)
    tolerance = TOLERANCE[out.dtype]
    assert error(out, want) <= tolerance
    empty = want_lse == -math.inf
    assert (out[empty] == 0).all()
    assert torch.equal(lse == -math.inf, empty)
    assert (lse.double() - want_lse)[~empty].abs().max() < 1e-3
    for place, got in enumerate(grads):
        true = torch.autograd.grad(want, trained[place], cotangent.double(), retain_graph=True)[0].double()
        off = error(got, true, floor=2.0)
        assert off <= 2 * tolerance, f"gradient {place}: {off}"
    if train:
        assert (grads[0][empty] == 0).all()


class Places(NamedTuple):
    """Indices that broadcast to (batch, num_heads_q, seqlen_q, seqlen_kv)."""

    b: torch.Tensor
    h: torch.Tensor
    i: torch.Tensor
    j: torch.Tensor


def places(seqlen_q, seqlen_kv, heads_q=HEADS_Q):
    shapes = ((BATCH, 1, 1, 1), (1, heads_q, 1, 1), (1, 1, seqlen_q, 1), (1, 1, 1, seqlen_kv))
    return Places(*(torch.arange(max(shape), device=DEVICE).view(shape) for shape in shapes))


def of_row(*numbers):
    """Return one number per batch row, to compare with indices."""
    return torch.tensor(numbers, device=DEVICE).view(-1, 1, 1, 1)


def striped(b, h, i, j):
    return (i + j + b) % (h + 3) > 0


def within(b, h, i, j):
    return (i - j).abs() < 70


def scattered(at):
    """One query sees no key, and neither does a whole block of queries."""
    known = torch.Generator().manual_seed(1)
    full = torch.rand(BATCH, 1, at.i.numel(), at.j.numel(), generator=known).to(DEVICE) < 0.5
    return full & (at.i != 3) & (at.i // 128 != 1)


class Case(NamedTuple):
    """How a mask is made, and what it says."""

    make: object
    allowed: object
    seqlen_q: int = 200
    seqlen_kv: int = 200


CASES = {
    "nothing": Case(lambda: None, lambda at: at.j >= 0),
    "causal": Case(masks.Causal, lambda at: at.j <= at.i, 256, 256),
    "causal with empty rows": Case(
        lambda: masks.Causal("bottom_right"), lambda at: at.j <= at.i - 130, 330, 200
    ),
    "window": Case(
        lambda: masks.Window(40, 9), lambda at: (at.j - at.i <= 9) & (at.i - at.j <= 40), 330, 200
    ),
    "window at the bottom right": Case(
        lambda: masks.Window(140, 0, "bottom_right"),
        lambda at: (at.j <= at.i + 130) & (at.j >= at.i - 10),
        200,
        330,
    ),
    "causal and documents": Case(
        lambda: masks.Causal() & masks.Documents(lengths=[60, 1, 0, 139]),
        lambda at: (at.j <= at.i) & ((at.i < 60) == (at.j < 60)) & ((at.i == 60) == (at.j == 60)),
    ),
    "causal and padding, nothing in one batch row": Case(
        lambda: masks.Causal() & masks.KeyPadding(lengths=[150, 0]),
        lambda at: (at.j <= at.i) & (at.j < of_row(150, 0)),
    ),
    "causal and padding at the left": Case(
        lambda: masks.Causal() & masks.KeyPadding(left=[131, 5]),
        lambda at: (at.j <= at.i) & (at.j >= of_row(131, 5)),
    ),
    "prefix": Case(lambda: masks.PrefixLM([140, 3]), lambda at: (at.j <= at.i) | (at.j < of_row(140, 3))),
    "or and not": Case(
        lambda: (masks.Causal() | masks.KeyPadding(lengths=[20, 3])) & ~masks.Window(4, 4),
        lambda at: ((at.j <= at.i) | (at.j < of_row(20, 3))) & ((at.i - at.j).abs() > 4),
    ),
    "dense": Case(lambda: masks.Dense(scattered(places(200, 330))), scattered, 200, 330),
    "function": Case(lambda: masks.Function(striped), lambda at: striped(*at)),
    "block mask": Case(
        lambda: create_block_mask(within, None, None, 200, 330, device=DEVICE),
        lambda at: within(*at),
        200,
        330,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask(name):
    make, allowed, *lengths = CASES[name]
    check(problem(*lengths), make(), allowed=allowed(places(*lengths)))


def causal(seqlen_q, seqlen_kv=None):
    _, _, i, j = places(seqlen_q, seqlen_kv or seqlen_q)
    return j <= i


def test_softcap():
    check(problem(200), masks.Causal(), allowed=causal(200), softcap=3.0)


@pytest.mark.parametrize("shape", [(HEADS_Q,), (BATCH, HEADS_Q)], ids=["heads", "rows"])
def test_alibi_and_the_gradient_of_its_slopes(shape):
    slopes = torch.rand(shape, device=DEVICE).div(20).requires_grad_()
    mask = masks.Causal("bottom_right")
    _, _, i, j = places(200, 330)
    check(problem(200, 330), mask, allowed=j <= i + 130, alibi_slopes=slopes, trained=[slopes])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, HEADS_Q, 200, 330), torch.float32), ((BATCH, 1, 1, 330), torch.bfloat16)],
    ids=["float32", "bfloat16 that broadcasts"],
)
def test_a_bias_and_its_gradient(shape, dtype):
    bias = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    check(problem(200, 330), bias=bias, trained=[bias])


def test_a_score_function_that_reads_a_tensor_with_a_gradient():
    slopes = torch.randn(HEADS_Q, device=DEVICE).requires_grad_()

    def tilted(score, b, h, i, j):
        return score + slopes[h] * (i - j) / 100

    _, h, i, j = places(200, 200)
    check(
        problem(200),
        bias=biases.Function(tilted),
        trained=[slopes],
        wanted={"bias": slopes[h] * (i - j) / 100},
    )


def test_a_sink_and_its_gradient():
    sink = torch.randn(HEADS_Q, device=DEVICE).requires_grad_()
    _, _, i, j = places(200, 200)
    mask = masks.Causal() & masks.KeyPadding(left=[9, 0])
    check(problem(200), mask, allowed=(j <= i) & (j >= of_row(9, 0)), sink=sink, trained=[sink])


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 16), (40, 40), (96, 96), (192, 128), (256, 256), (320, 320), (512, 512)],
)
def test_a_head_dim(head_dim, head_dim_v):
    check(problem(200, head_dim=head_dim, head_dim_v=head_dim_v), masks.Causal(), allowed=causal(200))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "train"),
    [
        (torch.float16, 64, True),
        (torch.float32, 64, True),
        (torch.float32, 96, False),
        (torch.float32, 192, False),
        (torch.float32, 512, False),
    ],
    ids=str,
)
def test_a_dtype(dtype, head_dim, train):
    inputs = problem(200, head_dim=head_dim, dtype=dtype, train=train)
    check(inputs, masks.Causal(), allowed=causal(200))


@pytest.mark.parametrize(
    ("seqlen_q", "heads_q", "head_dim", "train"),
    [
        (1, 2, 64, False),
        (1, 8, 64, False),
        (1, 6, 96, False),
        (1, 4, 320, False),
        (2, 16, 64, False),
        (100, 8, 64, True),
        (127, 8, 160, False),
    ],
)
def test_few_queries_at_the_end_of_their_keys(seqlen_q, heads_q, head_dim, train):
    inputs = problem(seqlen_q, 330, heads_q=heads_q, head_dim=head_dim, train=train)
    _, _, i, j = places(seqlen_q, 330, heads_q)
    last = i + 330 - seqlen_q
    mask = masks.Window(200, 0, "bottom_right") & masks.KeyPadding(left=[180, 5])
    check(inputs, mask, allowed=(j <= last) & (j >= last - 200) & (j >= of_row(180, 5)))


def spread(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def with_gaps(tensor):
    return torch.cat([tensor, tensor[..., :8]], -1)[..., :-8]


def misaligned(tensor):
    return torch.cat([tensor, tensor[..., :1]], -1)[..., :-1]


def turned(tensor):
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("store", [spread, with_gaps, misaligned, turned])
def test_a_storage(store):
    inputs = [store(t) for t in problem(200, train=False)]
    check(inputs, masks.Causal(), allowed=causal(200))


def test_bshd():
    def turn(tensor):
        return tensor.transpose(1, 2).contiguous()

    check(problem(200), masks.Causal(), allowed=causal(200), turn=turn, back=turn, layout="bshd")


@pytest.mark.parametrize(
    ("lengths_q", "lengths_kv", "alignment", "train"),
    [
        ((60, 1, 0, 139), (60, 1, 0, 139), None, True),
        ((60, 1, 5, 139), (90, 30, 0, 139), "bottom_right", True),
        ((1, 1, 1), (90, 30, 139), "bottom_right", False),
    ],
    ids=["one set of sequences", "two sets", "one query each"],
)
def test_thd(lengths_q, lengths_kv, alignment, train):
    sums = [
        torch.tensor([0, *accumulate(n)], device=DEVICE, dtype=torch.int32) for n in (lengths_q, lengths_kv)
    ]
    row_q, row_kv = (torch.repeat_interleave(torch.tensor(n, device=DEVICE)) for n in (lengths_q, lengths_kv))
    ends_q, ends_kv = (total[1:].long() for total in sums)
    # Both are counted from the ends of their sequences, where the diagonal is.
    behind_q = ends_q[row_q] - torch.arange(row_q.numel(), device=DEVICE)
    behind_kv = ends_kv[row_kv] - torch.arange(row_kv.numel(), device=DEVICE)
    check(
        problem(sum(lengths_q), sum(lengths_kv), batch=1, train=train),
        allowed=(row_q[:, None] == row_kv) & (behind_kv >= behind_q[:, None]),
        turn=lambda t: t[0].transpose(0, 1),
        back=lambda t: t.transpose(0, 1)[None],
        layout="thd",
        is_causal=True,
        causal_alignment=alignment,
        cu_seqlens_q=sums[0],
        cu_seqlens_kv=None if lengths_q == lengths_kv else sums[1],
        max_seqlen_q=max(lengths_q),
        max_seqlen_kv=max(lengths_kv),
    )


def test_lengths_compile_twice_at_most_and_whole_blocks_have_code_of_their_own():
    reset()
    for length in (130, 300, 451, 777, 1030, 256, 512, 384, 1024):
        _, _, i, j = places(length, length)
        left = of_row(length - 9, 5)
        mask = masks.Causal() & masks.KeyPadding(left=[length - 9, 5])
        check(problem(length), mask, allowed=(j <= i) & (j >= left))
    entries = flex_compile.entries()
    assert len(entries) == 2, entries
    assert all(len(entry.seconds) <= 2 for entry in entries), entries
