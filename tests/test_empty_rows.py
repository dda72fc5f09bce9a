"""Where all parts of a mask say their numbers, it is known whether some query may attend no key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import allowed_of, readable_masks, small_call

from attnroute.question.call import Context
from attnroute.question.facts import empty_rows_of, runs
from attnroute.question.nodes import AnyNode, CausalNode, DocumentsNode, KeyPaddingNode, NotNode, WindowNode

LENGTHS = st.integers(1, 6)


@given(st.data(), st.integers(1, 3), LENGTHS, LENGTHS)
def test_runs_are_counted_exactly(data, batch, seqlen_q, seqlen_kv):
    nodes = data.draw(readable_masks(batch, seqlen_q, seqlen_kv))
    simple = tuple(n for n in nodes if not isinstance(n, AnyNode | NotNode))
    call = small_call(simple, batch, seqlen_q, seqlen_kv)
    has_empty = not all(any(row) for rows in allowed_of(call) for row in rows)
    assert empty_rows_of(call) == ("some" if has_empty else "none")


LEFT = KeyPaddingNode(lengths=(3, 6), side="left")


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((CausalNode(), LEFT), "some"),
        ((WindowNode(left=2, right=3), LEFT), "none"),
        ((WindowNode(left=2, right=2), LEFT), "some"),
        ((DocumentsNode(lengths=(4, 2)), LEFT), "none"),
        ((DocumentsNode(lengths=(3, 3)), LEFT), "some"),
        ((DocumentsNode(lengths=(3, 3)), KeyPaddingNode(lengths=(4, 6))), "none"),
        ((DocumentsNode(lengths=(3, 0, 3)), KeyPaddingNode(lengths=(3, 6))), "some"),
        # Said of other rows, tokens or sides than those that there are, numbers say nothing.
        ((KeyPaddingNode(lengths=(3,)), LEFT), "unknown"),
        ((DocumentsNode(lengths=(4, 3)), LEFT), "unknown"),
        ((DocumentsNode(lengths=(4, 2), contiguous=False), LEFT), "unknown"),
        ((CausalNode(), KeyPaddingNode(lengths=(3, 6), side="any")), "unknown"),
        ((CausalNode(), KeyPaddingNode(side="left")), "unknown"),
    ],
)
def test_parts_that_share_no_key(nodes, said):
    assert empty_rows_of(small_call(nodes, 2, 6, 6)) == said


def test_lengths_that_may_change_are_not_counted():
    call = small_call((WindowNode(left=2, right=3), LEFT), 2, 6, 6)
    assert empty_rows_of(call.with_(context=Context(dynamic=("seqlen_q",)))) == "unknown"


def test_counting_ends_somewhere(monkeypatch):
    """Two distinct rows, four queries at the ends of documents, two nodes."""
    call = small_call((DocumentsNode(lengths=(4, 1, 1)), LEFT), 2, 6, 6)
    for limit, said in ((2 * 4 * 2, "none"), (2 * 4 * 2 - 1, "unknown")):
        monkeypatch.setattr(runs, "LOOKED_AT", limit)
        runs.some_run_is_empty.cache_clear()
        assert empty_rows_of(call) == said
    runs.some_run_is_empty.cache_clear()
