"""Determine the machine that a command is about: this one, a recorded one, or one made of flags."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import cast

from attnroute.cli._parser import Parser
from attnroute.errors import ArgumentError, did_you_mean, quoted
from attnroute.question.host import Host
from attnroute.tables.alternatives import names_in
from attnroute.tables.folders import Tables
from attnroute.tables.machines import WHEEL, machine
from attnroute.tables.versions import comparable

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(KiB|MiB|GiB|TiB|)")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def add_host(parser: Parser) -> None:
    """Add the flags that name a machine."""
    group = parser.add_argument_group("machine", "this one where neither --arch nor --host is given")
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--arch",
        help="an architecture or card, like sm_90, h100 or cpu; versions that are not given are assumed",
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


def host_of(args: argparse.Namespace, tables: Tables) -> Host:
    """Return the machine.

    Raises:
        ArgumentError: A flag is wrong, or this machine is asked about and torch is not installed.
    """
    names = names_of(tables)
    given = dict(_version(word, names) for word in args.given)
    without = [_name("--without", word, names) for word in args.without]
    changes: dict[str, str | None] = {**given, **dict.fromkeys(without)}
    if args.host is not None:
        return _changed(Host.from_file(args.host), changes)
    if args.arch is None:
        return _changed(probed(tables), changes)
    return machine(args.arch, tables, argument="--arch", given=given, without=without)


def _changed(host: Host, changes: dict[str, str | None]) -> Host:
    """Return a machine with other versions. What a flag names is as the flag says, and no longer broken."""
    broken = {name: problem for name, problem in host.broken.items() if name not in changes}
    return host.with_versions(changes).model_copy(update={"broken": broken})


def probed(tables: Tables) -> Host:
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
    return cast("Host", module.default_host(tables.providers))


def names_of(tables: Tables) -> tuple[str, ...]:
    """Return every name that --with and --without take."""
    infos = (tables.info(arch, backend) for arch in tables.arch_names for backend in tables.backends)
    needed = names_in(need for info in infos for need in info.needs)
    return tuple(dict.fromkeys(["torch", *WHEEL, *needed, *tables.providers.by_name]))


def with_free_memory(host: Host, text: str) -> Host:
    """Return a machine with so much free memory, in bytes or a binary unit: 1000000, 512MiB, 1.5GiB.

    Raises:
        ArgumentError: The text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        required = "a size like 10GiB, 512MiB or 1000000"
        raise ArgumentError(f"--free-memory requires {required}; got {quoted(text)}.")
    return host.model_copy(update={"free_memory": int(float(found[1]) * _UNITS[found[2]])})


def _name(flag: str, word: str, names: tuple[str, ...]) -> str:
    if word not in names:
        near = did_you_mean(word, names) or "."
        raise ArgumentError(f"{flag} requires one of {', '.join(names)}; got {quoted(word)}{near}")
    return word


def _version(word: str, names: tuple[str, ...]) -> tuple[str, str]:
    name, equals, version = word.partition("=")
    if not equals or not version:
        raise ArgumentError(f"--with requires NAME=VERSION, like torch=2.14.1; got {quoted(word)}.")
    _name("--with", name, names)
    try:
        comparable(name, version)
    except ValueError as error:
        raise ArgumentError(f"--with: {error}") from error
    return name, version
