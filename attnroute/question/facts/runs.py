"""Nodes that each allow a query one run of keys: counting then says whether a query is left none."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from attnroute.memory import cached
from attnroute.question.nodes import (
    CausalNode,
    DocumentsNode,
    KeyPaddingNode,
    MaskNode,
    PrefixNode,
    WindowNode,
)

LOOKED_AT: Final = 20_000
"""Most runs that are looked at, some 20 ms; where there are more, nothing is said."""
Run: TypeAlias = Callable[[int, int], tuple[int, int]]
"""Takes batch row and query, gives the first and the last key."""


@cached(64)
def some_run_is_empty(nodes: tuple[MaskNode, ...], seqlen_q: int, seqlen_kv: int) -> bool | None:
    """Return whether the runs of keys that nodes allow have no key in common for some query.

    From one query to the next an end of a run moves on by one or stays, but where a document begins. So what
    the runs have in common is shortest at the first or the last query, of the sequence or of a document.

    Args:
        nodes: A conjunction whose bands have one diagonal.
        seqlen_q: Queries, at least 1.
        seqlen_kv: Keys, at least 1.

    Returns:
        None where a node is of another kind or leaves its lengths to the device, or there is too much to
        look at.
    """
    runs = [_run(node, seqlen_q, seqlen_kv) for node in nodes]
    rows, queries = _rows(nodes), _decisive(nodes, seqlen_q)
    if None in runs or rows is None or len(rows) * len(queries) * len(runs) > LOOKED_AT:
        return None
    return any(_is_empty([run(row, i) for run in runs if run], seqlen_kv) for row in rows for i in queries)


def _is_empty(runs: list[tuple[int, int]], seqlen_kv: int) -> bool:
    first = max((run[0] for run in runs), default=0)
    last = min((run[1] for run in runs), default=seqlen_kv - 1)
    return max(first, 0) > min(last, seqlen_kv - 1)


def _rows(nodes: Sequence[MaskNode]) -> list[int] | None:
    """Return batch rows that differ, None where nodes speak of different numbers of them."""
    counts = [node.lengths or () for node in nodes if isinstance(node, KeyPaddingNode | PrefixNode)]
    if len({len(lengths) for lengths in counts}) > 1:
        return None
    differing = {row: place for place, row in enumerate(zip(*counts, strict=True))}
    return list(differing.values()) or [0]


def _decisive(nodes: Sequence[MaskNode], seqlen_q: int) -> set[int]:
    """Return the first and the last query of the sequence and of every document."""
    starts = {0, seqlen_q}
    for node in nodes:
        if isinstance(node, DocumentsNode):
            starts.update(_sums(node))
    return {i for start in starts for i in (start - 1, start) if 0 <= i < seqlen_q}


def _sums(node: DocumentsNode) -> list[int]:
    return list(accumulate(node.lengths or (), initial=0))


def _run(node: MaskNode, seqlen_q: int, seqlen_kv: int) -> Run | None:
    """Return what a node allows, None where it does not say."""
    if isinstance(node, CausalNode | WindowNode):
        left, right = (node.left, node.right) if isinstance(node, WindowNode) else (None, 0)
        return _band(left, right, _offset(node.alignment, seqlen_q, seqlen_kv), seqlen_kv)
    if isinstance(node, PrefixNode) and node.lengths:
        offset, counts = _offset(node.alignment, seqlen_q, seqlen_kv), node.lengths
        return lambda row, i: (0, max(counts[row] - 1, i + offset))
    if isinstance(node, KeyPaddingNode) and node.lengths and node.side != "any":
        counts = node.lengths
        if node.side == "right":
            return lambda row, _: (0, counts[row] - 1)
        return lambda row, _: (seqlen_kv - counts[row], seqlen_kv - 1)
    return _document(node, seqlen_q, seqlen_kv) if isinstance(node, DocumentsNode) else None


def _offset(alignment: str, seqlen_q: int, seqlen_kv: int) -> int:
    return seqlen_kv - seqlen_q if alignment == "bottom_right" else 0


def _band(left: int | None, right: int | None, offset: int, seqlen_kv: int) -> Run:
    def run(_: int, i: int) -> tuple[int, int]:
        first = 0 if left is None else i + offset - left
        return first, seqlen_kv - 1 if right is None else i + offset + right

    return run


def _document(node: DocumentsNode, seqlen_q: int, seqlen_kv: int) -> Run | None:
    sums = _sums(node)
    if node.cross or not node.contiguous or not (sums[-1] == seqlen_q == seqlen_kv):
        return None

    def run(_: int, i: int) -> tuple[int, int]:
        place = bisect_right(sums, i)
        return sums[place - 1], sums[place] - 1

    return run
