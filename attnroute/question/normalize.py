"""Simplifies the mask of a `Call` without changing who may attend.

A node that rules nothing out at these lengths is dropped, so that a kernel without that feature stays
eligible: `Causal("bottom_right")` with one query row is no mask at all, `Window(left=4095)` over 2048
keys is none either.

What executors get is lowered from the mask objects, not from the nodes here. Both sides simplify with the
same functions (`conjunction`, `prefix_as`, `alive`), so that a kernel never gets a mask
that the decision did not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnroute.question.call import Call
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
    WindowNode,
    nested,
)
from attnroute.vocabulary import Alignment

Nodes = tuple[MaskNode, ...]
NOBODY = NotNode.unchecked(part=())
"""Nobody may attend anything."""
_CAUSAL = CausalNode()


class Sizes(NamedTuple):
    """What simplifying depends on.

    Attributes:
        batch: Batch size.
        seqlen_q: Query length.
        seqlen_kv: Key length.
        static: The lengths do not vary.
        cross: Bands have a diagonal in each document instead of one.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    static: bool = True
    cross: bool = False

    @property
    def is_square(self) -> bool:
        """Both corners are one."""
        return self.static and self.seqlen_q == self.seqlen_kv and not self.cross

    @property
    def is_empty(self) -> bool:
        """There is no pair of a query and a key."""
        return self.static and 0 in (self.seqlen_q, self.seqlen_kv)


def is_cross(call: Call) -> bool:
    """Return whether bands have a diagonal in each document instead of one."""
    for node in call.mask:
        # Most masks are bands alone, and walking down a mask costs a new class of calls more than this check.
        if not isinstance(node, CausalNode | WindowNode):
            return any(isinstance(n, DocumentsNode) and n.cross for n in nested(call.mask))
    return False


def lengths_vary(call: Call) -> bool:
    """Return whether a length may change at run time."""
    dynamic = call.context.dynamic
    return "seqlen_q" in dynamic or "seqlen_kv" in dynamic


def normalize(call: Call) -> Call:
    """Return the call with trivially true nodes dropped and alignments of square calls unified."""
    if not call.mask:
        return call
    nodes = conjunction(call.mask, _sizes(call))
    return call if nodes == call.mask else call.changed(mask=nodes)


def recognized(call: Call) -> Call | None:
    """Return the call with recognised dense nodes replaced by their structure, or None if there are none.

    Tensors inside a disjunction or a negation stay what they are: their values are not read.
    """
    if not call.mask or not [n for n in call.mask if isinstance(n, DenseNode) and n.recognized is not None]:
        return None
    nodes: list[MaskNode] = []
    for node in call.mask:
        if isinstance(node, DenseNode) and node.recognized is not None:
            # As in stock attention, values that the tensor leaves out reach the output where they are NaN.
            nodes.extend(_finite(n) if isinstance(n, KeyPaddingNode) else n for n in node.recognized)
        else:
            nodes.append(node)
    return normalize(call.changed(mask=tuple(nodes)))


def _finite(node: KeyPaddingNode) -> KeyPaddingNode:
    return node.changed(finite=True)


def conjunction(nodes: Nodes, sizes: Sizes) -> Nodes:
    """Return the nodes that all must allow, simplified and each once; none where there is no pair."""
    if sizes.is_empty:
        return ()
    if sizes.cross is not (cross := _is_cross(nodes)):
        sizes = sizes._replace(cross=cross)
    simple: list[MaskNode] = []
    for node in nodes:
        for part in _simplified(node, sizes):
            if part not in simple or not _determines_mask(part):
                simple.append(part)
    return tuple(simple)


def alive(parts: Sequence[Nodes], sizes: Sizes) -> list[tuple[int, Nodes]] | None:
    """Return which alternatives of a disjunction matter, each with its place and simplified.

    Returns:
        None where the disjunction rules nothing out, because one alternative allows everything.
    """
    if sizes.is_empty:
        return None
    found: list[tuple[int, Nodes]] = []
    for place, part in enumerate(parts):
        simple = conjunction(part, sizes)
        if not simple:
            return None
        repeated = all(map(_determines_mask, simple)) and any(simple == other for _, other in found)
        if not repeated and not any(map(_is_nobody, simple)):
            found.append((place, simple))
    return found


def prefix_as(node: PrefixNode, sizes: Sizes) -> Nodes:
    """Return a prefix node, or what it is at these lengths: nothing, or causal."""
    if sizes.is_empty or sizes.cross:
        return () if sizes.is_empty else (node,)
    causal = _causal(CausalNode.unchecked(alignment=node.alignment), sizes)
    if not causal:
        return ()
    if sizes.is_square:
        node = node.changed(alignment="top_left")
    if not node.lengths:
        return (node,)
    if sizes.static and min(node.lengths) >= sizes.seqlen_kv:
        return ()
    # The first query sees one key more than the offset of its diagonal: a prefix within is seen anyway.
    seen = 1
    if node.alignment == "bottom_right":
        seen = max(0, sizes.seqlen_kv - sizes.seqlen_q + 1) if sizes.static else 0
    return causal if max(node.lengths) <= seen else (node,)


