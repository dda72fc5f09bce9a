"""`attnroute explain`: one decision, for this machine or another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.cli._call import words_help
from attnroute.cli._parser import Parser
from attnroute.cli._question import add_question, print_assumed, question_of
from attnroute.engine.decide import decide
from attnroute.errors import NoBackendError
from attnroute.report.json import decision_json
from attnroute.report.text import render_decision

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision
    from attnroute.tables.folders import Tables

SLOW_ONLY = 3


def run(words: list[str]) -> int:
    """Print the decision; the exit code says what kind of backend was selected."""
    parser = Parser("explain", "Say which backend a call gets, and why not the others.", words_help())
    add_question(parser)
    args = parser.parse_intermixed_args(words)
    asked = question_of(args)
    decision = decide(asked.call, asked.host, asked.tables, asked.policy, advise=True)
    print(decision_json(decision) if args.format == "json" else render_decision(decision))
    print_assumed(asked.assumed, args.format)
    return exit_code(decision, asked.tables)


def exit_code(decision: Decision, tables: Tables) -> int:
    """Return 0 for a fused kernel, 3 for the slow tier, 4 for nothing."""
    if decision.selected is None:
        return NoBackendError.exit_code
    return SLOW_ONLY if decision.selected in tables.slow_tier else 0
