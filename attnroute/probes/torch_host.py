"""The machine as torch sees it."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

import torch

from attnroute.foreign import summarize_error
from attnroute.memory import INSTALLED, cached
from attnroute.probes import compilers, packages
from attnroute.question.host import Host, arch_of

if TYPE_CHECKING:
    from attnroute.tables.providers import Providers

_CUDNN_MAJOR = 10000
_CUDNN_MINOR = 100


@cached(64, INSTALLED)
def host_of(device_type: str, index: int | None, providers: Providers) -> Host:
    """Return the host of one device.

    It is the same object until `imports.mark_broken` marks something new.

    Args:
        device_type: "cpu" or "cuda".
        index: Of a CUDA device, else None.
        providers: The distributions to look for, from `Tables.providers`.

    Raises:
        ValueError: The device type is neither.
    """
    if device_type == "cpu":
        return _cpu(providers)
    if device_type != "cuda":
        msg = f'device requires "cpu" or "cuda"; got "{device_type}"; move the tensors.'
        raise ValueError(msg)
    properties = torch.cuda.get_device_properties(index)
    arch = arch_of((properties.major, properties.minor))
    broken = _broken(providers)
    problem = compilers.switched_off() or compilers.c_for_triton().problem
    found = versions(providers)
    if "triton" in found and problem:
        broken["triton"] = problem
    return Host(arch=arch, device_name=properties.name, versions=found, broken=broken)


def _cpu(providers: Providers) -> Host:
    off = compilers.switched_off()
    cxx = compilers.Found(problem=off) if off else compilers.cxx()
    found = {compilers.CXX: cxx, "avx2": _avx2()}
    present = {name: f.version for name, f in found.items() if f.version is not None}
    return Host(
        arch="cpu",
        device_name=platform.processor() or platform.machine(),
        versions={**versions(providers), **present},
        broken={**_broken(providers), **{name: f.problem for name, f in found.items() if f.version is None}},
    )


def _avx2() -> compilers.Found:
    """Return whether inductor takes this processor for one whose vectors its C++ kernels can use."""
    if sys.platform == "darwin":
        return compilers.Found(problem="torch.compile writes no attention kernel on macOS")
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith(("AVX2", "AVX512")):
        return compilers.Found(problem=f"torch calls this processor's vectors {capability}")
    return compilers.Found(version="present")


@cached(8, INSTALLED)
def versions(providers: Providers) -> dict[str, str]:
    """Return the versions of torch, CUDA, cuDNN and every installed provider."""
    found = {"torch": torch.__version__, **packages.installed(providers)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    cudnn = _cudnn()
    if cudnn.version is not None:
        found["cudnn"] = cudnn.version
    return found


def _broken(providers: Providers) -> dict[str, str]:
    """Return distribution to what is wrong with it."""
    problem = _cudnn().problem
    return {**packages.broken(providers), **({"cudnn": problem} if problem else {})}


@cached(1, INSTALLED)
def _cudnn() -> compilers.Found:
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:
        # torch refuses a library that is older than the one that it was built with.
        return compilers.Found(problem=f"torch.backends.cudnn.version() raises {summarize_error(error)}")
    return compilers.Found(None if number is None else cudnn_text(number))


def cudnn_text(number: int) -> str:
    """Say cuDNN's number as a version: 91002 is "9.10.2"."""
    return f"{number // _CUDNN_MAJOR}.{number % _CUDNN_MAJOR // _CUDNN_MINOR}.{number % _CUDNN_MINOR}"


def free_memory(device_type: str, index: int | None) -> int | None:
    """Return how many bytes of a CUDA device are free, those that torch holds unused counted; else None."""
    if device_type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def default_host(providers: Providers) -> Host:
    """Return the host of the current CUDA device, or of the CPU where there is none."""
    if torch.cuda.is_available():
        return host_of("cuda", torch.cuda.current_device(), providers)
    return host_of("cpu", None, providers)