def open_sides(
    left: int | None, right: int | None, alignment: Alignment, sizes: Sizes
) -> tuple[int | None, int | None]:
    """Return the two sides of a window, None in place of one that rules nothing out at these lengths."""
    if sizes.is_empty:
        return None, None
    last_q, last_kv = sizes.seqlen_q - 1, sizes.seqlen_kv - 1
    far_left, far_right = (last_q, last_kv) if alignment == "top_left" else (last_kv, last_q)
    return (
        None if left is not None and left >= far_left else left,
        None if right is not None and right >= far_right else right,
    )


def _sizes(call: Call) -> Sizes:
    return Sizes(call.batch, call.seqlen_q, call.seqlen_kv, static=not lengths_vary(call))


def _simplified(node: MaskNode, sizes: Sizes) -> Nodes:
    if isinstance(node, CausalNode):
        return _causal(node, sizes)
    if isinstance(node, WindowNode):
        return _window(node, sizes)
    if isinstance(node, DocumentsNode):
        return _documents(node)
    if isinstance(node, KeyPaddingNode):
        return _key_padding(node, sizes)
    if isinstance(node, PrefixNode):
        return prefix_as(node, sizes)
    if isinstance(node, AnyNode):
        return _any(node, sizes)
    return _not(node, sizes) if isinstance(node, NotNode) else (node,)


def _causal(node: CausalNode, sizes: Sizes) -> Nodes:
    if not sizes.static:
        return (node,)
    # Without a second key, or with nothing but the last query, there is nothing behind the diagonal.
    far = sizes.seqlen_kv if node.alignment == "top_left" else sizes.seqlen_q
    if far <= 1:
        return ()
    return (_CAUSAL,) if sizes.is_square else (node,)


def _window(node: WindowNode, sizes: Sizes) -> Nodes:
    left, right, alignment = node.left, node.right, node.alignment
    if sizes.static:
        if sizes.is_square:
            alignment = "top_left"
        left, right = open_sides(left, right, alignment, sizes)
    if left is None and right is None:
        return ()
    if left is None and right == 0:
        return _causal(CausalNode.unchecked(alignment=alignment), sizes)
    return (WindowNode.unchecked(left=left, right=right, alignment=alignment),)


def _documents(node: DocumentsNode) -> Nodes:
    if node.lengths is None or node.cross:
        return (node,)
    lengths = tuple(n for n in node.lengths if n)
    return (node.changed(lengths=lengths),) if len(lengths) > 1 else ()


def _key_padding(node: KeyPaddingNode, sizes: Sizes) -> Nodes:
    if not sizes.static or not node.lengths:
        return (node,)
    return () if min(node.lengths) >= sizes.seqlen_kv else (node,)


def _any(node: AnyNode, sizes: Sizes) -> Nodes:
    found = alive(node.parts, sizes)
    if found is None:
        return ()
    if not found:
        return (NOBODY,)
    if len(found) == 1 and not sizes.cross and not _is_cross(found[0][1]):
        return found[0][1]
    return (AnyNode.unchecked(parts=tuple(part for _, part in found)),)


def _not(node: NotNode, sizes: Sizes) -> Nodes:
    if len(node.part) == 1 and isinstance(node.part[0], NotNode):
        # The part is not simplified beside what it negates: that would double the work at every level.
        inner = conjunction(node.part[0].part, sizes)
        return (node,) if sizes.cross or _is_cross(inner) else inner
    part = conjunction(node.part, sizes)
    if any(map(_is_nobody, part)):
        return ()
    # Only what was written as a negation of a negation is undone, because that is what `Not.lower` undoes.
    return (node,) if len(part) == 1 and isinstance(part[0], NotNode) else (NotNode.unchecked(part=part),)


def _is_cross(nodes: Nodes) -> bool:
    """Beside documents with diagonals of their own, a band that comes from elsewhere would become theirs."""
    return any(isinstance(n, DocumentsNode) and n.cross for n in nodes)


def _is_nobody(node: MaskNode) -> bool:
    """Return whether a simplified node forbids everything."""
    if isinstance(node, KeyPaddingNode):
        return bool(node.lengths) and not any(node.lengths or ())
    return node == NOBODY


def _determines_mask(node: MaskNode) -> bool:
    """Return whether equal nodes are equal masks: not where their values are on the device alone."""
    if isinstance(node, DocumentsNode):
        return node.lengths is not None and node.contiguous
    if isinstance(node, KeyPaddingNode):
        return node.lengths is not None and node.side != "any"
    if isinstance(node, PrefixNode):
        return node.lengths is not None
    if isinstance(node, AnyNode):
        return all(_determines_mask(inner) for part in node.parts for inner in part)
    if isinstance(node, NotNode):
        return all(map(_determines_mask, node.part))
    return not isinstance(node, DenseNode | FunctionNode)
