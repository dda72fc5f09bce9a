"""Triton kernels in the place of several operators, with all but addresses bound before the launch.

A short call waits for the host, which each operator keeps for some microseconds. A kernel is compiled only
once calls of its kind came often, as that takes longer than thousands of operators, and never while a CUDA
graph is captured. Importing this module imports no triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from attnroute.memory import REFUSED, Memory

OFTEN: Final = 64
"""Calls of a kind that go without its kernel: fewer are one or two steps of a model, which may be all."""
KINDS_KEPT: Final = 256
ALIGNED: Final = 16
"""Bytes at multiples of which a kernel goes on reading what began there."""
LARGEST: Final = 2**31
"""Places of elements from which on a kernel's numbers would have too few bits."""
_BEFORE_TRITON: Final = frozenset({(5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (7, 0), (7, 2), (7, 5)})
"""Compute capabilities that Triton does not compile for, by the README of triton-lang/triton: those of cards
older than Ampere, so the list is closed and no new architecture is added here. It is no row of a table,
because it refuses no call: on these cards the same steps run as operators of torch."""

Launch = Callable[..., bool]
"""Launches a kernel on tensors at these addresses. False where that must be left to operators."""


class _Kind:
    """Calls that one compiled kernel serves: how many more go without it, and the kernel then."""

    __slots__ = ("compiled", "is_tried", "left")

    def __init__(self) -> None:
        self.left = OFTEN
        self.is_tried = False
        self.compiled: Any = None


_KINDS: Memory[Hashable, _Kind] = Memory(KINDS_KEPT, f"{__name__}._KINDS", REFUSED)


def compiles_for(device: torch.device) -> bool:
    """Return whether Triton compiles for a device: a CUDA device that is not too old for it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device.index) not in _BEFORE_TRITON


class Kernel(NamedTuple):
    """What a kernel is and how it is called, as functions of the tensors of a call.

    Attributes:
        kind: Returns all that it is compiled for beside the device, None where it cannot take these tensors.
        compiled: Compiles it for tensors, and returns what Triton does.
        bound: Returns what launches the compiled one on addresses of such tensors.
    """

    kind: Callable[..., Hashable]
    compiled: Callable[..., Any]
    bound: Callable[..., Launch]


class Prebound:
    """A kernel for calls that differ in values alone."""

    __slots__ = ("_kernel", "_launch")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._launch: Launch | None = None

    def __call__(self, *tensors: Tensor) -> bool:
        """Launch it on tensors.

        Returns:
            Whether it was launched; False where operators must do what it does.
        """
        launch = self._launch
        if launch is None:
            return self._first(tensors)
        return launch(*[tensor.data_ptr() for tensor in tensors])

    def _first(self, tensors: tuple[Tensor, ...]) -> bool:
        """Compile and bind it, unless calls of the kind are few, and launch it for the first time."""
        kernel, device = self._kernel, tensors[0].device
        what = kernel.kind(*tensors)
        if what is None:
            self._launch = _leave
            return False
        kind = _KINDS.keep((kernel.kind, what, device), _Kind)
        if kind.left > 0:
            kind.left -= 1
            return False
        if not kind.is_tried:
            if torch.cuda.is_current_stream_capturing() or torch.cuda.current_device() != device.index:
                return False
            # In this order: another thread that reads "tried" must find what came of it.
            kind.compiled = _compiled(kernel, tensors)
            kind.is_tried = True
        launch, is_launched = _leave, False
        if kind.compiled is not None:
            try:
                launch = kernel.bound(kind.compiled, *tensors)
                is_launched = launch(*[tensor.data_ptr() for tensor in tensors])
            except (AttributeError, TypeError):
                # A Triton that takes other arguments; nothing was launched.
                launch, kind.compiled = _leave, None
        self._launch = launch
        return is_launched


def _leave(*_: int) -> bool:
    """Leave it to operators."""
    return False


def _compiled(kernel: Kernel, tensors: tuple[Tensor, ...]) -> Any:
    try:
        return kernel.compiled(*tensors)
    except (Exception, SystemExit):  # noqa: BLE001 - a missing or broken triton raises anything
        return None


def bind(
    compiled: Any, grid: tuple[int, int, int], numbers: tuple[object, ...], device: torch.device
) -> Launch:
    """Return what launches a compiled kernel on addresses.

    Args:
        compiled: What Triton returned.
        grid: How many programs there are.
        numbers: All arguments behind the tensors: those that are part of the kernel stand last.
        device: Where the tensors lie.
    """
    types = list(compiled.src.signature.values())
    if "constexpr" not in types:
        # Before Triton 3.3 these are no arguments any more.
        numbers = numbers[: len(numbers) - len(compiled.src.fn.constexprs)]
    run, index = compiled.run, device.index
    # No metadata and no hooks, which profilers of Triton itself have.
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    current_device, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def launch(*addresses: int) -> bool:
        if current_device() != index:
            return False
        run(*grid, stream_of(index), *fixed, *addresses, *numbers)
        return True

    return launch


def reaches(tensor: Tensor) -> int:
    """Return the place of a tensor's last element, counted from its first one."""
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
