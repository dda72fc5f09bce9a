"""Draw a mask as a small picture for a notebook: who may attend whom, at up to 48 queries and 48 keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.question.nodes import (
    AnyNode,
    CausalNode,
    DocumentsNode,
    KeyPaddingNode,
    MaskNode,
    NotNode,
    PrefixNode,
    WindowNode,
    nested,
)

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.masks.lowered.form import Extent, LoweredMask
    from attnroute.vocabulary import Alignment

CELLS: Final = 48
"""Queries and keys that a picture shows at most; of more, each stands for those around it."""
ROWS: Final = 4
"""Batch rows that are drawn at most."""
LENGTH: Final = 16
"""Queries and keys of a mask that fits every length."""
_CELL: Final = 4
"""Pixels."""
_COLOR: Final = "#3b82f6"
"""Seen on a light page and on a dark one."""

Grid = list[list[bool]]


class Wish(NamedTuple):
    """At which sizes a mask is best seen; of 0 anything will do.

    Attributes:
        batch: Batch rows that differ.
        heads: Query heads that differ.
        seqlen_q: Queries.
        seqlen_kv: Keys.
        is_fixed: The mask fits no other lengths.
    """

    batch: int = 0
    heads: int = 0
    seqlen_q: int = 0
    seqlen_kv: int = 0
    is_fixed: bool = False


def square(length: int, *, batch: int = 0, is_fixed: bool = False) -> Wish:
    """Return the wish of a mask over as many queries as keys."""
    return Wish(batch, 0, length, length, is_fixed)


def together(wishes: Iterable[Wish]) -> Wish:
    """Return at which sizes masks are seen together: the lengths that one of them needs, or the largest."""
    found = list(wishes)
    lengths = [wish for wish in found if wish.is_fixed] or found
    return Wish(
        max([0, *(wish.batch for wish in found)]),
        max([0, *(wish.heads for wish in found)]),
        max([0, *(wish.seqlen_q for wish in lengths)]),
        max([0, *(wish.seqlen_kv for wish in lengths)]),
        lengths is not found,
    )


def html(text: str, extent: Extent, grids: Sequence[Grid]) -> str:
    """Return the text of a mask above a picture for each batch row; head 0 stands for all."""
    sampled = max(extent.seqlen_q, extent.seqlen_kv) > CELLS
    note = [f"{extent.seqlen_q} queries down, {extent.seqlen_kv} keys across"]
    note += [f"at most {CELLS} of each are drawn"] if sampled else []
    note += [f"{len(grids)} of {extent.batch} batch rows"] if extent.batch > 1 else []
    note += [f"head 0 of {extent.num_heads_q}"] if extent.num_heads_q > 1 else []
    pictures = "".join(_svg(grid) for grid in grids)
    return (
        f'<div><code>{escape(text)}</code><div style="display:flex;gap:8px;margin:4px 0">{pictures}</div>'
        f"<small>{'; '.join(note)}</small></div>"
    )


def numbers(lengths: Sequence[int] | Tensor) -> list[int]:
    """Return counts per batch row, from a device where they lie there."""
    return list(lengths) if isinstance(lengths, Sequence) else lengths.tolist()


def places(length: int) -> list[int]:
    """Return the queries or keys that are drawn: all, or those in the middle of equal parts."""
    count = min(length, CELLS)
    return [(2 * cell + 1) * length // (2 * count) for cell in range(count)]


def grid_of_nodes(nodes: tuple[MaskNode, ...], row: int, extent: Extent) -> Grid | None:
    """Return who may attend in a batch row by plain data, without torch; None where it says too little."""
    if not all(_is_plain(node) for node in nested(nodes)):
        return None
    allows = [_rule(node, row, extent) for node in nodes]
    columns = places(extent.seqlen_kv)
    return [[all(rule(i, j) for rule in allows) for j in columns] for i in places(extent.seqlen_q)]


def grid_of_lowered(lowered: LoweredMask, row: int, extent: Extent) -> Grid:
    """Return who may attend in a batch row, from tensors; only what is drawn leaves the device."""
    import torch

    from attnroute.masks.lowered.region import Region, allowed

    columns = torch.tensor(places(extent.seqlen_kv), device=extent.device)
    lines = []
    for i in places(extent.seqlen_q):
        found = allowed(lowered, Region(row, row + 1, 0, 1, i, i + 1, 0, extent.seqlen_kv, extent.device))
        line = torch.ones_like(columns, dtype=torch.bool) if found is None else found[0, 0, 0]
        lines.append(line.expand(extent.seqlen_kv)[columns] if found is not None else line)
    grid: Grid = torch.stack(lines).tolist()
    return grid


def _is_plain(node: MaskNode) -> bool:
    if isinstance(node, DocumentsNode | KeyPaddingNode | PrefixNode):
        return node.lengths is not None
    return isinstance(node, CausalNode | WindowNode | AnyNode | NotNode)


def _rule(node: MaskNode, row: int, extent: Extent) -> Callable[[int, int], bool]:
    """Return the rule of a node for a query and a key."""
    if isinstance(node, AnyNode):
        parts = [[_rule(n, row, extent) for n in part] for part in node.parts]
        return lambda i, j: any(all(rule(i, j) for rule in part) for part in parts)
    if isinstance(node, NotNode):
        rules = [_rule(n, row, extent) for n in node.part]
        return lambda i, j: not all(rule(i, j) for rule in rules)
    if isinstance(node, DocumentsNode):
        starts = list(accumulate(node.lengths or ()))
        return lambda i, j: bisect_right(starts, i) == bisect_right(starts, j)
    if isinstance(node, KeyPaddingNode):
        kept = (node.lengths or ())[row]
        first = extent.seqlen_kv - kept if node.side == "left" else 0
        return lambda _, j: first <= j < first + kept
    return _band(node, row, extent)


def _band(node: MaskNode, row: int, extent: Extent) -> Callable[[int, int], bool]:
    assert isinstance(node, CausalNode | WindowNode | PrefixNode)
    offset = _offset(node.alignment, extent)
    if isinstance(node, PrefixNode):
        prefix = (node.lengths or ())[row]
        return lambda i, j: j < prefix or j <= i + offset
    left, right = (node.left, node.right) if isinstance(node, WindowNode) else (None, 0)
    return lambda i, j: (
        (left is None or j >= i + offset - left) and (right is None or j <= i + offset + right)
    )


def _offset(alignment: Alignment, extent: Extent) -> int:
    return 0 if alignment == "top_left" else extent.seqlen_kv - extent.seqlen_q


def _svg(grid: Grid) -> str:
    height, width = len(grid), len(grid[0])
    path = "".join(
        f"M{start} {y}h{stop - start}v1h{start - stop}z"
        for y, line in enumerate(grid)
        for start, stop in _runs(line)
    )
    return (
        f'<svg role="img" aria-label="mask" viewBox="0 0 {width} {height}" width="{_CELL * width}" '
        f'height="{_CELL * height}" style="outline:1px solid currentColor" shape-rendering="crispEdges">'
        f'<path fill="{_COLOR}" d="{path}"/></svg>'
    )


def _runs(line: list[bool]) -> Iterable[tuple[int, int]]:
    """Return where allowed keys begin and end."""
    at = 0
    for allowed, group in groupby(line):
        length = len(list(group))
        if allowed:
            yield at, at + length
        at += length
