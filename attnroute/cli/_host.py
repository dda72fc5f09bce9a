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
from attnroute.report.sentences import listed
from attnroute.tables.alternatives import names_in
from attnroute.tables.cards import suggestion
from attnroute.tables.folders import Tables
from attnroute.tables.read import shipped_folder
from attnroute.tables.releases import companions_of, known
from attnroute.tables.versions import comparable, version_of

_WHEEL = ("cuda", "cudnn", "triton")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(KiB|MiB|GiB|TiB|)")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ANY_CUDA = frozenset({"triton"})
"""What every wheel of one torch brings along, whatever its CUDA."""
_PROCESSOR = {"c++": "present", "avx2": "present"}
"""What a machine without a GPU is taken to have, as most have it: a C++ compiler of any version, and AVX2."""


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
        return _changed(Host.from_file(args.host), changes), ""
    if args.arch is None:
        return _changed(probed(tables), changes), ""
    if args.arch not in tables.arch_names:
        known, near = ", ".join(tables.arch_names), suggestion(args.arch, tables)
        raise ArgumentError(f"--arch requires one of {known}; got {quoted(args.arch)}{near}")
    assumed, why = _assumed(args.arch, given, without)
    return Host(arch=args.arch, versions={**assumed, **given}), why


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


def _assumed(arch: str, given: dict[str, str], without: list[str]) -> tuple[dict[str, str], str]:
    """Fill in what was left out: the newest known torch, and what its default wheel brings along."""
    if "torch" in without:
        return {}, ""
    assumed = {} if "torch" in given else {"torch": known(shipped_folder())[-1].torch}
    if arch == "cpu":
        clauses = [_clause(assumed, "the newest known release")] if assumed else []
        usual = {n: v for n, v in _PROCESSOR.items() if n not in given and n not in without}
        clauses += [_clause(usual, "as most machines have")] if usual else []
        return {**assumed, **usual}, "; ".join(clauses)
    torch = given.get("torch", known(shipped_folder())[-1].torch)
    open_names = [n for n in _WHEEL if n not in given and n not in without]
    brought, unknown = _brought(torch, given, open_names)
    assumed |= brought
    source = "what its default wheel brings" if "torch" in given else "the newest known release"
    return assumed, "; ".join(part for part in (_clause(assumed, source) if assumed else "", unknown) if part)


def _brought(torch: str, given: dict[str, str], names: list[str]) -> tuple[dict[str, str], str]:
    """Return what torch's wheel is known to bring along, and a clause about what is not known."""
    wheel = companions_of(torch, shipped_folder())
    cuda = version_of("cuda", {"torch": torch, **given})
    if wheel is None:
        brought, reason = {}, f"torch {torch}"
    else:
        default = cuda in (None, wheel.cuda)
        brought = {n: getattr(wheel, n) for n in names if default or n in _ANY_CUDA}
        reason = f"torch {torch} with CUDA {cuda}"
    open_names = [n for n in names if n not in brought]
    if not open_names:
        return brought, ""
    return brought, f"nothing about {listed(open_names)}, because no default wheel of {reason} is listed"


def _clause(assumed: dict[str, str], source: str) -> str:
    return f"{', '.join(f'{name} {version}' for name, version in assumed.items())} ({source})"


def _names(tables: Tables) -> tuple[str, ...]:
    infos = (tables.info(arch, backend) for arch in tables.arch_names for backend in tables.backends)
    needed = names_in(need for info in infos for need in info.needs)
    return tuple(dict.fromkeys(["torch", *_WHEEL, *needed, *tables.providers.by_name]))


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
