"""Reads the variables `ATTNROUTE_*`, and merges them with `override()` and the arguments of a call.

The environment is read once, at the first call; `reload()` reads it again. A warm call
runs nothing of this module but one ContextVar lookup.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from attnroute.errors import (
    OverrideError,
    OverrideWarning,
    did_you_mean,
    printable,
    quoted,
    shortened,
    warn_user,
)
from attnroute.memory import INSTALLED, cached
from attnroute.question.policy import MOST_CALLS, Policy, merge
from attnroute.scopes import Override, outside_of_graphs, scope_here
from attnroute.tables.load import load

PREFIX = "ATTNROUTE_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")
ExplainMode = Literal["off", "once", "changes", "all"]
_EXPLAIN_MODES = ("off", "once", "changes", "all")
_Reader = Callable[[str, str, tuple[str, ...]], dict[str, object]]
"""Maps a variable's name, its text and the known backends to the settings that it makes."""
_NAMING = frozenset({"ATTNROUTE_BACKEND", "ATTNROUTE_BACKENDS"})
"""The variables that name backends."""

VARIABLES: dict[str, str] = {
    "ATTNROUTE_BACKEND": "the only backend that may run",
    "ATTNROUTE_BACKENDS": '"a,b" allows only these, in this order; "-a,-b" bans these',
    "ATTNROUTE_STRICT": "1: no slow tier, no reroute, no unknown backend",
    "ATTNROUTE_ALLOW_UNKNOWN": "1: a backend that no row speaks about may be chosen",
    "ATTNROUTE_EXPECTED_CALLS": "how many calls of a kind share the compilation of its first one",
    "ATTNROUTE_TABLES": "folder of tables that outrank the shipped ones",
    "ATTNROUTE_TUNING": "off, or the file of `attnroute tune` to read in place of the user's own",
    "ATTNROUTE_EXPLAIN": "off, once, changes or all: print decisions to stderr",
    "ATTNROUTE_RECOGNIZE": "0: do not look into dense masks",
    "ATTNROUTE_CONSENSUS": "1: processes of a mesh compare what they run, at the first call of a kind",
}


def current() -> Policy:
    """Return the settings of `override()` and the environment that are in force now."""
    scope = scope_here()
    return environment() if scope is None else scope.policy


@cached(1, INSTALLED)
def environment() -> Policy:
    """Return the settings of the environment, read at the first call."""
    return from_environment(os.environ)


