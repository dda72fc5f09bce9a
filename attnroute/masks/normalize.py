"""Simplify the mask of a `Call` without changing who may attend.

A node that rules nothing out at these lengths is dropped, so that a kernel without that feature stays
eligible: `Causal("bottom_right")` with one query row is no mask at all, `Window(left=4095)` over 2048
keys is none either.
"""

from __future__ import annotations

from attnroute.call import (
    Call,
    CausalNode,
    DenseNode,
    DocumentsNode,
    KeyPaddingNode,
    MaskNode,
    WindowNode,
)


def normalize(call: Call) -> Call:
    """Return the call with trivially true nodes dropped and alignments of square calls unified."""
    nodes: list[MaskNode] = []
    for node in call.mask:
        for simple in _simplify(node, call):
            if simple not in nodes:
                nodes.append(simple)
    return call if tuple(nodes) == call.mask else call.with_(mask=tuple(nodes))


def recognized(call: Call) -> Call | None:
    """Return the call with recognised dense nodes replaced by what they say, or None if there are none."""
    if not any(isinstance(n, DenseNode) and n.recognized is not None for n in call.mask):
        return None
    nodes: list[MaskNode] = []
    for node in call.mask:
        if isinstance(node, DenseNode) and node.recognized is not None:
            nodes.extend(node.recognized)
        else:
            nodes.append(node)
    return normalize(call.with_(mask=tuple(nodes)))


def _simplify(node: MaskNode, call: Call) -> tuple[MaskNode, ...]:
    static = not ({"seqlen_q", "seqlen_kv"} & set(call.context.dynamic))
    if isinstance(node, CausalNode):
        return _simplify_causal(node, call, static=static)
    if isinstance(node, WindowNode):
        return _simplify_window(node, call, static=static)
    if isinstance(node, DocumentsNode) and node.lengths is not None and len(node.lengths) <= 1:
        return ()
    if isinstance(node, KeyPaddingNode) and static and node.lengths is not None and call.batch:
        return () if all(n >= call.seqlen_kv for n in node.lengths) else (node,)
    return (node,)


def _simplify_causal(node: CausalNode, call: Call, *, static: bool) -> tuple[MaskNode, ...]:
    if not static:
        return (node,)
    # Without a second key, or with nothing but the last query, there is nothing behind the diagonal.
    far = call.seqlen_kv if node.alignment == "top_left" else call.seqlen_q
    if far <= 1 or _is_empty(call):
        return ()
    return (CausalNode(),) if call.seqlen_q == call.seqlen_kv else (node,)


def _is_empty(call: Call) -> bool:
    return 0 in (call.seqlen_q, call.seqlen_kv)


def _simplify_window(node: WindowNode, call: Call, *, static: bool) -> tuple[MaskNode, ...]:
    left, right, alignment = node.left, node.right, node.alignment
    if static and _is_empty(call):
        return ()
    if static:
        if call.seqlen_q == call.seqlen_kv:
            alignment = "top_left"
        last_q, last_kv = call.seqlen_q - 1, call.seqlen_kv - 1
        far_left, far_right = (last_q, last_kv) if alignment == "top_left" else (last_kv, last_q)
        left = None if left is not None and left >= far_left else left
        right = None if right is not None and right >= far_right else right
    if left is None and right is None:
        return ()
    if left is None and right == 0:
        return _simplify_causal(CausalNode(alignment=alignment), call, static=static)
    return (WindowNode(left=left, right=right, alignment=alignment),)
