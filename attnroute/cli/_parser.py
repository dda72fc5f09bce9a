"""Parse arguments; what is wrong is one sentence, raised like every other error."""

from __future__ import annotations

import argparse
from typing import NoReturn

from attnroute.cli._examples import examples
from attnroute.cli._terminal import columns
from attnroute.errors import ECHO, ArgumentError, shortened
from attnroute.report.layout import Line, laid_out


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations and without exits: what is wrong becomes an ArgumentError."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        """Take the subcommand's name and what its help says; its examples stand at the end."""
        super().__init__(
            prog=f"attnroute {command}",
            description=laid_out([Line(description)], columns()),
            epilog="\n\n".join(part for part in (epilog, examples(command)) if part),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it exits."""
        problem = shortened(message, 3 * ECHO)
        raise ArgumentError(f"{self.prog}: {problem}; `{self.prog} --help` says more.")


def add_format(parser: Parser, *more: str) -> None:
    """Add `--format` with text, json and what a command has besides, and `--json`."""
    parser.add_argument(
        "--format", choices=("text", "json", *more), default="text", help="for people or for programs"
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", help="the same as --format json"
    )
