"""What the nodes of a mask are, those inside disjunctions and negations among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnroute.question.call import AnyNode, Call, DocumentsNode, MaskNode, NotNode


def nested(nodes: Iterable[MaskNode]) -> Iterator[MaskNode]:
    """Yield the nodes, and those that disjunctions and negations among them hold."""
    for node in nodes:
        yield node
        if isinstance(node, AnyNode):
            for part in node.parts:
                yield from nested(part)
        elif isinstance(node, NotNode):
            yield from nested(node.part)


def is_cross(call: Call) -> bool:
    """Return whether bands have a diagonal in each document instead of one."""
    return any(isinstance(n, DocumentsNode) and n.cross for n in nested(call.mask))


def lengths_vary(call: Call) -> bool:
    """Return whether a length may change at run time."""
    return bool({"seqlen_q", "seqlen_kv"} & set(call.context.dynamic))
