"""Versions of installed distributions from their metadata, and what is wrong with them. Nothing is imported.

Metadata can lie: flash-attn and flash-attn-4 write into one folder, builds leave their kernels out, another
copy comes first on the path. So each provider names the modules without which it is of no use, and these are
looked for where an import would find them.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from packaging.version import Version

from attnroute.probes.trouble import is_of_the_user, said_by

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class Part(NamedTuple):
    """A module without which a provider is of no use.

    Attributes:
        modules: Its dotted names in the layouts that releases have, any of which will do.
        absent: What is said where an import would not find it, or would find another one.
        text: Words in its source that modules of the same name from elsewhere do not have.
    """

    modules: tuple[str, ...]
    absent: str
    text: bytes = b""


class Provider(NamedTuple):
    """A distribution that backends or integrations rest on.

    Attributes:
        parts: What must be found; empty where the metadata is taken at its word.
        within: A distribution whose builds from source hold these parts without metadata of their own.
    """

    parts: tuple[Part, ...] = ()
    within: str | None = None


class Survey(NamedTuple):
    """What is installed.

    Attributes:
        versions: Distribution to version, of those that nothing is known to be wrong with.
        broken: Distribution to what is wrong with it, in one clause.
    """

    versions: dict[str, str]
    broken: dict[str, str]


_AFTER_FLASH_ATTN: Final = (
    "which installing flash-attn replaces and uninstalling it removes; install flash-attn-4 again, after it"
)
_STALE: Final = f"flash_attn/cute/interface.py is not that of flash-attn-4, {_AFTER_FLASH_ATTN}"

PROVIDERS: Final[dict[str, Provider]] = {
    "flash-attn": Provider(
        (
            Part(("flash_attn.flash_attn_interface",), "flash_attn/flash_attn_interface.py is missing"),
            Part(
                ("flash_attn_2_cuda",),
                "without its compiled kernels, the module flash_attn_2_cuda; build it for this torch, Python"
                " and CUDA, and without FLASH_ATTENTION_SKIP_CUDA_BUILD",
            ),
        )
    ),
    "flash-attn-3": Provider(
        (
            Part(
                ("flash_attn_3._C",),
                "without its compiled kernels, the module flash_attn_3._C; build release 3.0.0 or newer for"
                " this torch and Python",
            ),
        )
    ),
    "flash-attn-4": Provider(
        (
            Part(("flash_attn.cute.cache_utils",), f"flash_attn/cute has lost files, {_AFTER_FLASH_ATTN}"),
            Part(("flash_attn.cute.interface",), _STALE, b"flash_attn.cute.cache_utils"),
        )
    ),
    "xformers": Provider(
        (
            Part(
                ("xformers.flash_attn_3._C",),
                "without FlashAttention-3 in it, the module xformers.flash_attn_3._C",
            ),
        )
    ),
    "nvidia-cudnn-frontend": Provider(
        (
            Part(
                ("cudnn._compiled_module",),
                "without its compiled module cudnn._compiled_module; install a wheel for this Python",
            ),
        )
    ),
    "nvidia-cutlass-dsl": Provider(),
    "quack-kernels": Provider(),
    "apache-tvm-ffi": Provider(),
    "transformer-engine": Provider(
        (Part(("transformer_engine.pytorch",), "without its modules for torch, transformer_engine.pytorch"),)
    ),
    "transformer-engine-torch": Provider(
        (
            Part(
                (
                    "transformer_engine_torch",
                    "transformer_engine.transformer_engine_torch",
                    "transformer_engine.wheel_lib.transformer_engine_torch",
                ),
                "without its compiled module transformer_engine_torch; build it for this torch and Python",
            ),
        ),
        within="transformer-engine",
    ),
    "triton": Provider(),
    "transformers": Provider(),
}


class Found(NamedTuple):
    """One provider: its version, None where it is not installed, and what is wrong with it."""

    version: str | None = None
    problem: str = ""


_MARKED: dict[str, str] = {}
"""What was found to be wrong with a provider later, by importing it."""


def mark(provider: str, problem: str) -> None:
    """Remember for this process that a provider cannot be used, whatever its files look like."""
    _MARKED[provider] = problem


def broken() -> dict[str, str]:
    """Return distribution name to what is wrong with it, for every provider that cannot be used."""
    return {**survey().broken, **_MARKED}


def forget() -> None:
    """Look at everything again, e.g. after an install."""
    _MARKED.clear()
    survey.cache_clear()


def installed() -> dict[str, str]:
    """Return distribution name to version for every known provider that can be used, as far as files tell."""
    return survey().versions


@lru_cache(maxsize=1)
def survey() -> Survey:
    """Look at every known provider once."""
    found: dict[str, Found] = {}
    for name, provider in PROVIDERS.items():
        try:
            found[name] = _looked_at(name, provider, found)
        except BaseException as error:
            # Metadata in another encoding, a finder of another package that fails: one must not break all.
            if is_of_the_user(error):
                raise
            problem = f"its metadata and files cannot be read ({said_by(error)}); install it again"
            found[name] = Found(problem=problem)
    versions = {n: f.version for n, f in found.items() if f.version is not None and not f.problem}
    return Survey(versions, {name: f.problem for name, f in found.items() if f.problem})


def _looked_at(name: str, provider: Provider, before: dict[str, Found]) -> Found:
    lost = next((part.absent for part in provider.parts if not _is_there(part)), "")
    try:
        version = _version_in(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        is_whole = bool(provider.parts) and not lost
        return _without_metadata(provider, before) if is_whole else Found()
    if version is None or not _is_version(version):
        named = "none" if version is None else f'"{version}"'
        return Found(
            problem=f"its metadata must name a version as PEP 440 has them; got {named}; install it again"
        )
    return Found(version, f"{version} is installed, but {lost}" if lost else "")


def _without_metadata(provider: Provider, before: dict[str, Found]) -> Found:
    """Say what modules without a distribution are: part of another one, or a build that nobody can name."""
    if provider.within is not None:
        return before[provider.within]
    module = provider.parts[0].modules[0]
    return Found(
        problem=f"{module} can be imported, but no metadata says which release it is; install it with pip"
    )


def _version_in(distribution: metadata.Distribution) -> str | None:
    """Return what the metadata says, None where it says nothing, as after an interrupted uninstall."""
    try:
        said = distribution.metadata
    except FileNotFoundError:
        return None
    return said["Version"] if said is not None and "Version" in said else None


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except ValueError:
        # InvalidVersion, or more digits than Python reads.
        return False
    return True


def _is_there(part: Part) -> bool:
    specs = [spec for module in part.modules if (spec := locate(module)) is not None]
    return any(not part.text or _says(spec.origin, part.text) for spec in specs)


def _says(origin: str | None, text: bytes) -> bool:
    """Return whether a source file holds a text; one that cannot be read is not held against anybody."""
    try:
        return text in Path(origin or "").read_bytes()
    except OSError:
        return True


def locate(module: str) -> ModuleSpec | None:
    """Find a module as an import would, importing neither it nor the packages around it.

    Args:
        module: Its dotted name.

    Returns:
        Its spec, None where an import would not find it.
    """
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
        places = _inside(spec)
        for part in rest:
            spec = PathFinder.find_spec(part, places)
            places = _inside(spec, part, places)
    except BaseException as error:
        # An entry of sys.modules without a spec, or a finder of another package that fails, as it likes.
        if is_of_the_user(error):
            raise
        return None
    return spec


def _inside(spec: ModuleSpec | None, part: str = "", around: list[str] | None = None) -> list[str]:
    """Return the folders in which the modules of a package are."""
    if spec is None or spec.submodule_search_locations is None:
        return []
    if around and spec.loader is None:
        # A namespace package asks its parent where it is, and that one is not imported.
        return [place for folder in around if Path(place := str(Path(folder, part))).is_dir()]
    return list(spec.submodule_search_locations)
