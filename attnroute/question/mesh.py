"""Split one call over the ranks of a mesh: batch rows, heads and tokens of a rank, as calls of their own.

Batch rows go over `dp`, heads over `tp`, in pieces as torch's `Shard` makes them: each as large as the
largest, the last ones smaller. Tokens go over `cp`, and only evenly.
"""

from __future__ import annotations

from collections import Counter
from math import gcd
from typing import Annotated, Final, NamedTuple

from pydantic import Field

from attnroute.errors import ArgumentError, did_you_mean, quoted
from attnroute.question.call import Call, Context
from attnroute.question.nodes import (
    AnyNode,
    CausalNode,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    MaskNode,
    NotNode,
    PrefixNode,
)
from attnroute.question.plain import Plain

Ranks = Annotated[int, Field(ge=1, le=2**20)]
_HALVES: Final = 2
"""Pieces of a rank's tokens in a balanced ring: one from the front and one from the back of the sequence."""


class Mesh(Plain):
    """How many ranks each dimension of a device mesh has; `tp` is the innermost, then `cp`, then `dp`."""

    dp: Ranks = 1
    cp: Ranks = 1
    tp: Ranks = 1

    @property
    def ranks(self) -> int:
        """The ranks of all dimensions together."""
        return self.dp * self.cp * self.tp


class Share(NamedTuple):
    """What some ranks have of a call before its tokens are split.

    Attributes:
        call: The call with their batch rows and heads.
        ranks: How many ranks have as many.
        readers: How many ranks of `tp` have the same key/value heads.
        kv_whole: The key/value heads that each rank holds, and of which it reads some, where no split of them
            goes with that of the query heads; None where each holds what it reads.
    """

    call: Call
    ranks: int
    readers: int
    kv_whole: int | None = None

    @property
    def copies_heads(self) -> bool:
        """Whether a key/value head is copied for each query head, as these share them unevenly."""
        return self.kv_whole is not None and 1 < self.call.num_heads_kv == self.call.num_heads_q


class Step(NamedTuple):
    """One kind of attention call that a rank of a ring makes, and how often."""

    call: Call
    times: int


def mesh_of(text: str) -> Mesh:
    """Return the mesh that words like "tp=2,cp=4" describe.

    Raises:
        ArgumentError: A word names no dimension, names one twice, or has no count of ranks.
    """
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, _, count = (part.strip() for part in word.partition("="))
        if name not in Mesh.model_fields or name in sizes:
            near = did_you_mean(name, Mesh.model_fields) or "."
            required = "sizes of tp (heads), cp (tokens) and dp (batch rows), each once, like tp=2,cp=4"
            raise ArgumentError(f"--mesh requires {required}; got {quoted(text)}{near}")
        if not count.isdecimal() or not 1 <= int(count[:8]) <= 2**20 or len(count) > len(str(2**20)):
            raise ArgumentError(f"--mesh requires a count of ranks behind {name}=; got {quoted(word)}.")
        sizes[name] = int(count)
    return Mesh(**sizes)


def shares(call: Call, mesh: Mesh) -> list[Share]:
    """Return what the ranks of `dp` and `tp` have of a call, those with the most first.

    Raises:
        ArgumentError: A rank would have no batch row or head.
    """
    if call.layout == "thd" and max(mesh.dp, mesh.cp) > 1:
        got = f"dp={mesh.dp},cp={mesh.cp} with layout thd"
        to_do = "describe what one rank packs, and give tp alone"
        raise ArgumentError(
            f"--mesh requires calls with a batch dimension for dp and cp; got {got}; {to_do}."
        )
    rows = _pieces("dp", mesh.dp, call.batch, "batch rows")
    heads, readers, kv_whole = _heads(call, mesh.tp)
    found = Counter((batch, *pair) for batch in rows for pair in heads)
    return [
        Share(_narrowed(call, batch, num_q, num_kv), count * mesh.cp, readers, kv_whole)
        for (batch, num_q, num_kv), count in sorted(found.items(), reverse=True)
    ]


