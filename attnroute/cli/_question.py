"""Read the whole question of a command: the call, the machine, and the settings in force."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from attnroute.api.tuned import informed
from attnroute.cli._call import add_call, call_of
from attnroute.cli._host import add_host, host_of, with_free_memory
from attnroute.cli._parser import Parser, add_format
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy, merge
from attnroute.settings import current, policy_of
from attnroute.tables.folders import Tables
from attnroute.tables.load import load


class Question(NamedTuple):
    """What a decision is made of."""

    call: Call
    host: Host
    tables: Tables
    policy: Policy


def add_question(parser: Parser) -> None:
    """Add the flags of call, machine and settings, and `--format`."""
    add_call(parser)
    add_host(parser)
    parser.add_argument(
        "--free-memory", metavar="SIZE", help="of the device, like 10GiB: what allocates more is kept out"
    )
    parser.add_argument("--backend", help="the only backend that may run")
    add_format(parser)


def question_of(args: argparse.Namespace) -> Question:
    """Return the question.

    Args:
        args: What the parser read.

    Raises:
        ArgumentError: A word or flag is wrong, or sizes are missing.
    """
    below = current()
    policy = merge(below, policy_of("the command line", backend=args.backend, tables=below.tables))
    tables = load(policy.tables)
    host = host_of(args, tables)
    if args.free_memory is not None:
        host = with_free_memory(host, args.free_memory)
    call = call_of(args)
    return Question(call, host, tables, informed(call, host, policy))
