"""`attnroute explain`: one decision, for this machine or another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attnroute.api.tuned import informed
from attnroute.cli._call import add_call, call_of, words_help
from attnroute.cli._host import add_host, host_of, with_free_memory
from attnroute.cli._parser import Parser, add_format
from attnroute.engine.decide import decide
from attnroute.errors import NoBackendError
from attnroute.question.policy import merge
from attnroute.report.json import decision_json
from attnroute.report.layout import field
from attnroute.report.text import render_decision
from attnroute.settings import current, policy_of
from attnroute.tables.load import load

if TYPE_CHECKING:
    from attnroute.engine.decision import Decision
    from attnroute.tables.folders import Tables

SLOW_ONLY = 3


def run(words: list[str]) -> int:
    """Print the decision; the exit code says what kind of backend was selected."""
    args = _parser().parse_intermixed_args(words)
    below = current()
    policy = merge(below, policy_of("the command line", backend=args.backend, tables=below.tables))
    tables = load(policy.tables)
    host, assumed = host_of(args, tables)
    if args.free_memory is not None:
        host = with_free_memory(host, args.free_memory)
    call = call_of(args)
    decision = decide(call, host, tables, informed(call, host, policy), advise=True)
    if args.format == "json":
        print(decision_json(decision))
    else:
        print(render_decision(decision))
    if assumed:
        # JSON on stdout must stay readable for programs.
        print(*field("assumed", assumed), sep="\n", file=sys.stderr if args.format == "json" else sys.stdout)
    return exit_code(decision, tables)


def exit_code(decision: Decision, tables: Tables) -> int:
    """Return 0 for a fused kernel, 3 for the slow tier, 4 for nothing."""
    if decision.selected is None:
        return NoBackendError.exit_code
    return SLOW_ONLY if decision.selected in tables.slow_tier else 0


def _parser() -> Parser:
    parser = Parser("explain", "Say which backend a call gets, and why not the others.", words_help())
    add_call(parser)
    add_host(parser)
    parser.add_argument(
        "--free-memory", metavar="SIZE", help="of the device, like 10GiB: what allocates more is kept out"
    )
    parser.add_argument("--backend", help="the only backend that may run")
    add_format(parser)
    return parser
