"""Import the packages of a backend when it is first selected, and mark those that cannot be imported.

Importing one of them takes seconds, and a package that does not fit its surroundings raises what it likes
while it is imported. So deciding imports nothing; what turns out to be broken is marked, and the next
decision sees it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from attnroute.foreign import is_of_the_user, summarize_error
from attnroute.memory import INSTALLED, cached
from attnroute.probes import packages, torch_host

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnroute.tables.providers import Library, Providers


Libraries = tuple[tuple["Library", ...], ...]
"""What a backend imports, from `libraries_of`: one library of each tuple is enough."""


def check(libraries: Libraries, providers: Providers) -> str | None:
    """Import what the executor of a backend will import; the answer is remembered for this process.

    Args:
        libraries: What it imports; nothing where it rests on torch alone.
        providers: What the tables say of distributions.

    Returns:
        None where it can be used, else in one clause what its import raises.

    Interrupts pass through, and exits that a signal asks for: they are the user's. A package that exits by
    itself is broken.
    """
    problems = _problems(libraries, providers)
    return "; ".join(problems.values()) if problems else None


def mark_if_broken(libraries: Libraries, providers: Providers) -> str | None:
    """Check what a backend imports, and mark its providers where it cannot be used.

    Args:
        libraries: As in `check`.
        providers: As in `check`.

    Returns:
        As `check` does. Where it is not None, hosts that are asked for from now on name the providers as
        broken, so the backend is unavailable: drop routes, and decide again.
    """
    for provider, problem in _problems(libraries, providers).items():
        mark_broken(provider, problem)
    return check(libraries, providers)


def check_installed(backends: Iterable[Libraries], providers: Providers) -> None:
    """Check every backend whose providers are installed. This takes seconds for each of them."""
    installed = packages.installed(providers)
    for libraries in backends:
        if any(library.provider in installed for several in libraries for library in several):
            # Packages greet and warn while they are imported, and this process may be printing data.
            with contextlib.redirect_stdout(sys.stderr):
                mark_if_broken(libraries, providers)


def mark_broken(provider: str, problem: str) -> None:
    """Say that a provider cannot be used in this process.

    Args:
        provider: The name of its distribution, as `needs` of a table have it.
        problem: Why, in one clause. Hosts that are asked for from now on have it in `broken`.
    """
    packages.mark(provider, problem)
    torch_host.host_of.cache_clear()


@cached(64, INSTALLED)
def _problems(libraries: Libraries, providers: Providers) -> dict[str, str]:
    """Return what keeps each provider from being imported; a need is met once one of its libraries can be."""
    problems: dict[str, str] = {}
    for several in libraries:
        installed = tuple(one for one in several if one.provider in packages.installed(providers))
        found: dict[str, str] = {}
        for library in installed or several:
            problem = _imported(library)
            if not problem:
                found = {}
                break
            found[library.provider] = problem
        problems |= found
    return problems


def _imported(library: Library) -> str:
    if library.operator is not None and _is_registered(library.operator):
        return ""
    for name, value in library.environment:
        os.environ.setdefault(name, value)
    try:
        # Packages warn while they are imported, which is no fault of theirs where warnings are errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(library.module)
    except BaseException as error:
        if is_of_the_user(error):
            raise
        return f"importing {library.module} raises {summarize_error(error)}"
    return ""


def _is_registered(operator: str) -> bool:
    namespace, _, name = operator.partition("::")
    return hasattr(getattr(torch.ops, namespace), name)
