"""The machine as torch sees it."""

from __future__ import annotations

import platform
from functools import lru_cache

import torch

from attnroute.host import Host, arch_of
from attnroute.probes.packages import installed

_CUDNN_MAJOR = 10000
_CUDNN_MINOR = 100


@lru_cache(maxsize=64)
def host_of(device_type: str, index: int | None) -> Host:
    """Return the host of one device: "cpu", or "cuda" and its index.

    Raises:
        ValueError: The device type is neither.
    """
    if device_type == "cpu":
        return Host(arch="cpu", device_name=platform.processor() or platform.machine(), versions=versions())
    if device_type != "cuda":
        msg = f'device requires "cpu" or "cuda"; got "{device_type}"; move the tensors.'
        raise ValueError(msg)
    properties = torch.cuda.get_device_properties(index)
    arch = arch_of((properties.major, properties.minor))
    return Host(arch=arch, device_name=properties.name, versions=versions())


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of torch, CUDA, cuDNN and every installed provider."""
    found = {"torch": torch.__version__, **installed()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    number = torch.backends.cudnn.version()
    if number is not None:
        found["cudnn"] = cudnn_text(number)
    return found


def cudnn_text(number: int) -> str:
    """Say cuDNN's number as a version: 91002 is "9.10.2"."""
    return f"{number // _CUDNN_MAJOR}.{number % _CUDNN_MAJOR // _CUDNN_MINOR}.{number % _CUDNN_MINOR}"


def default_host() -> Host:
    """Return the host of the current CUDA device, or of the CPU where there is none."""
    if torch.cuda.is_available():
        return host_of("cuda", torch.cuda.current_device())
    return host_of("cpu", None)
