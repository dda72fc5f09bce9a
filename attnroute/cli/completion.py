"""`attnroute completion SHELL`: a script with which a shell completes commands, flags and names.

It is written from the help of each command, so that a Tab starts no Python.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Final, NamedTuple

from attnroute.cli import COMMANDS
from attnroute.cli._host import names_of
from attnroute.cli._parser import Parser
from attnroute.settings import current
from attnroute.tables.folders import Tables
from attnroute.tables.load import load

_OPTION: Final = re.compile(r"^  (?:(-\w), )?(--[\w-]+)(?: (\S+))?(?:  +(\S.*))?$", re.MULTILINE)
_PLACE: Final = re.compile(r"^  \{?(\w+(?:[,|]\w+)+)\}?(?= |$)", re.MULTILINE)
_ESCAPE: Final = re.compile(r"\x1b\[[\d;]*m")
_BASH: Final = """\
_attnroute() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $prev" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _attnroute attnroute
"""
_ZSH: Final = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


class Option(NamedTuple):
    """A flag of a command.

    Attributes:
        short: Its one-letter form, like "-v".
        name: Like "--arch".
        metavar: What stands behind it in the help; "" where it takes nothing.
        does: The first line of its help.
    """

    short: str
    name: str
    metavar: str
    does: str


def run(words: list[str]) -> int:
    """Print the script of one shell."""
    parser = Parser("completion", "Print a script with which a shell completes the command line.")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script")
    args = parser.parse_args(words)
    tables = load(current().tables)
    if args.shell == "fish":
        print("\n".join(_fish(tables)))
    else:
        print(f"{_ZSH if args.shell == 'zsh' else ''}{_bash(tables)}", end="")
    return 0


def options_of(command: str) -> list[Option]:
    """Return the flags that the help of a command lists."""
    return [Option(*parts) for parts in _OPTION.findall(_help_of(command))]


def _places_of(command: str) -> list[str]:
    """Return what may stand without a flag, where that is one of a few words."""
    return [word for shown in _PLACE.findall(_help_of(command)) for word in re.split("[,|]", shown)]


def _help_of(command: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        import_module(f"attnroute.cli.{command.replace('-', '_')}").run(["--help"])
    return _ESCAPE.sub("", printed.getvalue())


def values_of(option: Option, tables: Tables) -> list[str]:
    """Return what may stand behind a flag; nothing where that is a number or a file."""
    if option.metavar.startswith("{"):
        return option.metavar.strip("{}").split(",")
    named = {
        "--arch": [*tables.arch_names, *(_word(c) for a in tables.arch_names for c in tables.arch(a).cards)],
        "--backend": [*tables.backends],
        "--with": [*names_of(tables)],
        "--without": [*names_of(tables)],
    }
    return named.get(option.name, [])


def _word(card: str) -> str:
    """Return the name of a card as one writes it: rtx5090 for GeForce RTX 5090."""
    return re.sub(r"\(.*\)|[^\w-]", "", card.lower().removeprefix("geforce "))


def _bash(tables: Tables) -> str:
    lines: list[str] = []
    rest: list[str] = []
    for command in COMMANDS:
        options = options_of(command)
        for option in options:
            if option.metavar:
                words = " ".join(values_of(option, tables))
                lines.append(f'        "{command} {option.name}") words="{words}" ;;')
        flags = [part for option in options for part in (option.short, option.name) if part]
        rest.append(f'        "{command} "*) words="{" ".join([*_places_of(command), *flags])}" ;;')
    return _BASH.format(commands=" ".join(COMMANDS), cases="\n".join([*lines, *rest]))


def _fish(tables: Tables) -> list[str]:
    lines = []
    for command, does in COMMANDS.items():
        lines.append(f"complete -c attnroute -f -n __fish_use_subcommand -a {command} -d {_quoted(does)}")
        seen = f"complete -c attnroute -n '__fish_seen_subcommand_from {command}'"
        if places := _places_of(command):
            lines.append(f"{seen} -f -a {_quoted(' '.join(places))}")
        for option in options_of(command):
            short = f" -s {option.short[1:]}" if option.short else ""
            values = values_of(option, tables)
            takes = f" -x -a {_quoted(' '.join(values))}" if values else " -r" if option.metavar else ""
            lines.append(f"{seen}{short} -l {option.name[2:]}{takes} -d {_quoted(option.does)}")
    return lines


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
