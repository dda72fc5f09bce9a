"""`attnroute why-not`: what keeps one backend from a call, and the smallest changes that would select it."""

from __future__ import annotations

from attnroute.cli._call import words_help
from attnroute.cli._parser import Parser
from attnroute.cli._question import add_question, question_of
from attnroute.cli._terminal import columns, painted
from attnroute.engine.decide import explain_why_not
from attnroute.errors import ArgumentError, did_you_mean, quoted
from attnroute.report.json import why_not_json
from attnroute.report.why_not import render_why_not


def run(words: list[str]) -> int:
    """Print the answer; it is exit code 0 whatever it says."""
    parser = Parser(
        "why-not", "Say what keeps a backend from a call, and what would select it.", words_help()
    )
    parser.add_argument("asked", metavar="BACKEND", help="the backend, as explanations name it")
    add_question(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="the other backends, with every reason")
    args = parser.parse_intermixed_args(words)
    question = question_of(args)
    if args.asked not in question.tables.backends:
        known = ", ".join(question.tables.backends)
        near = did_you_mean(args.asked, question.tables.backends) or "."
        raise ArgumentError(f"BACKEND requires one of {known}; got {quoted(args.asked)}{near}")
    answer = explain_why_not(question.call, question.host, question.tables, question.policy, args.asked)
    if args.format == "json":
        print(why_not_json(answer))
    else:
        print(painted(render_why_not(answer, columns(), verbose=args.verbose)))
    return 0
