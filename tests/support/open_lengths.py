"""Numbers that note what is asked of them, as a tracer's do, for tests of what a graph holds for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from attnroute.engine.decide import decide
from attnroute.engine.decision import Decision
from attnroute.engine.dependence import OPEN, evaluate_row, open_facts, open_rows
from attnroute.question.normalize import normalize

Sizes = tuple[int, int, int]
"""Batch, query length and key length."""


@dataclass(eq=False)
class Open:
    """An expression in batch and lengths; each comparison is noted with its answer for the example."""

    of: Callable[[Sizes], int]
    example: Sizes
    notes: list = field(default_factory=list)

    def _make(self, of):
        return Open(of, self.example, self.notes)

    def _note(self, of):
        found = of(self.example)
        self.notes.append((of, found))
        return found

    def __mul__(self, other):
        return self._make(lambda s: self.of(s) * _at(other, s))

    __rmul__ = __mul__

    def __add__(self, other):
        return self._make(lambda s: self.of(s) + _at(other, s))

    def __neg__(self):
        return self._make(lambda s: -self.of(s))

    def __floordiv__(self, other):
        return self._make(lambda s: self.of(s) // _at(other, s))

    def __mod__(self, other):
        return self._make(lambda s: self.of(s) % _at(other, s))

    def __eq__(self, other):
        return self._note(lambda s: self.of(s) == _at(other, s))

    def __lt__(self, other):
        return self._note(lambda s: self.of(s) < _at(other, s))

    def __le__(self, other):
        return self._note(lambda s: self.of(s) <= _at(other, s))

    def __gt__(self, other):
        return self._note(lambda s: self.of(s) > _at(other, s))

    def __ge__(self, other):
        return self._note(lambda s: self.of(s) >= _at(other, s))

    def __ne__(self, other):
        return self._note(lambda s: self.of(s) != _at(other, s))

    __hash__ = None


def _at(value, sizes):
    return value.of(sizes) if isinstance(value, Open) else value


class Graph(NamedTuple):
    """A decision with what a graph made of it would hold for."""

    decision: Decision
    notes: list

    def holds(self, sizes: Sizes) -> bool:
        """Return whether every answer is the same for these sizes."""
        return all(of(sizes) == found for of, found in self.notes)


def graph_of(call, host, tables, policy=None):
    """Decide, and note what the decision asked about batch and lengths."""
    decision = decide(call, host, tables, policy)
    simple = normalize(call)
    notes: list = []
    example = (simple.batch, simple.seqlen_q, simple.seqlen_kv)
    parts = (Open(lambda s, n=n: s[n], example, notes) for n in range(3))
    facts = open_facts(simple, *parts)
    for row in open_rows(decision.model_copy(update={"call": simple}), tables, OPEN):
        evaluate_row(row, facts)
    return Graph(decision, notes)


def graphs_for(call, sizes, host, tables, policy=None):
    """Return the graphs that dynamo would make for a call at these sizes in turn."""
    graphs: list[Graph] = []
    for batch, seqlen_q, seqlen_kv in sizes:
        if not any(graph.holds((batch, seqlen_q, seqlen_kv)) for graph in graphs):
            at = call.with_(batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
            graphs.append(graph_of(at, host, tables, policy))
    return graphs
