"""Hints, computed by selecting again with one thing changed; never typed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, Literal, NamedTuple

from attnroute.engine.advice.other_versions import (
    ANY_VERSION,
    Range,
    installs,
    upgrades,
    with_versions,
)
from attnroute.engine.decision import Hint
from attnroute.engine.select import Selection, select
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.nodes import CausalNode, DenseNode, DocumentsNode, FunctionNode, MaskNode, nested
from attnroute.tables.versions import version_of

MOST_ASKED: Final = 40
"""Changes that are tried at most."""
_LENGTH_MULTIPLE: Final = 128


def hints(selection: Selection) -> tuple[Hint, ...]:
    """Return the changes after which another backend would be selected, or, for upgrades, be eligible."""
    found: list[Hint] = []
    for change in islice(_changes(selection), MOST_ASKED):
        after = select(change.call, change.host, selection.tables, selection.policy)
        hint = _hint(change, selection, after)
        if hint is not None and hint not in found:
            found.append(hint)
    return tuple(found)


class _Change(NamedTuple):
    """A change that is worth a question; `backend` is the one that it is made for, if it is for one."""

    hint: Hint
    call: Call
    host: Host
    backend: str | None = None


def _hint(change: _Change, before: Selection, after: Selection) -> Hint | None:
    """Return what a change would bring, None where that is nothing."""
    hint, backend = change.hint, change.backend
    if after.selected is None:
        return None
    if after.selected != before.selected and backend in (None, after.selected):
        return hint.model_copy(update={"selects": after.selected})
    is_new = backend in after.order and backend not in before.order
    if hint.kind == "upgrade" and is_new:
        return hint.model_copy(update={"selects": after.selected, "allows": backend})
    return None


def _changes(selection: Selection) -> Iterator[_Change]:
    call, host = selection.call, selection.host
    yield from (_Change(hint, changed, host) for hint, changed in _call_changes(call))
    for backend, ranges in installs(selection):
        hint = _versions_hint("install", ranges)
        yield _Change(hint, call, with_versions(host, ranges), backend)
    for backend, found in upgrades(selection):
        is_there = version_of(found.name, host.versions) is not None
        hint = _versions_hint("upgrade" if is_there else "install", (found,))
        yield _Change(hint, call, with_versions(host, (found,)), backend)


def _versions_hint(kind: Literal["install", "upgrade"], ranges: tuple[Range, ...]) -> Hint:
    parts = [(r.name, None if r.version == ANY_VERSION else r.version, r.below) for r in ranges]
    name, version, below = parts[0]
    return Hint(kind=kind, change=name, version=version, below=below, also=tuple(parts[1:]), selects="")


def _call_changes(call: Call) -> Iterator[tuple[Hint, Call]]:
    if any(isinstance(n, DenseNode) and n.recognized is None for n in call.mask):
        rest = tuple(n for n in call.mask if not isinstance(n, DenseNode))
        changed = call.changed(mask=(*rest, CausalNode()))
        yield Hint(kind="mask_object", change="causal", selects=""), changed
    if call.dropout_p > 0:
        yield Hint(kind="dropout", change="dropout_p = 0", selects=""), call.changed(dropout_p=0.0)
    if call.deterministic:
        yield (
            Hint(kind="deterministic", change="deterministic = false", selects=""),
            call.changed(deterministic=False),
        )
    padded = -(-call.seqlen_kv // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    if padded != call.seqlen_kv and call.seqlen_q == call.seqlen_kv and not _is_of_one_length(call):
        hint = Hint(kind="pad_seqlen", change=f"seqlen = {padded}", selects="")
        mask = tuple(_with_padding(n, padded - call.seqlen_kv) for n in call.mask)
        yield hint, call.changed(seqlen_q=padded, seqlen_kv=padded, mask=mask)


def _is_of_one_length(call: Call) -> bool:
    """Whether something belongs to the length as it is: a tensor, blocks, documents in a combination."""
    inside = [n for node in call.mask for n in nested((node,)) if n is not node]
    return (
        call.bias is not None
        or any(isinstance(n, DocumentsNode) for n in inside)
        or any(isinstance(n, DenseNode) or _has_blocks(n) for n in (*call.mask, *inside))
    )


def _has_blocks(node: MaskNode) -> bool:
    return isinstance(node, FunctionNode) and node.block_mask_shape is not None


def _with_padding(node: MaskNode, tokens: int) -> MaskNode:
    """Give padding a document of its own."""
    if not isinstance(node, DocumentsNode) or node.lengths is None:
        return node
    return node.changed(lengths=(*node.lengths, tokens))
