"""Ask a release of flash-attn-4 what it takes: its own Python runs up to where it would compile a kernel.

A process of its own: `python -m attnroute.audit.fa4_release FOLDER` reads one call in JSON per line and
writes one answer in JSON per line, "" where nothing refuses it. Everything that the release imports is a
stand-in, and so is the compiler, which gets each kernel object with its tile sizes: what that object says
of itself (`can_implement`) is asked too.
"""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from attnroute.audit.standins import StandIn, answer_all, install, problem_of
from attnroute.audit.tensors import DTYPES, Tensor, empty, torch_names

_MULTIPROCESSORS: Final = 132
_TENSOR_MEMORY_COLUMNS: Final = 512
_SIDES: Final = ("window_size_left", "window_size_right")
_OF_AMPERE: Final = (8, 12)
"""Majors whose kernels are those of Ampere, about which `can_implement` is; others inherit it unread."""


class _Arch:
    """An architecture of CuTe DSL, as kernels compare it."""

    def __init__(self, name: str) -> None:
        number = name.removeprefix("sm_").rstrip("af")
        self.number = int(number)

    def is_family_of(self, other: _Arch) -> bool:
        """Say whether this is of the other's family, and no older."""
        return self.number // 10 == other.number // 10 and self.number >= other.number

    def __lt__(self, other: _Arch) -> bool:
        return self.number < other.number

    def __le__(self, other: _Arch) -> bool:
        return self.number <= other.number

    def __gt__(self, other: _Arch) -> bool:
        return self.number > other.number

    def __ge__(self, other: _Arch) -> bool:
        return self.number >= other.number


class _Archs:
    """CuTe DSL's enumeration of them."""

    def __getattr__(self, name: str) -> _Arch:
        if not name.startswith("sm_"):
            raise AttributeError(name)
        return _Arch(name)


class _Refused(Exception):  # noqa: N818 - it says what a kernel object answered
    """A kernel object says that it cannot be implemented."""


class _Nothing(dict[Any, Any]):
    """A cache of kernels that forgets, so that each call makes its kernel objects."""

    def __contains__(self, key: object) -> bool:
        return False

    def __getitem__(self, key: object) -> Any:
        return StandIn("kernel")

    def __setitem__(self, key: object, value: object) -> None:
        """Forget it."""


class Release:
    """One release, whose functions run here."""

    def __init__(self, folder: Path) -> None:
        """Import it."""
        self._arch = 0
        self._shared_memory = 0
        self._call: dict[str, Any] = {}
        os.environ["FLASH_ATTENTION_NUM_SMS"] = str(_MULTIPROCESSORS)
        install(folder, "flash_attn", self._decided())
        interface = import_module("flash_attn.cute.interface")
        self._forward = interface._flash_attn_fwd
        self._backward = interface._flash_attn_bwd
        functions = list(vars(interface).values())
        for function in functions:
            if hasattr(function, "compile_cache"):
                function.compile_cache = _Nothing()
        self._forget = [f.cache_clear for f in functions if hasattr(f, "cache_clear")]

    def _decided(self) -> dict[str, object]:
        def capability(*_: object) -> tuple[int, int]:
            return divmod(self._arch, 10)

        def dsl() -> Any:
            return SimpleNamespace(get_arch_enum=lambda: _Arch(str(self._arch)))

        return {
            **torch_names(),
            "torch.cuda.get_device_capability": capability,
            "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(
                multi_processor_count=_MULTIPROCESSORS
            ),
            "torch.cuda.is_available": lambda: False,
            "torch._guards.active_fake_mode": lambda: None,
            "cutlass.__file__": "",
            "cutlass.cute.arch.WARP_SIZE": 32,
            "cutlass.const_expr": lambda value: value,
            "cutlass.base_dsl.arch.Arch": _Archs(),
            "cutlass.cutlass_dsl.Arch": _Archs(),
            "cutlass.cute.arch.get_max_tmem_alloc_cols": lambda *_: _TENSOR_MEMORY_COLUMNS,
            "cutlass.cutlass_dsl.BaseDSL._get_dsl": dsl,
            "cutlass.cute.ceil_div": lambda a, b: -(-a // b),
            "cutlass.cute.round_up": lambda a, b: -(-a // b) * b,
            "cutlass.cute.compile": self._compile,
            "cutlass.cute.runtime.find_runtime_libraries": lambda **_: [],
            "cutlass.utils.get_smem_capacity_in_bytes": lambda *_: self._shared_memory,
        }

    def _compile(self, kernel: object, *args: object, **kwargs: object) -> StandIn:
        """Ask a kernel object what it says of itself."""
        ask = getattr(kernel, "can_implement", None)
        if self._arch // 10 in _OF_AMPERE and ask is not None and not isinstance(ask, StandIn):
            known = {**vars(kernel), "head_dim": self._call["d"], "head_dim_v": self._call["dv"]}
            names = inspect.signature(ask).parameters
            given = {name: known[name] for name in names if name in known}
            required = {n for n, p in names.items() if p.default is inspect.Parameter.empty}
            if required <= given.keys() and not ask(**given):
                raise _Refused(
                    f"{type(kernel).__name__}.can_implement with {self._shared_memory} bytes of shared memory"
                )
        return StandIn("kernel")

    def answer(self, call: dict[str, Any]) -> str:
        """Return why the release refuses a call, "" where it does not."""
        self._call, self._arch, self._shared_memory = call, call["arch"], call["shared_memory"]
        for forget in self._forget:
            forget()
        try:
            self._run(call)
        except _Refused as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - code of the package
            return problem_of(error)
        return ""

    def _run(self, call: dict[str, Any]) -> None:
        training = call["training"]
        query, key, value, lengths = _tensors(call)
        settings = {
            "causal": call["causal"],
            "softcap": call["softcap"],
            **{side: call[side] for side in _SIDES if call[side] is not None},
            **lengths,
        }
        forward = dict(settings, return_lse=True)
        if call["sink"]:
            forward["learnable_sink"] = empty(call["hq"], dtype=DTYPES["bfloat16"])
        out, lse, *_ = self._forward(q=query, k=key, v=value, **forward)
        if training:
            self._backward(
                q=query,
                k=key,
                v=value,
                out=out,
                dout=out,
                lse=lse,
                deterministic=call["deterministic"],
                **settings,
            )


def _tensors(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    batch, dtype = call["b"], DTYPES[call["dtype"]]
    rows = (
        (call["sq"], call["hq"], call["d"]),
        (call["skv"], call["hkv"], call["d"]),
        (call["skv"], call["hkv"], call["dv"]),
    )
    if not call["ragged"]:
        query, key, value = (Tensor((batch, *row), dtype) for row in rows)
        return query, key, value, {}
    query, key, value = (Tensor((batch * row[0], *row[1:]), dtype) for row in rows)
    lengths = empty(batch + 1, dtype=DTYPES["int32"])
    numbers = {"max_seqlen_q": call["sq"], "max_seqlen_k": call["skv"]}
    return query, key, value, {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, **numbers}


if __name__ == "__main__":
    answer_all(Release(Path(sys.argv[1])).answer)