def stated() -> dict[str, str]:
    """Return every variable of ours that is set, as it is written there."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}


@cached(1, INSTALLED)
def explain_mode() -> ExplainMode:
    """Return the mode that ATTNROUTE_EXPLAIN sets, read at the first call."""
    value = os.environ.get("ATTNROUTE_EXPLAIN", "off").strip().lower() or "off"
    return _one_of("ATTNROUTE_EXPLAIN", value, _EXPLAIN_MODES)  # type: ignore[return-value]


@cached(1, INSTALLED)
def seeks_consensus() -> bool:
    """Return whether ATTNROUTE_CONSENSUS asks processes to compare what they run, read at the first call."""
    name = "ATTNROUTE_CONSENSUS"
    return bool(_flag("consensus")(name, os.environ.get(name, "").strip(), ())["consensus"])


def reload() -> None:
    """Read the environment again at the next call."""
    environment.cache_clear()
    _merged.cache_clear()
    explain_mode.cache_clear()
    seeks_consensus.cache_clear()


def from_environment(environ: Mapping[str, str]) -> Policy:
    """Read every `ATTNROUTE_*` variable.

    Raises:
        OverrideError: A value cannot be understood; the message lists the right ones.

    Warns:
        OverrideWarning: A variable is not known; the message names the nearest right one.
    """
    settings: dict[str, object] = {}
    origin: dict[str, str] = {}
    given = {name: text.strip() for name, text in environ.items() if name.startswith(PREFIX)}
    # First the tables: they define which names of backends the other variables may have.
    folder = _tables("ATTNROUTE_TABLES", given.get("ATTNROUTE_TABLES", ""))
    known = known_backends(folder) if _NAMING & given.keys() else ()
    for name, text in sorted(given.items()):
        if name not in VARIABLES:
            _warn_unknown(name)
            continue
        for setting, value in _READERS[name](name, text, known).items():
            settings[setting] = value
            origin[setting] = f"{name}={shortened(environ[name])}"
    return Policy.model_validate({**settings, "origin": origin})


def override(
    *,
    backend: str | None = None,
    prefer: str | Iterable[str] | None = None,
    allow: str | Iterable[str] | None = None,
    ban: str | Iterable[str] | None = None,
    strict: bool | None = None,
    allow_unknown: bool | None = None,
    recognize: bool | None = None,
    expected_calls: int | None = None,
    double_backward: bool = False,
) -> Override:
    """Steer every call inside a block, in this thread or task, also in code that cannot be edited.

    ``with override(...):`` applies until the block ends, ``@override(...)`` in each call of a function or
    coroutine function. One that is dropped unused warns. A block may be entered again, and by several tasks.

    Args:
        backend: The only backend that may run.
        prefer: One or more backends to try first; not beside `backend`.
        allow: The only backends that may run, in this order.
        ban: One or more backends that may not run, whoever asks.
        strict: No slow tier, no reroute, no unknown backend.
        allow_unknown: A backend that no row speaks about may be chosen.
        recognize: Look into dense masks.
        expected_calls: How many calls of each kind are expected, at least 1: the time for which a backend's
            first call compiles is divided among so many where times are compared.
        double_backward: Gradients will be differentiated again, which no tensor shows beforehand.

    Returns:
        The block; ``with ... as policy`` gives the policy in force inside.

    Raises:
        OverrideError: A backend is not known, or a value has the wrong type.

    Warns:
        OverrideWarning: What was returned is dropped and never steered anything.
    """
    tables = current().tables
    named = policy_of("override()", backend=backend, prefer=prefer, allow=allow, ban=ban, tables=tables)
    stated: dict[str, object] = {name: getattr(named, name) for name in named.model_fields_set}
    flags = {"strict": strict, "allow_unknown": allow_unknown, "recognize": recognize}
    for name, value in (*flags.items(), ("double_backward", double_backward)):
        if not (value is None or isinstance(value, bool)):
            raise OverrideError(
                f"override() {name} requires True or False; got {shortened(repr(value))}; pass one of them."
            )
    stated |= {name: value for name, value in flags.items() if value is not None}
    if expected_calls is not None:
        stated["expected_calls"] = _calls("override() expected_calls", expected_calls)
    if double_backward:
        stated["transform"] = "double_backward"
    stated["origin"] = dict.fromkeys(stated.keys() - {"origin"}, "override()")
    return Override(Policy.model_validate(stated), environment)


outside_of_graphs(override)


def call_policy(backend: str | None, prefer: str | Iterable[str] | None) -> Policy:
    """Return what the environment, `override()` and a call itself set; each call of `attention()` runs this.

    Raises:
        OverrideError: A backend is not known, or `prefer` stands beside `backend`.
    """
    scope = scope_here()
    below = environment() if scope is None else scope.policy
    if backend is None and prefer is None:
        return below
    names = prefer if prefer is None or isinstance(prefer, str) else _as_tuple(prefer)
    try:
        return _merged(below, backend, names)
    except TypeError:
        # Not hashable, so not the name of a backend: the checks of `_merge` raise the error.
        return _merge(below, backend, names)


@cached(256)
def _merged(below: Policy, backend: str | None, prefer: str | tuple[str, ...] | None) -> Policy:
    """Cached, because a model names the same backend in every call."""
    return _merge(below, backend, prefer)


def _merge(below: Policy, backend: str | None, prefer: str | tuple[str, ...] | None) -> Policy:
    return merge(below, policy_of("attention()", backend=backend, prefer=prefer, tables=below.tables))


def policy_of(
    origin: str,
    *,
    backend: str | None = None,
    prefer: str | Iterable[str] | None = None,
    allow: str | Iterable[str] | None = None,
    ban: str | Iterable[str] | None = None,
    tables: Path | None = None,
) -> Policy:
    """Build a policy from backend names.

    Args:
        origin: Where the names come from, for errors and explanations.
        backend: The only backend that may run.
        prefer: Backends to try first.
        allow: The only backends that may run, in this order.
        ban: Backends that may not run.
        tables: The overlay in force, which may declare backends of its own.

    Raises:
        OverrideError: A backend is not known, or the settings exclude each other.
    """
    given = {"backend": backend, "prefer": prefer, "allow": allow, "ban": ban}
    stated = {name: value for name, value in given.items() if value is not None}
    known = known_backends(tables) if stated else ()
    settings: dict[str, object] = {}
    for name, value in stated.items():
        where = f"{origin} {name}"
        if name == "backend":
            settings["require"] = _backend(where, value, known)
        else:
            settings[name] = tuple(_backend(where, word, known) for word in _as_tuple(value))
    if backend is not None:
        _check_beside(origin, backend, settings)
    return Policy.model_validate({**settings, "origin": dict.fromkeys(settings, origin)})


def _check_beside(origin: str, backend: str, settings: Mapping[str, Any]) -> None:
    """A backend that is required leaves nothing to prefer, and must be allowed."""
    if settings.get("prefer"):
        required, got = "no backend= beside it", settings["prefer"]
        to_do = "leave prefer out to run this backend and no other, or backend to let others run"
        raise OverrideError(f'{origin} prefer requires {required}; got {got} and "{backend}"; {to_do}.')
    if "allow" in settings and backend not in settings["allow"]:
        required, got = "the backend that is required among them", settings["allow"]
        raise OverrideError(f'{origin} allow requires {required}; got {got} and "{backend}"; leave one out.')


def known_backends(tables: Path | None = None) -> tuple[str, ...]:
    """Return every backend that the shipped tables know, and those that an overlay declares."""
    return tuple(load(tables).backends)


def _as_tuple(value: object) -> tuple[Any, ...]:
    """Return one name or several as a tuple; `_backend` rejects what is neither."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)


