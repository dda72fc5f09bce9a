"""Rounds the lengths of a call, so that calls of about one size are ranked alike and need one decision.

Lengths keep three binary digits, four values for each power of two: a decoding loop of up to 8192 keys has
some fifty of them. Where backends are put in order, times are predicted for the rounded call, so two calls of
one class (`engine.classes`) are ordered alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.question.nodes import (
    AnyNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    MaskNode,
    NotNode,
    PrefixNode,
)

if TYPE_CHECKING:
    from attnroute.question.call import Call

_DIGITS: Final = 3
FEW: Final = 16
"""Up to so many queries a call reads keys rather than multiplies: decoding."""
_ABOVE_FEW: Final = 20


def rounded_down(number: int) -> int:
    """Return the largest number of three binary digits and zeros that is not above one."""
    zeros = max(0, number.bit_length() - _DIGITS)
    return number >> zeros << zeros


def rounded(number: int) -> int:
    """Return the nearest number of three binary digits and zeros; none above `FEW` becomes one of a few."""
    half = 1 << max(0, number.bit_length() - _DIGITS) >> 1
    found = rounded_down(number + half)
    return found if number <= FEW or found > FEW else _ABOVE_FEW


def rounded_call(call: Call) -> Call:
    """Return a call of rounded lengths, its tensors of as many rows and columns.

    Of documents, padding and prefixes it keeps no lengths but how many documents there are, rounded: the
    values in a mask change with every batch.
    """
    sizes = {n: rounded(n) for n in (call.seqlen_q, call.seqlen_kv)}
    if all(n == size for n, size in sizes.items()) and not call.mask:
        return call
    bias = call.bias
    return call.changed(
        seqlen_q=sizes[call.seqlen_q],
        seqlen_kv=sizes[call.seqlen_kv],
        mask=_nodes(call.mask, sizes),
        bias=bias.changed(shape=_shape(bias.shape, sizes)) if isinstance(bias, DenseBias) else bias,
    )


def _nodes(nodes: tuple[MaskNode, ...], sizes: dict[int, int]) -> tuple[MaskNode, ...]:
    return tuple(_node(node, sizes) for node in nodes)


def _node(node: MaskNode, sizes: dict[int, int]) -> MaskNode:
    if isinstance(node, DenseNode):
        seen = None if node.recognized is None else _nodes(node.recognized, sizes)
        return node.changed(shape=_shape(node.shape, sizes), recognized=seen)
    if isinstance(node, KeyPaddingNode | PrefixNode):
        return node if node.lengths is None else node.changed(lengths=None)
    if isinstance(node, DocumentsNode):
        count = node.count if node.lengths is None else len(node.lengths)
        return node if count is None else node.changed(lengths=None, count=rounded(count))
    if isinstance(node, FunctionNode):
        return node.changed(block_mask_shape=None)
    if isinstance(node, AnyNode):
        return node.changed(parts=tuple(_nodes(part, sizes) for part in node.parts))
    return node.changed(part=_nodes(node.part, sizes)) if isinstance(node, NotNode) else node


def _shape(shape: tuple[int, ...], sizes: dict[int, int]) -> tuple[int, ...]:
    """Round the last two dimensions, which are 1 or the lengths."""
    return (*shape[:-2], *(sizes.get(size, size) for size in shape[-2:]))
