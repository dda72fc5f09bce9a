"""Whether the packages of a backend can be imported: asked once, when a backend of theirs is first chosen.

Importing one of them takes seconds, and a package that does not fit its surroundings raises what it likes
while it is imported. So nothing is imported to decide; what turns out to be broken then is marked, and the
next decision sees it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from functools import lru_cache
from importlib import import_module
from typing import Final, NamedTuple

import torch

from attnroute.probes import packages, torch_host
from attnroute.probes.trouble import is_of_the_user, said_by


class Library(NamedTuple):
    """What an executor imports.

    Attributes:
        provider: The distribution that has it.
        module: The module whose import loads everything.
        operator: An operator of torch that it registers, where a second library with the same one would end
            the process: if it is registered already, nothing is imported.
        defaults: Environment variables that it reads while it is imported, set unless the user set them.
    """

    provider: str
    module: str
    operator: str = ""
    defaults: tuple[tuple[str, str], ...] = ()


_KEEPS_COMPILED: Final = (("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1"),)
"""flash-attn-4 then keeps what it compiles for later processes."""


LIBRARIES: Final[dict[str, tuple[Library, ...]]] = {
    "fa4": (Library("flash-attn-4", "flash_attn.cute.interface", defaults=_KEEPS_COMPILED),),
    "flex_fa4": (Library("flash-attn-4", "flash_attn.cute.interface", defaults=_KEEPS_COMPILED),),
    "fa2": (Library("flash-attn", "flash_attn.flash_attn_interface"),),
    "fa3": (
        Library("flash-attn-3", "flash_attn_3._C", "flash_attn_3::fwd"),
        Library("xformers", "xformers.flash_attn_3._C", "flash_attn_3::fwd"),
    ),
    "cudnn_fe": (Library("nvidia-cudnn-frontend", "cudnn.sdpa.fwd.torch_op"),),
    "te": (Library("transformer-engine", "transformer_engine.pytorch.cpp_extensions.fused_attn"),),
}
"""By backend: of several libraries one is enough. Other backends are torch's own and have none."""


def check(backend: str) -> str | None:
    """Import what the executor of a backend will import; the answer is remembered for this process.

    Args:
        backend: Its name; one that rests on torch alone has nothing to import.

    Returns:
        None where it can be used, else in one clause what its import raises.

    Interrupts pass through, and exits that a signal asks for: they are the user's. A package that exits by
    itself is broken.
    """
    problems = _problems(backend)
    return "; ".join(problems.values()) if problems else None


def settle(backend: str) -> str | None:
    """Check a backend, and mark its providers where it cannot be used.

    Args:
        backend: Its name.

    Returns:
        As `check` does. Where it is not None, hosts that are asked for from now on name the providers as
        broken, so the backend is unavailable: forget routes, and decide again.
    """
    for provider, problem in _problems(backend).items():
        mark_broken(provider, problem)
    return check(backend)


def settle_installed() -> None:
    """Check every backend whose providers are installed. This takes seconds for each of them."""
    for backend, libraries in LIBRARIES.items():
        if any(library.provider in packages.installed() for library in libraries):
            # Packages greet and warn while they are imported, and this process may be printing data.
            with contextlib.redirect_stdout(sys.stderr):
                settle(backend)


def mark_broken(provider: str, problem: str) -> None:
    """Say that a provider cannot be used in this process.

    Args:
        provider: The name of its distribution, as `needs` of a table have it.
        problem: Why, in one clause. Hosts that are asked for from now on have it in `broken`.
    """
    packages.mark(provider, problem)
    torch_host.host_of.cache_clear()


def forget() -> None:
    """Look at every package again, e.g. after an install. What is imported stays imported."""
    _problems.cache_clear()
    packages.forget()
    torch_host.forget()


@lru_cache(maxsize=32)
def _problems(backend: str) -> dict[str, str]:
    """Return what keeps each provider of a backend from being imported, empty once one of them can be."""
    problems: dict[str, str] = {}
    for library in _in_question(backend):
        problem = _imported(library)
        if not problem:
            return {}
        problems[library.provider] = problem
    return problems


def _in_question(backend: str) -> tuple[Library, ...]:
    """Return the libraries of a backend that are installed, all of them where none is."""
    libraries = LIBRARIES.get(backend, ())
    return tuple(lib for lib in libraries if lib.provider in packages.installed()) or libraries


def _imported(library: Library) -> str:
    if library.operator and _is_registered(library.operator):
        return ""
    for name, value in library.defaults:
        os.environ.setdefault(name, value)
    try:
        # Packages warn while they are imported, which is no fault of theirs where warnings are errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(library.module)
    except BaseException as error:
        if is_of_the_user(error):
            raise
        return f"importing {library.module} raises {said_by(error)}"
    return ""


def _is_registered(operator: str) -> bool:
    namespace, _, name = operator.partition("::")
    return hasattr(getattr(torch.ops, namespace), name)
