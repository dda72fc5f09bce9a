"""Compile the kernels of the installed flash-attn-4 for calls, for one architecture, without a GPU.

A process of its own, since a compiler may end it: `python -m attnroute.conformance.compiling ARCH` reads one
call in JSON per line and writes one answer in JSON per line, "" where the kernels compile. Tensors are fake,
so that nothing is launched.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from inspect import signature
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnroute.audit.standins import answer_all

_COLOURS: Final = re.compile(r"\x1b\[\d*m")
_NOT_ASKED: Final = re.compile("not compiled with CUDA|NVIDIA driver library")
"""What is said where the package wanted a GPU; that is no answer."""
_MULTIPROCESSORS: Final = 132
_SHOWN: Final = 160
_WITH_FEATURES_OF_ITS_OWN: Final = 90
"""From this architecture on, kernels are compiled for "sm_90a" and not for "sm_90"."""


class _Hardware:
    """What kernels ask about the GPU for the sizes of their grids; CuTe DSL would ask the driver."""

    def get_device_multiprocessor_count(self) -> int:
        return _MULTIPROCESSORS

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return _MULTIPROCESSORS // cluster_size


def answer(call: dict[str, Any]) -> str:
    """Return why the kernels of a call do not compile, "" where they do."""
    interface = import_module("flash_attn.cute.interface")
    try:
        with FakeTensorMode():
            _run(interface, call)
    except Exception as error:
        if _NOT_ASKED.search(str(error)):
            raise
        said = " ".join(_COLOURS.sub("", str(error)).split())
        return f"{type(error).__name__}: {said}"[:_SHOWN].rstrip(": ")
    return ""


def _run(interface: Any, call: dict[str, Any]) -> None:
    batch = () if call["ragged"] else (call["b"],)
    times = call["b"] if call["ragged"] else 1
    query, key, value = (
        torch.empty(*batch, times * length, heads, dim, dtype=getattr(torch, call["dtype"]), device="cuda")
        for length, heads, dim in (
            (call["sq"], call["hq"], call["d"]),
            (call["skv"], call["hkv"], call["d"]),
            (call["skv"], call["hkv"], call["dv"]),
        )
    )
    settings: dict[str, Any] = {"causal": call["causal"], "softcap": call["softcap"] or None}
    settings |= {side: call[side] for side in ("window_size_left", "window_size_right")}
    if call["ragged"]:
        sums = torch.empty(call["b"] + 1, dtype=torch.int32, device="cuda")
        settings |= {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
        settings |= {"max_seqlen_q": call["sq"], "max_seqlen_k": call["skv"]}
    sink = torch.empty(call["hq"], dtype=torch.bfloat16, device="cuda") if call["sink"] else None
    out, lse, *_ = _called(
        interface._flash_attn_fwd,
        {"q": query, "k": key, "v": value, "return_lse": True, "learnable_sink": sink, **settings},
    )
    if call["training"]:
        given = {"q": query, "k": key, "v": value, "out": out, "dout": torch.empty_like(out), "lse": lse}
        settings |= {"softcap": call["softcap"], "deterministic": call["deterministic"]}
        _called(interface._flash_attn_bwd, {**given, **settings})


def _called(function: Any, given: dict[str, Any]) -> Any:
    """Call a function with what it knows of the arguments; None stands for one that is not given."""
    known = signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in known})


def _set(arch: str) -> None:
    """Say for which architecture to compile; the package and its compiler read it when they are imported."""
    number = arch.removeprefix("sm_")
    os.environ["FLASH_ATTENTION_ARCH"] = arch
    os.environ["CUTE_DSL_ARCH"] = f"{arch}a" if int(number) >= _WITH_FEATURES_OF_ITS_OWN else arch
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(_MULTIPROCESSORS)
    torch.cuda.current_device = lambda: 0  # Fake tensors are handed on where they claim to be.
    utils: Any = import_module("cutlass.utils")
    utils.HardwareInfo = lambda **_: _Hardware()


if __name__ == "__main__":
    _set(sys.argv[1])
    answer_all(answer)