def _backend(where: str, word: object, known: tuple[str, ...]) -> str:
    if not isinstance(word, str):
        got = shortened(repr(word))
        raise OverrideError(f"{where} requires a name among {', '.join(known)}; got {got}; pass a string.")
    if word not in known:
        near = did_you_mean(word, known) or "."
        raise OverrideError(f"{where} requires one of {', '.join(known)}; got {quoted(word)}{near}")
    return word


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        near = did_you_mean(value, choices) or "."
        raise OverrideError(f"{name} requires one of {', '.join(choices)}; got {quoted(value)}{near}")
    return value


def _read_backend(name: str, text: str, known: tuple[str, ...]) -> dict[str, object]:
    return {"require": _backend(name, text, known)} if text else {}


def _read_backends(name: str, text: str, known: tuple[str, ...]) -> dict[str, object]:
    words = [w.strip() for w in text.split(",") if w.strip()]
    banned = tuple(_backend(name, w[1:], known) for w in words if w.startswith("-"))
    allowed = tuple(_backend(name, w, known) for w in words if not w.startswith("-"))
    found: dict[str, object] = {}
    if banned:
        found["ban"] = banned
    if allowed:
        found["allow"] = allowed
    return found


def _flag(setting: str) -> _Reader:
    def read(name: str, text: str, _known: tuple[str, ...]) -> dict[str, object]:
        word = text.lower()
        if word not in _TRUE + _FALSE:
            also = ", ".join(_TRUE[1:] + _FALSE[1:-1])
            raise OverrideError(f"{name} requires 1 or 0 (also {also}); got {quoted(text)}.")
        return {setting: word in _TRUE}

    return read


def _read_calls(name: str, text: str, _known: tuple[str, ...]) -> dict[str, object]:
    if not text:
        return {}
    is_number = text.isdecimal() and len(text) <= len(str(MOST_CALLS))
    return {"expected_calls": _calls(name, int(text) if is_number else text)}


def _calls(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_CALLS:
        required, got = f"a whole number of calls from 1 to {MOST_CALLS}", shortened(repr(value))
        raise OverrideError(f"{where} requires {required}; got {got}; pass one of these.")
    return value


def _read_tables(name: str, text: str, _known: tuple[str, ...]) -> dict[str, object]:
    folder = _tables(name, text)
    return {} if folder is None else {"tables": folder}


def _tables(name: str, text: str) -> Path | None:
    """Return the folder, by its absolute path: a process may change its directory later."""
    if not text:
        return None
    if not Path(text).is_dir():
        required = "a folder with the layout of capability_tables"
        raise OverrideError(f"{name} requires {required}; got {quoted(text)}.")
    return Path(text).absolute()


def _read_tuning(name: str, text: str, _known: tuple[str, ...]) -> dict[str, object]:
    if text == "off":
        return {"tuning": False}
    if text and not Path(text).is_file():
        required = "off, or a file that `attnroute tune --out` wrote"
        raise OverrideError(f"{name} requires {required}; got {quoted(text)}; unset it to read your own.")
    return {"tuning": Path(text).absolute()} if text else {}


def _read_explain(name: str, text: str, _known: tuple[str, ...]) -> dict[str, object]:
    _one_of(name, text.lower() or "off", _EXPLAIN_MODES)
    return {}


def _read_consensus(name: str, text: str, known: tuple[str, ...]) -> dict[str, object]:
    _flag("consensus")(name, text, known)
    return {}


def _warn_unknown(name: str) -> None:
    hint = did_you_mean(name, VARIABLES, PREFIX) or f"; the known ones are {', '.join(VARIABLES)}."
    message = f"{shortened(name)} is no variable of attnroute and has no effect{hint}"
    warn_user(printable(message), OverrideWarning)


_READERS: dict[str, _Reader] = {
    "ATTNROUTE_BACKEND": _read_backend,
    "ATTNROUTE_BACKENDS": _read_backends,
    "ATTNROUTE_STRICT": _flag("strict"),
    "ATTNROUTE_ALLOW_UNKNOWN": _flag("allow_unknown"),
    "ATTNROUTE_EXPECTED_CALLS": _read_calls,
    "ATTNROUTE_TABLES": _read_tables,
    "ATTNROUTE_TUNING": _read_tuning,
    "ATTNROUTE_EXPLAIN": _read_explain,
    "ATTNROUTE_RECOGNIZE": _flag("recognize"),
    "ATTNROUTE_CONSENSUS": _read_consensus,
}
