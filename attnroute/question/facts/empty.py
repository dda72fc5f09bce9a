"""Whether some query may attend no key: answered only where it is certain, from the data of a call alone."""

from __future__ import annotations

from typing import NamedTuple

from attnroute.question.call import Call
from attnroute.question.facts.runs import some_run_is_empty
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    KeyPaddingNode,
    MaskNode,
    NotNode,
    PrefixNode,
    WindowNode,
)
from attnroute.question.normalize import is_cross, lengths_vary
from attnroute.vocabulary import EmptyRows

Nodes = tuple[MaskNode, ...]
Band = CausalNode | WindowNode


class _Sizes(NamedTuple):
    """What is known of the lengths.

    Attributes:
        seqlen_q: Query length.
        seqlen_kv: Key length.
        static: They do not vary.
        is_square: They are equal, and there is one diagonal.
        cross: Bands have a diagonal in each document, whose lengths are not known.
    """

    seqlen_q: int
    seqlen_kv: int
    static: bool
    is_square: bool
    cross: bool

    def offset(self, alignment: str) -> int | None:
        """Return the key on the diagonal of query 0; None where it varies."""
        if alignment == "top_left":
            return 0
        return self.seqlen_kv - self.seqlen_q if self.static else None


def empty_rows_of(call: Call) -> EmptyRows:
    """Return whether some query may attend no key: "none", "some" or "unknown"."""
    dynamic = call.context.dynamic
    batch, seqlen_q = call.batch or "batch" in dynamic, call.seqlen_q or "seqlen_q" in dynamic
    if not (batch and call.num_heads_q and seqlen_q):
        return "none"
    if call.seqlen_kv == 0 and "seqlen_kv" not in dynamic:
        return "some"
    state = _conjunction(call.mask, _sizes(call)) if call.mask else "none"
    if call.bias is None or isinstance(call.bias, AlibiBias):
        return state
    added = call.bias.empty_rows if isinstance(call.bias, DenseBias) else "unknown"
    if "some" in (state, added):
        return "some"
    return added if not call.mask else "unknown"


def _sizes(call: Call) -> _Sizes:
    cross, static = is_cross(call), not lengths_vary(call)
    is_square = static and call.seqlen_q == call.seqlen_kv and not cross
    return _Sizes(call.seqlen_q, call.seqlen_kv, static, is_square, cross)


def _conjunction(nodes: Nodes, sizes: _Sizes) -> EmptyRows:
    if len(nodes) == 1 and isinstance(nodes[0], Band):
        return _band(nodes[0], sizes)
    if sizes.static and not sizes.cross:
        found = some_run_is_empty(nodes, sizes.seqlen_q, sizes.seqlen_kv)
        if found is not None:
            return "some" if found else "none"
    state = _all([_state(node, sizes) for node in nodes])
    return "none" if state == "unknown" and _share_a_key(nodes, sizes) else state


def _share_a_key(nodes: Nodes, sizes: _Sizes) -> bool:
    """Return whether all parts together are known to leave every query a key."""
    if all(_allows_first(node, sizes) for node in nodes):
        return True
    return sizes.is_square and all(map(_allows_diagonal, nodes))


def _state(node: MaskNode, sizes: _Sizes) -> EmptyRows:
    """Return whether a node alone leaves some query no key."""
    if isinstance(node, DenseNode):
        return node.empty_rows
    if isinstance(node, Band):
        return _band(node, sizes)
    if isinstance(node, KeyPaddingNode):
        return "unknown" if not node.lengths else "some" if 0 in node.lengths else "none"
    if isinstance(node, DocumentsNode):
        return "none" if sizes.seqlen_q == sizes.seqlen_kv and not sizes.cross else "unknown"
    if isinstance(node, PrefixNode):
        causal = _band(CausalNode.unchecked(alignment=node.alignment), sizes)
        if causal == "none" or _has_keys(node):
            return "none"
        return causal if node.lengths else "unknown"
    if isinstance(node, AnyNode):
        return _any([_conjunction(part, sizes) for part in node.parts])
    return _complement(node.part, sizes) if isinstance(node, NotNode) else "unknown"


def _has_keys(node: KeyPaddingNode | PrefixNode) -> bool:
    return bool(node.lengths) and 0 not in (node.lengths or ())


