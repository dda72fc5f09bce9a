"""The machine that a command is about: this one, a recorded one, or one made of flags."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import cast

from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError, did_you_mean
from attnroute.host import Host
from attnroute.probes.packages import PROVIDERS
from attnroute.tables.load import Tables
from attnroute.tables.releases import companions_of, known
from attnroute.tables.versions import comparable, version_of

_WHEEL = ("cuda", "cudnn")


def add_host(parser: Parser) -> None:
    """Add the flags that name a machine."""
    group = parser.add_argument_group("machine", "this one where neither --arch nor --host is given")
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--arch", help="an architecture, like sm_90 or cpu; versions that are not given are assumed"
    )
    either.add_argument(
        "--host", type=Path, metavar="FILE", help="what `attnroute probe` printed on that machine"
    )
    group.add_argument(
        "--with",
        dest="given",
        action="append",
        default=[],
        metavar="NAME=VERSION",
        help="a version there, like torch=2.14.1",
    )
    group.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="something not installed there"
    )


def host_of(args: argparse.Namespace, tables: Tables) -> tuple[Host, str]:
    """Return the machine, and what was assumed about it as a clause ("" where nothing was).

    Raises:
        ArgumentError: A flag is wrong, or this machine is asked about and torch is not installed.
    """
    names = _names(tables)
    given = dict(_version(word, names) for word in args.given)
    without = [_name("--without", word, names) for word in args.without]
    changes: dict[str, str | None] = {**given, **dict.fromkeys(without)}
    if args.host is not None:
        return Host.from_file(args.host).with_versions(changes), ""
    if args.arch is None:
        return probed().with_versions(changes), ""
    if args.arch not in tables.arch_names:
        near = did_you_mean(args.arch, tables.arch_names) or "."
        raise ArgumentError(f'--arch requires one of {", ".join(tables.arch_names)}; got "{args.arch}"{near}')
    assumed, why = _assumed(args.arch, given, without)
    return Host(arch=args.arch, versions={**assumed, **given}), why


def probed() -> Host:
    """Return this machine.

    Raises:
        ArgumentError: torch is not installed, so that nobody can ask.
    """
    try:
        module = import_module("attnroute.probes.torch_host")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ArgumentError(
            "a question about this machine requires torch; got an environment without it; name a machine "
            "with --arch or --host, or install torch."
        ) from error
    return cast("Host", module.default_host())


def _assumed(arch: str, given: dict[str, str], without: list[str]) -> tuple[dict[str, str], str]:
    """Fill in what was left out: the newest known torch, and what its default wheel brings along."""
    if "torch" in without:
        return {}, ""
    assumed = {} if "torch" in given else {"torch": known()[-1].torch}
    torch = given.get("torch", known()[-1].torch)
    open_names = [n for n in _WHEEL if n not in given and n not in without]
    if arch == "cpu" or not open_names:
        return assumed, _said(assumed, "the newest known release") if assumed else ""
    wheel = companions_of(torch)
    cuda = version_of("cuda", {"torch": torch, **given})
    if wheel is None or cuda not in (None, wheel.cuda):
        reason = f"torch {torch} with CUDA {cuda}" if wheel else f"torch {torch}"
        return (
            assumed,
            f"nothing about {' and '.join(open_names)}, because no default wheel of {reason} is listed",
        )
    assumed |= {name: getattr(wheel, name) for name in open_names}
    return assumed, _said(
        assumed, "what its default wheel brings" if "torch" in given else "the newest known release"
    )


def _said(assumed: dict[str, str], source: str) -> str:
    return f"{', '.join(f'{name} {version}' for name, version in assumed.items())} ({source})"


def _names(tables: Tables) -> tuple[str, ...]:
    needed = [name for info in tables.backends.values() for name in info.needs]
    return tuple(dict.fromkeys(["torch", *_WHEEL, *needed, *PROVIDERS]))


def _name(flag: str, word: str, names: tuple[str, ...]) -> str:
    if word not in names:
        near = did_you_mean(word, names) or "."
        raise ArgumentError(f'{flag} requires one of {", ".join(names)}; got "{word}"{near}')
    return word


def _version(word: str, names: tuple[str, ...]) -> tuple[str, str]:
    name, equals, version = word.partition("=")
    if not equals or not version:
        raise ArgumentError(f'--with requires NAME=VERSION, like torch=2.14.1; got "{word}".')
    _name("--with", name, names)
    try:
        comparable(name, version)
    except ValueError as error:
        raise ArgumentError(f"--with: {error}") from error
    return name, version