def ring(call: Call, cp: int) -> list[Step]:
    """Return the calls of one rank of a ring: its queries stay, keys and values come from rank to rank.

    A ring that is causal and no more is balanced: each rank has a piece of the front and one of the back, and
    sees half of what comes from another rank, so that all work as long.

    Raises:
        ArgumentError: `cp` does not divide the tokens, or a causal call has more keys than queries.
    """
    is_causal = bool(call.mask) and all(isinstance(node, CausalNode) for node in call.mask)
    if is_causal and call.seqlen_q != call.seqlen_kv:
        got = f"{call.seqlen_q} and {call.seqlen_kv}"
        required = "as many queries as keys in a causal ring"
        raise ArgumentError(f"--mesh cp requires {required}; got {got}; exchange tokens for heads.")
    _tokens(call, cp * (_HALVES if is_causal else 1))
    queries, keys = call.seqlen_q // cp, call.seqlen_kv // cp
    own = _shortened(call, queries, keys, call.mask)
    if cp == 1 or not is_causal:
        return [Step(own, cp)]
    return [Step(own, 1), Step(_shortened(call, queries, keys // _HALVES, ()), cp - 1)]


def ulysses(call: Call, cp: int) -> tuple[Call, int]:
    """Return the call of a rank with all tokens and some heads, and how often key/value heads are copied.

    Raises:
        ArgumentError: `cp` does not divide the tokens or the query heads.
    """
    _tokens(call, cp)
    num_q, num_kv = call.num_heads_q, call.num_heads_kv
    if num_q % cp:
        choice = ", ".join(str(n) for n in range(1, num_q + 1) if num_q % n == 0)
        required = f"query heads that it divides; got {num_q}; choose one of {choice}"
        raise ArgumentError(f"--mesh cp={cp} requires {required}.")
    copies = cp // gcd(num_kv, cp)
    return _narrowed(call, call.batch, num_q // cp, num_kv * copies // cp), copies


def pieces(count: int, parts: int) -> list[int]:
    """Return how many of something each rank has: what torch's `Shard` gives, as `torch.chunk` cuts."""
    most = -(-count // parts)
    return [max(0, min(most, count - most * part)) for part in range(parts)]


def _pieces(name: str, parts: int, count: int, of: str) -> list[int]:
    found = pieces(count, parts)
    if not found[-1]:
        empty = found.count(0)
        clause = f"torch's Shard would leave {empty} of {parts} ranks without any"
        raise ArgumentError(f"--mesh {name}={parts} requires {of} for every rank; got {count}; {clause}.")
    return found


def _heads(call: Call, tp: int) -> tuple[list[tuple[int, int]], int, int | None]:
    """Return query and key/value heads of each rank's call, how many ranks share the latter, and `kv_whole`.

    Raises:
        ArgumentError: A rank would have no head.
    """
    num_q, num_kv = call.num_heads_q, call.num_heads_kv
    if num_kv < tp and tp % max(1, num_kv) == 0 and num_q % tp == 0:
        return [(num_q // tp, 1)] * tp, tp // num_kv, None
    queries, keys = _pieces("tp", tp, num_q, "query heads"), pieces(num_kv, tp)
    if all(q * num_kv == k * num_q for q, k in zip(queries, keys, strict=True)):
        return list(zip(queries, keys, strict=True)), 1, None
    return _of_whole(queries, num_q // num_kv), tp, num_kv


def _of_whole(queries: list[int], shared: int) -> list[tuple[int, int]]:
    """Return the heads of each rank's call where it has all key/value heads, as calls on DTensors cut them.

    Args:
        queries: The query heads of each rank.
        shared: How many of them a key/value head has.
    """
    found, start = [], 0
    for own in queries:
        stop = start + own
        keys = -(-stop // shared) - start // shared
        # Heads that are not shared evenly are copied for each query head.
        found.append((own, keys if keys == 1 or keys * shared == own else own))
        start = stop
    return found


def _tokens(call: Call, parts: int) -> None:
    if call.seqlen_q % parts or call.seqlen_kv % parts or not call.seqlen_q:
        got = f"seqlen_q = {call.seqlen_q} and seqlen_kv = {call.seqlen_kv}"
        raise ArgumentError(
            f"--mesh cp requires lengths that {parts} pieces divide; got {got}; pad the tokens."
        )


def _narrowed(call: Call, batch: int, num_q: int, num_kv: int) -> Call:
    """Return a call with fewer batch rows and heads."""
    full = (call.batch, call.num_heads_q)
    counts = {full[0]: batch}, {full[1]: num_q}
    nodes = tuple(_cut(node, counts, batch == call.batch) for node in call.mask)
    bias = call.bias
    if bias is not None and bias.kind == "dense":
        bias = bias.changed(shape=_shape(bias.shape, counts))
    return call.changed(batch=batch, num_heads_q=num_q, num_heads_kv=num_kv, mask=nodes, bias=bias)


_Sizes = tuple[dict[int, int], ...]
"""Of the dimensions of a mask tensor in their order: its size, and that of a rank's part."""


def _shortened(call: Call, seqlen_q: int, seqlen_kv: int, mask: tuple[MaskNode, ...]) -> Call:
    """Return the call of one step of a ring."""
    counts: _Sizes = ({}, {}, {call.seqlen_q: seqlen_q}, {call.seqlen_kv: seqlen_kv})
    bias = call.bias
    if bias is not None and bias.kind == "dense":
        bias = bias.changed(shape=_shape(bias.shape, counts))
    return call.changed(
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        mask=tuple(_cut(node, counts, False) for node in mask),
        bias=bias,
        context=Context(**{**dict(call.context), "distributed": "ring"}),
    )


def _cut(node: MaskNode, counts: _Sizes, keeps_rows: bool) -> MaskNode:
    """Return a part of a mask over fewer rows, heads or tokens; lengths that differ by rank are not known."""
    if isinstance(node, DenseNode):
        return node.changed(shape=_shape(node.shape, counts))
    if isinstance(node, AnyNode):
        parts = tuple(tuple(_cut(inner, counts, keeps_rows) for inner in part) for part in node.parts)
        return node.changed(parts=parts)
    if isinstance(node, NotNode):
        return node.changed(part=tuple(_cut(inner, counts, keeps_rows) for inner in node.part))
    if isinstance(node, DocumentsNode):
        return node if len(counts) == _HALVES else node.changed(lengths=None, count=None)
    if isinstance(node, KeyPaddingNode | PrefixNode):
        return node if keeps_rows else node.changed(lengths=None)
    if isinstance(node, FunctionNode) and node.block_mask_shape is not None and len(counts) > _HALVES:
        lengths = zip(node.block_mask_shape, counts[2:], strict=True)
        return node.changed(block_mask_shape=tuple(part.get(size, size) for size, part in lengths))
    return node


def _shape(shape: tuple[int, ...], counts: _Sizes) -> tuple[int, ...]:
    """Return the shape of a rank's part of a tensor that broadcasts to the scores."""
    dims = 4
    found = list(shape)
    for place, part in enumerate(counts):
        at = len(shape) - dims + place
        if at >= 0:
            found[at] = part.get(shape[at], shape[at])
    return tuple(found)
