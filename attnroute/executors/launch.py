"""Turns what a package raises before it launches a kernel into one error, `KernelRefusedError`.

Before the launch nothing ran on the device, so another backend can run the call. Packages refuse calls in
many ways: asserts, type errors, compilers that fail. Errors of the device pass unchanged, because after one
of them it is unknown what ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from attnroute.errors import AttnRouteError, KernelRefusedError
from attnroute.memory import REFUSED as UNTIL_RESET
from attnroute.memory import Memory

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

_LINE_LIMIT: Final = 200
"""Most characters of a package's error that are kept."""
_COLORS: Final = re.compile(r"\x1b\[[0-9;]*m")
_NO_REFUSALS: Final = frozenset(
    {"AcceleratorError", "DSLCudaRuntimeError", "MemoryError", "OutOfMemoryError", "_StopRecomputationError"}
)
"""Names of exceptions: older versions of torch lack some, and one is no part of torch. With the last one
activation checkpointing ends a recompute that has made all that is needed."""
_DEVICE_ERRORS: Final = re.compile(
    r"cuda (driver |runtime )?error|cudaerror|cuda_error_|hip error|triton error|device-side assert"
    r"|out of memory|cudnn_status_(execution_failed|internal_error)",
    re.IGNORECASE,
)
"""Texts of device errors. Packages raise them as RuntimeError too, so the class alone does not tell."""


class Replaced(NamedTuple):
    """A kernel that was refused where only its executor could put another one in its place.

    Attributes:
        backend: Whose kernel it is.
        reason: The package's error, in one line.
        instead: Whose kernel ran.
        training: It belongs to calls that ask for gradients.
        dtype: Of the tensors, as "bfloat16"; None = not known, as the head dimensions.
        head_dim_qk: As the kernel got it, padded perhaps.
        head_dim_v: The same of the value.
    """

    backend: str
    reason: str
    instead: str
    training: bool = True
    dtype: str | None = None
    head_dim_qk: int | None = None
    head_dim_v: int | None = None


Listener = Callable[[Replaced], None]

_LISTENERS: list[Listener] = []
_KEPT: Final = 1024
REFUSED: Final[Memory[Hashable, str]] = Memory(_KEPT, f"{__name__}.REFUSED", UNTIL_RESET)
"""Why kernels were refused, by backend and what they are compiled for; empty, nothing needs a look at it."""


def listen(listener: Listener) -> None:
    """Call `listener` for every kernel that an executor replaced from now on."""
    if listener not in _LISTENERS:
        _LISTENERS.append(listener)


def unlisten(listener: Listener) -> None:
    """Undo `listen`."""
    _LISTENERS.remove(listener)


def before_launch(
    backend: str, *, key: Callable[[], Hashable] | None = None, draws_on: torch.device | None = None
) -> _BeforeLaunch:
    """Make one error of all ways in which a package refuses a call; used around the launch of its kernel.

    Args:
        backend: Whose kernel it is.
        key: Returns what the package compiles a kernel for. A refusal is remembered under it, and the next
            such call is refused without the package. It is called only where there is a refusal. None =
            remember nothing.
        draws_on: The device whose random numbers the package draws before the launch, None where it draws
            none: a kernel that did not run has drawn none.

    Returns:
        A context manager. Leaving it raises KernelRefusedError from what the package raised, but for errors
        of the device, a lack of memory and our own errors, which pass.
    """
    return _BeforeLaunch(backend, key, draws_on)


class _BeforeLaunch:
    __slots__ = ("_backend", "_draws_on", "_key", "_state")

    def __init__(
        self, backend: str, key: Callable[[], Hashable] | None, draws_on: torch.device | None
    ) -> None:
        self._backend = backend
        self._key = key
        self._draws_on = draws_on
        self._state: Tensor | None = None

    def __enter__(self) -> None:
        if REFUSED and self._key is not None:
            reason = REFUSED.get((self._backend, self._key()))
            if reason is not None:
                raise _refusal(self._backend, reason)
        if self._draws_on is not None and not _is_captured(self._draws_on):
            self._state = _generator(self._draws_on).get_state()

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None or not _is_refusal(error):
            return
        if self._state is not None and self._draws_on is not None:
            _generator(self._draws_on).set_state(self._state)
        reason = _summary(error)
        if self._key is not None:
            # The text alone: an exception holds the frames that it went through, with their tensors.
            REFUSED.put((self._backend, self._key()), reason)
        raise _refusal(self._backend, reason) from error


def _refusal(backend: str, reason: str) -> KernelRefusedError:
    message = (
        f"backend {backend} refused this call before its kernel was launched: {reason}; pass another"
        f' backend, or keep this one away with override(ban="{backend}").'
    )
    return KernelRefusedError(message, backend, reason)


def _is_refusal(error: BaseException) -> bool:
    if not isinstance(error, Exception) or isinstance(error, AttnRouteError):
        return False
    link: BaseException | None = error
    while link is not None:
        if _NO_REFUSALS.intersection(cls.__name__ for cls in type(link).__mro__):
            return False
        if _DEVICE_ERRORS.search(str(link)):
            return False
        link = link.__cause__
    return True


def _summary(error: BaseException) -> str:
    """Return an error in one line: its class and the first line of its text."""
    lines = (line.strip() for line in _COLORS.sub("", str(error)).splitlines())
    first = next((line for line in lines if line), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= _LINE_LIMIT else f"{text[: _LINE_LIMIT - 3]}..."


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured: it draws at its replays, so nothing can be put back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def note_backward_failure(
    backend: str,
    error: KernelRefusedError,
    instead: str,
    *,
    training: bool = True,
    qkv: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Report a kernel that was refused where only its executor could replace it: in a backward, in a graph.

    The user is warned once, and later calls of this kind go to another backend from the start.

    Args:
        backend: Whose kernel it is.
        error: What `before_launch` made of it.
        instead: Whose kernel takes its place.
        training: It belongs to calls that ask for gradients.
        qkv: Query, key and value as the kernel got them, head_dim last. Without them every kind of call that
            the backend was chosen for so far counts as refused.
    """
    found = Replaced(backend, error.said, instead, training)
    if qkv is not None:
        query, _, value = qkv
        dtype = str(query.dtype).removeprefix("torch.")
        found = found._replace(dtype=dtype, head_dim_qk=query.shape[-1], head_dim_v=value.shape[-1])
    for listener in _LISTENERS:
        listener(found)
