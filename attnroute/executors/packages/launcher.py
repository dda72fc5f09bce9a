"""Launches a package's kernel: refusals become one error, and whoever wants to know of a launch is told."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from attnroute.errors import KernelRefusedError
from attnroute.executors import first_call, launch
from attnroute.executors.packages import fallback
from attnroute.executors.packages.request import Gradients, Launched, Request

_NO_MARK: AbstractContextManager[Any] = nullcontext()
_profiler = torch.autograd.profiler
_count_dispatch_modes = torch._C._len_torch_dispatch_stack


class Kernel(Protocol):
    """How a package's kernel is launched. Both run without autograd, inside `before_launch`.

    A kernel whose log-sum-exp is never +inf may set `gives_infinity = False`, which saves two small kernels.
    One that takes padded batches in layout bhsd sets `heads_first = True`, which saves views, and so time on
    the host. One whose forward takes sequences of any strides and `used_kv` with any number of queries sets
    `in_place = True`, which saves copies of padded rows of keys. One that looks up what it makes of a
    request's numbers may have a method `bound`, which returns a kernel for requests with these numbers.
    """

    def forward(self, request: Request, /) -> Launched:
        """Launch the forward kernel."""

    def backward(self, request: Request, result: Launched, grad_out: Tensor, /) -> Gradients:
        """Launch the backward kernel for an output and log-sum-exp, -inf in rows with no key.

        They need not be those of this kernel's forward: with a sink that was added through the log-sum-exp
        both are smaller, and +inf in rows with no key.
        """


class Launcher:
    """Launches one backend's kernel, in either direction."""

    __slots__ = ("_backend", "_gives_infinity", "_kernel", "_known")

    def __init__(self, backend: str, kernel: Kernel, known: set[str] | None = None) -> None:
        """Take a kernel.

        Args:
            backend: Whose kernel it is.
            kernel: How it is launched.
            known: For calls of one kind: directions in which some were launched before, so that nothing is
                compiled there any more. None = calls are of any kind.
        """
        self._backend = backend
        self._kernel = kernel
        self._gives_infinity = getattr(kernel, "gives_infinity", True)
        self._known = known

    def bound(self, request: Request) -> Launcher:
        """Return a launcher for requests that differ from this one in the values of tensors alone."""
        bound = getattr(self._kernel, "bound", None)
        return Launcher(self._backend, self._kernel if bound is None else bound(request), set())

    def forward(self, request: Request, *, reads_lse: bool = True) -> Launched:
        """Launch the forward. The log-sum-exp is float32, and if it is read, -inf in rows with no key."""
        try:
            out, lse, state = self._launched("forward", request)
        except KernelRefusedError as error:
            # Inside a compiled graph nobody else can choose another kernel any more.
            if request.fallback != "inside" or request.dropout_p:
                raise
            self._note(error, request)
            out, lse = fallback.forward(request)
            state = None
        if lse.dtype is not torch.float32:
            lse = lse.float()
        if self._gives_infinity and reads_lse and request.may_leave_rows_empty:
            # -inf for rows with no key, where kernels give either infinity.
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return Launched(out, lse, state)

    def backward(self, request: Request, result: Launched, grad_out: Tensor) -> Gradients:
        """Launch the backward."""
        try:
            made: Gradients = self._launched("backward", request, result, grad_out)
        except KernelRefusedError as error:
            # Output and log-sum-exp are the same whatever kernel made them, so another one can go on.
            if request.fallback == "none" or request.dropout_p:
                raise
            self._note(error, request)
            return fallback.backward(request, result, grad_out)
        return made

    def _launched(self, direction: str, request: Request, *rest: Any) -> Any:
        """Launch a kernel; what the package raises before that becomes one error."""
        run, known = getattr(self._kernel, direction), self._known
        is_new = known is None or direction not in known
        if (
            request.dropout_p
            or launch.REFUSED.entries
            or _is_watched()
            or (is_new and first_call.has_listener(self._backend))
        ):
            with self._guarded(direction, request), self._shown(direction, request):
                made = run(request, *rest)
        else:
            try:
                made = run(request, *rest)
            except Exception:
                with self._guarded(direction, request):
                    raise
        if is_new and known is not None:
            known.add(direction)
        return made

    def _guarded(self, direction: str, request: Request) -> AbstractContextManager[None]:
        """Make refusals one error; those that another kernel replaces are remembered."""
        key = None if request.fallback == "none" else lambda: (direction, *_specialization_key(request))
        draws_on = request.query.device if request.dropout_p else None
        return launch.before_launch(self._backend, key=key, draws_on=draws_on)

    def _shown(self, direction: str, request: Request) -> AbstractContextManager[Any]:
        """Show the launch to a profiler or a dispatch mode, and a first call that compiles to the user."""
        name = self._backend if direction == "forward" else f"{self._backend}_backward"
        if not first_call.has_listener(self._backend) or not first_call.is_first(
            name, _specialization_key(request)
        ):
            return _mark(name)
        heads = f"{request.query.shape[-1]}, {request.value.shape[-1]}"
        text = f"{direction} of {str(request.query.dtype).removeprefix('torch.')}, head dimensions {heads}"
        stack = ExitStack()
        stack.enter_context(first_call.announced(self._backend, text))
        stack.enter_context(_mark(name))
        return stack

    def _note(self, error: KernelRefusedError, request: Request) -> None:
        qkv = (request.query, request.key, request.value)
        launch.note_backward_failure(self._backend, error, "chunked", training=request.training, qkv=qkv)


def _is_watched() -> bool:
    """Return whether there is a profiler or a dispatch mode."""
    return _profiler._is_profiler_enabled or _count_dispatch_modes() > 0


def _mark(name: str) -> AbstractContextManager[Any]:
    """Show the launch to a profiler or a dispatch mode, where there is one."""
    return torch.profiler.record_function(f"attnroute::{name}") if _is_watched() else _NO_MARK


def _specialization_key(request: Request) -> tuple[Hashable, ...]:
    """Return the properties of a request that a package compiles a kernel for."""
    query, key, value = request.query, request.key, request.value
    place = 1 if request.heads_first else -2
    heads = tuple((t.shape[place], t.shape[-1]) for t in (query, key, value))
    bands = (request.left is None, request.right is None, request.is_causal)
    extras = (request.sink is None, request.alibi_slopes is None, request.softcap, request.dropout_p > 0)
    fixed = (request.deterministic, request.training, request.options)
    return (query.dtype, query.device, heads, request.is_ragged, *bands, *extras, *fixed)