def _any(states: list[EmptyRows]) -> EmptyRows:
    """A row that one alternative fills is filled; one that each leaves empty may be another one each time."""
    if not states:
        return "some"
    return "none" if "none" in states else states[0] if len(states) == 1 else "unknown"


def _all(states: list[EmptyRows]) -> EmptyRows:
    """A row that one part leaves empty is empty; parts that each fill every row may share no key of it."""
    if not states:
        return "none"
    return "some" if "some" in states else states[0] if len(states) == 1 else "unknown"


def _band(node: Band, sizes: _Sizes) -> EmptyRows:
    left, right = _sides(node)
    if left is None and right is None:
        return "none"
    if sizes.cross:
        return "unknown"
    if left is None and node.alignment == "top_left":
        return "none"
    if not sizes.static:
        return "unknown"
    offset = sizes.offset(node.alignment) or 0
    first_row_ok = right is None or offset + right >= 0
    last_row_ok = left is None or sizes.seqlen_q - 1 + offset - left <= sizes.seqlen_kv - 1
    return "none" if first_row_ok and last_row_ok else "some"


def _sides(node: Band) -> tuple[int | None, int | None]:
    return (node.left, node.right) if isinstance(node, WindowNode) else (None, 0)


def _complement(nodes: Nodes, sizes: _Sizes) -> EmptyRows:
    """Return whether what a conjunction forbids, which is what any part forbids, leaves some query no key."""
    return _any([_negated(node, sizes) for node in nodes])


def _negated(node: MaskNode, sizes: _Sizes) -> EmptyRows:
    """Return whether some query is allowed every key by a node, so that its negation leaves it none."""
    if isinstance(node, NotNode):
        return _conjunction(node.part, sizes)
    if isinstance(node, AnyNode):
        return _all([_complement(part, sizes) for part in node.parts])
    if sizes.cross or not sizes.static:
        return "unknown"
    if isinstance(node, Band):
        return _negated_band(node, sizes)
    if isinstance(node, PrefixNode):
        causal = _negated_band(CausalNode.unchecked(alignment=node.alignment), sizes)
        return "some" if causal == "some" else _covered(node.lengths, sizes)
    return _covered(node.lengths, sizes) if isinstance(node, KeyPaddingNode | DocumentsNode) else "unknown"


def _covered(lengths: tuple[int, ...] | None, sizes: _Sizes) -> EmptyRows:
    if not lengths:
        return "unknown"
    return "some" if max(lengths) >= sizes.seqlen_kv else "none"


def _negated_band(node: Band, sizes: _Sizes) -> EmptyRows:
    """Some query i sees from the first key, i + offset - left <= 0, to the last one."""
    left, right = _sides(node)
    offset = sizes.offset(node.alignment) or 0
    lowest = 0 if right is None else sizes.seqlen_kv - 1 - right - offset
    highest = sizes.seqlen_q - 1 if left is None else left - offset
    return "some" if max(lowest, 0) <= min(highest, sizes.seqlen_q - 1) else "none"


def _allows_first(node: MaskNode, sizes: _Sizes) -> bool:
    """Return whether every query is known to be allowed the first key."""
    if sizes.cross:
        return False
    if isinstance(node, Band):
        return _band_allows_first(node, sizes)
    if isinstance(node, KeyPaddingNode):
        return node.side == "right" and _has_keys(node)
    if isinstance(node, PrefixNode):
        return _has_keys(node) or _band_allows_first(CausalNode.unchecked(alignment=node.alignment), sizes)
    if isinstance(node, AnyNode):
        return any(all(_allows_first(n, sizes) for n in part) for part in node.parts)
    return False


def _band_allows_first(node: Band, sizes: _Sizes) -> bool:
    left, right = _sides(node)
    offset = sizes.offset(node.alignment)
    if left is not None and (not sizes.static or offset is None or sizes.seqlen_q - 1 + offset - left > 0):
        return False
    return right is None or (offset is not None and offset + right >= 0)


def _allows_diagonal(node: MaskNode) -> bool:
    """Return whether every query is known to be allowed the key of its own index, where lengths are equal."""
    if isinstance(node, AnyNode):
        return any(all(map(_allows_diagonal, part)) for part in node.parts)
    return isinstance(node, Band | DocumentsNode | PrefixNode)
