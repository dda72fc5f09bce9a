"""`attnroute explain`: one decision, for this machine or another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnroute.cli._call import words_help
from attnroute.cli._parser import Parser
from attnroute.cli._question import Question, add_question, question_of
from attnroute.cli._terminal import columns, painted
from attnroute.engine.decide import decide
from attnroute.engine.mesh import plan
from attnroute.engine.te_choice import NO_PATH, predict
from attnroute.errors import ArgumentError, NoBackendError
from attnroute.question.mesh import mesh_of
from attnroute.report.json import decision_json, document, plan_json
from attnroute.report.layout import field, laid_out
from attnroute.report.mesh import render_plan
from attnroute.report.te_choice import render_te_choice
from attnroute.report.text import render_decision

if TYPE_CHECKING:
    import argparse

    from attnroute.engine.decision import Decision
    from attnroute.engine.mesh import Way
    from attnroute.tables.folders import Tables

SLOW_ONLY = 3
_MORE = "-v: every reason with its row, every preparation and hint"


def run(words: list[str]) -> int:
    """Print the decision; the exit code says what kind of backend was selected."""
    parser = Parser("explain", "Say which backend a call gets, and why not the others.", words_help())
    add_question(parser)
    parser.add_argument("--as", dest="chooser", choices=("te",), help="say what TransformerEngine would run")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="every reason with its row, every preparation and hint"
    )
    parser.add_argument(
        "--mesh",
        metavar="tp=2,cp=4",
        help="what the call becomes on ranks: heads over tp, tokens cp, batch dp",
    )
    args = parser.parse_intermixed_args(words)
    asked = question_of(args)
    if args.mesh is not None:
        return _on_mesh(asked, args)
    if args.chooser is not None:
        return _as_te(asked, args.format)
    decision = decide(asked.call, asked.host, asked.tables, asked.policy, advise=True)
    if args.format == "json":
        print(decision_json(decision, verbose=args.verbose))
    else:
        print(painted(_text(decision, verbose=args.verbose)))
    return exit_code(decision, asked.tables)


def _as_te(asked: Question, form: str) -> int:
    """Print what TransformerEngine's own module would run, beside the decision."""
    selected = decide(asked.call, asked.host, asked.tables, asked.policy).selected
    choice = predict(asked.call, asked.host, asked.tables, selected)
    if form == "json":
        print(document(choice.model_dump(mode="json")))
    else:
        print(painted(render_te_choice(choice, asked.call, asked.host, columns())))
    return NoBackendError.exit_code if choice.path == NO_PATH else 0


def _on_mesh(asked: Question, args: argparse.Namespace) -> int:
    """Print what the call becomes on a mesh; the exit code is that of the best way of spreading it."""
    if args.chooser is not None:
        raise ArgumentError(
            f"--mesh requires a decision of attnroute; got --as {args.chooser}; leave one out."
        )
    found = plan(asked.call, mesh_of(args.mesh), asked.host, asked.tables, asked.policy)
    if args.format == "json":
        print(plan_json(found, verbose=args.verbose))
    else:
        print(painted(render_plan(found, columns())))
    return min(_worst(way, asked.tables) for way in found.ways)


def _worst(way: Way, tables: Tables) -> int:
    codes = [exit_code(step.decision, tables) for part in way.parts for step in part.steps]
    return max(codes, default=NoBackendError.exit_code)


def _text(decision: Decision, *, verbose: bool) -> str:
    text = render_decision(decision, verbose=verbose, width=columns())
    return text if verbose else f"{text}\n{laid_out([field('more', _MORE)], columns())}"


def exit_code(decision: Decision, tables: Tables) -> int:
    """Return 0 for a fused kernel, 3 for the slow tier, 4 for nothing."""
    if decision.selected is None:
        return NoBackendError.exit_code
    return SLOW_ONLY if decision.selected in tables.slow_tier else 0
