"""What the parts of a call must be beside each other, by the sizes and shapes that a `Call` holds.

One checker for `attention()`, whose arguments are checked part by part, and for whoever asks with a `Call`:
what one of them refuses the other refuses too, with the same sentence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

from attnroute.errors import ArgumentError, argument_error
from attnroute.vocabulary import MASK_DEPTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnroute.question.call import Call
    from attnroute.question.nodes import MaskNode

_DIMS: Final = 4
MOST_ELEMENTS: Final = 2**63 - 1
"""torch counts the elements of a tensor, and the bytes between them, in signed 64-bit numbers."""


LARGEST: Final = 2.0**128 - 2.0**104
"""The largest number of float32, in which kernels take scale and softcap."""
_SMALLEST: Final = 2.0**-126


class Sizes(Protocol):
    """The sizes of a call."""

    @property
    def batch(self) -> int:
        """Batch size."""

    @property
    def num_heads_q(self) -> int:
        """Query heads."""

    @property
    def seqlen_q(self) -> int:
        """Query length."""

    @property
    def seqlen_kv(self) -> int:
        """Key length."""


def check(call: Call) -> None:
    """Check everything that a call says about sizes and shapes.

    Raises:
        ArgumentError: `attention()` would refuse such tensors.
    """
    heads(call.num_heads_q, call.num_heads_kv)
    shapes = (
        ("query", (call.batch, call.num_heads_q, call.seqlen_q, call.head_dim_qk)),
        ("key", (call.batch, call.num_heads_kv, call.seqlen_kv, call.head_dim_qk)),
        ("value", (call.batch, call.num_heads_kv, call.seqlen_kv, call.head_dim_v)),
    )
    for name, shape in shapes:
        _elements(name, shape)
    for node in call.mask:
        _node(node, call)
    if call.bias is not None and call.bias.kind == "dense":
        broadcast("bias", call.bias.shape, call)


def _node(node: MaskNode, sizes: Sizes) -> None:
    if node.kind == "any":
        for inner in (inner for part in node.parts for inner in part):
            _node(inner, sizes)
    elif node.kind == "not":
        for inner in node.part:
            _node(inner, sizes)
    elif node.kind == "dense":
        broadcast("mask", node.shape, sizes, is_mask=True)
    elif node.kind == "documents" and not node.cross:
        documents(node.lengths, sizes)
    elif node.kind == "key_padding":
        counts("KeyPadding lengths", node.lengths, sizes)
    elif node.kind == "prefix":
        counts("PrefixLM lengths", node.lengths, sizes)
    elif node.kind == "function" and node.block_mask_shape is not None:
        blocks(node.block_mask_shape, sizes)


def heads(num_heads_q: int, num_heads_kv: int) -> None:
    """Every query head reads one key/value head, and each of these is read by as many."""
    if num_heads_q == 0:
        raise argument_error("query", "at least one head", num_heads_q, "check that layout is right")
    if num_heads_kv == 0 or num_heads_q % num_heads_kv:
        required = f"a number of heads that key's {num_heads_kv} heads divide"
        to_do = 'repeat key/value heads, or pass layout="bshd" where tokens come before heads'
        raise argument_error("query", required, num_heads_q, to_do)


def probability(dropout_p: float) -> float:
    """Return a probability of dropping a weight: all of them cannot be dropped."""
    if not 0.0 <= dropout_p < 1.0:
        raise argument_error("dropout_p", "a probability in [0, 1)", dropout_p, "pass 0.0 to switch it off")
    return dropout_p


def cap(name: str, value: float, kind: str = "number") -> None:
    """A cap by which kernels divide, as float32: not so small that it is 0 there, nor endless."""
    to_do = "pass 0.0 to switch it off"
    if not 0.0 <= value < math.inf:
        raise argument_error(name, f"a finite {kind} of at least 0", value, to_do)
    if value != 0.0 and not _SMALLEST <= value <= LARGEST:
        required = f"0.0, or a {kind} from {_SMALLEST:.3g} to {LARGEST:.3g}, as kernels take it in float32"
        raise argument_error(name, required, value, to_do)


def call_softcap(value: float) -> float:
    """Return the cap of a call."""
    cap("softcap", value)
    return value


def _elements(name: str, shape: tuple[int, ...]) -> None:
    """No tensor has more elements; a size of 0 hides no other one that is too large."""
    total = 1
    for size in shape:
        total *= max(size, 1)
    if total > MOST_ELEMENTS:
        to_do = "check the sizes: no tensor of torch has more"
        raise argument_error(name, f"at most {MOST_ELEMENTS} elements", f"shape {shape}", to_do)


def depth(levels: int) -> None:
    """Combinations of masks nest no deeper than every reader can go."""
    if levels > MASK_DEPTH:
        to_do = "combine fewer, or write one masks.Function"
        raise argument_error("mask", f"combinations at most {MASK_DEPTH} deep", f"{levels} levels", to_do)


def depth_of(node: MaskNode) -> int:
    """Return how many disjunctions and negations lie in each other."""
    if node.kind == "any":
        return 1 + max((depth_of(inner) for part in node.parts for inner in part), default=0)
    return 1 + max(map(depth_of, node.part), default=0) if node.kind == "not" else 0


def documents(lengths: tuple[int, ...] | None, sizes: Sizes) -> None:
    """As many queries as keys, and lengths that fill them."""
    seqlen = sizes.seqlen_kv
    if sizes.seqlen_q != seqlen:
        got = f"seqlen_q = {sizes.seqlen_q}, seqlen_kv = {seqlen}"
        to_do = "pass a dense bool mask for cached decoding of packed documents"
        raise argument_error("mask Documents", "as many queries as keys", got, to_do)
    if lengths is not None and sum(lengths) != seqlen:
        got = f"{lengths} with sum {sum(lengths)}"
        to_do = "add the missing tokens as a document of their own"
        raise argument_error("mask Documents lengths", f"a sum of seqlen = {seqlen}", got, to_do)


def entries(name: str, count: int, sizes: Sizes) -> None:
    """One entry per batch row."""
    if count != sizes.batch:
        required = f"one entry per batch row ({sizes.batch})"
        raise argument_error(f"mask {name}", required, count, "pass one count per row")


def counts(name: str, lengths: Sequence[int] | None, sizes: Sizes) -> None:
    """One count per batch row, none larger than seqlen_kv."""
    if lengths is None:
        return
    entries(name, len(lengths), sizes)
    if any(n > sizes.seqlen_kv for n in lengths):
        required = f"counts from 0 to seqlen_kv = {sizes.seqlen_kv}"
        raise argument_error(f"mask {name}", required, lengths, "count keys, not queries")


def blocks(lengths: tuple[int, ...], sizes: Sizes) -> None:
    """Blocks are made for lengths."""
    if lengths != (sizes.seqlen_q, sizes.seqlen_kv):
        required = f"a BlockMask made for seqlen_q = {sizes.seqlen_q}, seqlen_kv = {sizes.seqlen_kv}"
        raise argument_error("mask", required, lengths, "make one with create_block_mask for these lengths")


def broadcast(name: str, shape: tuple[int, ...], sizes: Sizes, *, is_mask: bool = False) -> None:
    """A shape broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv), and in one way only.

    Args:
        name: The argument.
        shape: Of its tensor: not 3-D (batch or heads first?), and no more than four dimensions.
        sizes: The sizes of the call.
        is_mask: It is a bool tensor.

    Raises:
        ArgumentError: It does not.
    """
    full = (sizes.batch, sizes.num_heads_q, sizes.seqlen_q, sizes.seqlen_kv)
    required = f"a shape that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) = {full}"
    if len(shape) == _DIMS - 1:
        to_do = f"say whether the first dimension is batch ({name}[:, None]) or heads ({name}[None])"
        raise argument_error(name, required + ", with 1, 2 or 4 dimensions", f"3-D shape {shape}", to_do)
    fits = len(shape) <= _DIMS and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)
    )
    if not fits:
        other = ", or pass masks.KeyPadding(keep=...) for one bool per key and batch row"
        raise argument_error(name, required, shape, "reshape it" + (other if is_mask else ""))


def corner(sizes: Sizes) -> None:
    """Which corner a diagonal ends in was not stated, so that both must be one."""
    if sizes.seqlen_q != sizes.seqlen_kv:
        raise argument_error(
            "causal_alignment",
            '"top_left" (as scaled_dot_product_attention) or "bottom_right" (cached decoding) when '
            "seqlen_q != seqlen_kv",
            f"None with seqlen_q = {sizes.seqlen_q} and seqlen_kv = {sizes.seqlen_kv}",
            "state it",
        )


def corner_of_each() -> ArgumentError:
    """Say that the corner was not stated where queries and keys of a sequence have lengths of their own."""
    required = (
        '"bottom_right" (as flash-attn) or "top_left" for is_causal and window beside a cu_seqlens_kv of '
        "its own"
    )
    return argument_error("causal_alignment", required, "None", "state which corner each diagonal ends in")
