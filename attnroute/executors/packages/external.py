"""Runs kernels of other packages, eagerly and in compiled graphs, with gradients.

A `Kernel` launches a package's forward and backward. `External` makes the backend's executor from it.
Compiled graphs get two operators, `attnroute::<backend>` and `attnroute::<backend>_backward`. Eager calls use
an autograd function instead, because an operator of Python costs the host several times as much; profilers
and dispatch modes see them under the operators' names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnroute.errors import KernelRefusedError
from attnroute.executors import first_call, launch, ragged
from attnroute.executors.batched_gradients import in_turn
from attnroute.executors.operators import Side, register
from attnroute.executors.packages import fallback
from attnroute.executors.packages.request import (
    SCHEMA,
    TENSORS,
    Gradients,
    Launched,
    Request,
    in_batch,
    packed,
    packed_lse,
    padded,
    padded_lse,
    request_of,
    tokens_of,
)
from attnroute.executors.protocol import (
    Bound,
    Executor,
    ForwardResult,
    Grads,
    Inputs,
    Output,
    Pair,
    Plan,
    Wanted,
)
from attnroute.masks.tracing import is_traced

_FIELDS = len(Request._fields)
_SINK = Request._fields.index("sink")
_OUTPUTS = 3
"""What a forward launch returns, saved before the fields."""
_GIVEN_BACK = 1 + _OUTPUTS
"""What a backward launch takes before the fields."""
_Made = TypeVar("_Made")
_NO_MARK: AbstractContextManager[Any] = nullcontext()


class Kernel(Protocol):
    """How a package's kernel is launched. Both run without autograd, inside `before_launch`.

    A kernel whose log-sum-exp is never +inf may set `gives_infinity = False`, which saves two small kernels.
    One that takes padded batches in layout bhsd sets `heads_first = True`, which saves views, and so time on
    the host. One whose forward takes sequences of any strides and `used_kv` with any number of queries sets
    `in_place = True`, which saves copies of padded rows of keys.
    """

    def forward(self, request: Request, /) -> Launched:
        """Launch the forward kernel."""

    def backward(self, request: Request, result: Launched, grad_out: Tensor, /) -> Gradients:
        """Launch the backward kernel for an output and log-sum-exp, -inf in rows with no key.

        They need not be those of this kernel's forward: with a sink that was added through the log-sum-exp
        both are smaller, and +inf in rows with no key.
        """


class External:
    """The executor of one backend: `run`, and `forward` and `backward` for sinks and pairs."""

    def __init__(self, backend: str, kernel: Kernel) -> None:
        """Register the operators of a backend, once per process.

        Args:
            backend: Its name, which the operators have too.
            kernel: How it is launched.
        """
        self._backend = backend
        self._kernel = kernel
        self._gives_infinity = getattr(kernel, "gives_infinity", True)
        self._heads_first = getattr(kernel, "heads_first", False)
        self._in_place = getattr(kernel, "in_place", False)
        self._forward, self._backward = register(
            backend,
            Side(
                f"({SCHEMA}) -> (Tensor out, Tensor lse, Tensor state)",
                self._forward_of_graphs,
                _fake_forward,
            ),
            Side(
                f"(Tensor grad_out, Tensor out, Tensor lse, Tensor state, {SCHEMA})"
                " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sink)",
                self._backward_of_graphs,
                _fake_backward,
            ),
            save=_save,
            gradients=_gradients,
        )

    @property
    def executor(self) -> Executor:
        """What the backend's module offers."""
        return Executor(self.run, Pair(self.forward, self.backward), bind=self.bind)

    def run(self, inputs: Inputs, plan: Plan) -> Output:
        """Run one call."""
        if _is_in_graph(inputs.query):
            request = request_of(inputs, plan, in_graph=True)
            out, lse, _ = self._forward(*request)
        else:
            request = self._request_of(inputs, plan)
            out, lse = self._results(request, returns_lse=plan.return_lse)
        # The backward knows no gradient of the log-sum-exp.
        asked = padded_lse(request, lse, inputs).detach() if plan.return_lse else None
        return padded(request, out, inputs.query.shape[0]), asked

    def bind(self, inputs: Inputs, plan: Plan) -> Bound | None:
        """Return what runs calls whose requests differ from this one's in query, key and value alone."""
        if not (inputs.sink is inputs.alibi_slopes is None and inputs.dropout_p == 0.0):
            return None
        with torch.no_grad():
            request = self._request_of(inputs, plan)
        batch, step = inputs.query.shape[0], None
        if request.is_ragged:
            step = ragged.rows_of(inputs, training=plan.training, in_place=self._in_place).step
        # No tensor is kept alive: prefix sums stay with the mask that they were made from.
        kept = [None if t is None else weakref.ref(t) for t in request[3:6]]
        is_ragged, heads_first = request.is_ragged, request.heads_first
        rest: tuple[Any, ...] = request[6:]
        del inputs, request

        def run(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor | None:
            sums: list[Any] = [None if ref is None else ref() for ref in kept]
            if any(ref is not None and found is None for ref, found in zip(kept, sums, strict=True)):
                return None
            if is_ragged:
                if step is not None and ragged.step_of(key, value) != step:
                    return None
                query, key, value = tokens_of(query, key, value, step)
            elif not heads_first:
                query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            made = Request(query, key, value, *sums, *rest)
            try:
                out, _lse = self._results(made, returns_lse=False)
            except KernelRefusedError:
                # Run as any other it is refused again, and another backend takes it.
                return None
            return padded(made, out, batch)

        return run

    def forward(self, inputs: Inputs, plan: Plan) -> ForwardResult:
        """Run the forward alone, recording no gradient."""
        with torch.no_grad():
            if _is_in_graph(inputs.query):
                request = request_of(inputs, plan, in_graph=True)
                out, lse, state = self._forward(*request)
            else:
                request = self._request_of(inputs, plan)
                out, lse, state = self._launch_forward(request)
        return ForwardResult(
            padded(request, out, inputs.query.shape[0]), padded_lse(request, lse, inputs), (state,)
        )

    def backward(
        self, inputs: Inputs, plan: Plan, result: ForwardResult, grad_out: Tensor, _: Wanted
    ) -> Grads:
        """Run the backward alone."""
        in_graph = _is_in_graph(grad_out)
        request = request_of(inputs, plan, in_graph=True) if in_graph else self._request_of(inputs, plan)
        launched = Launched(packed(request, result.out), packed_lse(request, result.lse), result.rest[0])
        grad = packed(request, grad_out)
        if in_graph:
            grads = Gradients(*self._backward(grad, *launched, *request))
        else:
            grads = self._launch_backward(grad, launched, request)
        query, key, value, _sink = in_batch(request, grads, inputs.query.shape[0])
        return query, key, value, None

    def _results(self, request: Request, *, returns_lse: bool) -> tuple[Tensor, Tensor]:
        """Return the output, with its gradient where one is asked for, and the log-sum-exp if it is read."""
        if not request.training:
            out, lse, _ = self._launch_forward(request, reads_lse=returns_lse)
            return out, lse
        # The tensors that get gradients are arguments of their own, which autograd looks at one by one.
        tensors = (request.query, request.key, request.value, request.sink)
        made: Any = _Eager.apply(self, request, returns_lse, *tensors)  # type: ignore[no-untyped-call]
        return made if returns_lse else (made, made)

    def _request_of(self, inputs: Inputs, plan: Plan) -> Request:
        # What an operator returns in a graph lies in the order of its dimensions, and models have theirs so.
        return request_of(inputs, plan, heads_first=self._heads_first, in_place=self._in_place)

    def _launch_forward(self, request: Request, *, reads_lse: bool = True) -> Launched:
        try:
            out, lse, state = self._launched("forward", self._kernel.forward, request)
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

    def _launch_backward(self, grad_out: Tensor, result: Launched, request: Request) -> Gradients:
        try:
            return self._launched("backward", self._kernel.backward, request, result, grad_out)
        except KernelRefusedError as error:
            # Output and log-sum-exp are the same whatever kernel made them, so another one can go on.
            if request.fallback == "none" or request.dropout_p:
                raise
            self._note(error, request)
            return fallback.backward(request, result, grad_out)

    def _launched(self, direction: str, run: Callable[..., _Made], request: Request, *rest: Any) -> _Made:
        """Launch a kernel; what the package raises before that becomes one error."""
        if self._needs_care(request):
            with self._guarded(direction, request), self._shown(direction, request):
                return run(request, *rest)
        try:
            return run(request, *rest)
        except Exception:
            with self._guarded(direction, request):
                raise

    def _needs_care(self, request: Request) -> bool:
        """Return whether something has to be looked at or kept before a launch; mostly there is nothing."""
        return (
            request.dropout_p > 0
            or launch.has_refusals()
            or first_call.has_listener(self._backend)
            or _is_watched()
        )

    def _forward_of_graphs(self, *arguments: Any) -> tuple[Tensor, ...]:
        """An operator's outputs lie as its fake ones do, and own their memory."""
        out, lse, state = self._launch_forward(Request(*arguments))
        state = out.new_empty(0, dtype=torch.int64) if state is None else state
        return out.contiguous(), lse.contiguous(), state.contiguous()

    def _backward_of_graphs(self, *arguments: Any) -> tuple[Tensor, ...]:
        grad_out, out, lse, state, *fields = arguments
        result = Launched(out, lse, state if state.numel() else None)
        *grads, sink = self._launch_backward(grad_out, result, Request(*fields))
        sink = out.new_empty(0, dtype=torch.float32) if sink is None else sink
        return *(g.contiguous() for g in grads), sink.contiguous()

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


class _Eager(torch.autograd.Function):
    """The launches with autograd around them, without an operator.

    A backward runs in a thread of autograd, where each operator that Python calls costs several times as
    much: views of inputs and gradients are left to autograd's own nodes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        external: External,
        request: Request,
        returns_lse: bool,
        *_: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = external._launch_forward(request)
        ctx.external, ctx.numbers = external, request.numbers
        ctx.save_for_backward(*result, *request[:TENSORS])
        # Zeros would be made for the log-sum-exp, whose gradient nobody takes.
        ctx.set_materialize_grads(False)
        if not returns_lse:
            return result.out
        ctx.mark_non_differentiable(result.lse)
        return result.out, result.lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, state, *saved = ctx.saved_tensors
        request, result = Request(*saved, *ctx.numbers), Launched(out, lse, state)
        query, key, value, sink = in_turn(
            lambda grad: ctx.external._launch_backward(grad, result, request), grad_out
        )
        if sink is None or request.sink is None or not ctx.needs_input_grad[-1]:
            return None, None, None, query, key, value, None
        return None, None, None, query, key, value, sink.to(request.sink.dtype)


def _each(
    grads: tuple[Tensor | None, ...], saved: tuple[Tensor | None, ...], *, wants_sink: bool
) -> tuple[Tensor | None, ...]:
    """Return a gradient, or None, for every field of a request."""
    query, key, value, sink = grads
    found: list[Tensor | None] = [query, key, value, *[None] * (_FIELDS - 3)]
    given = saved[_OUTPUTS + _SINK]
    if wants_sink and given is not None and sink is not None:
        found[_SINK] = sink.to(given.dtype)
    return tuple(found)


def _is_in_graph(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or is_traced(tensor)


def _is_watched() -> bool:
    """Return whether there is a profiler or a dispatch mode."""
    return torch.autograd.profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:TENSORS])
    ctx.numbers = inputs[TENSORS:]


def _gradients(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    wants_sink = ctx.needs_input_grad[_SINK]
    return _each(backward(grad_out, *saved, *ctx.numbers), saved, wants_sink=wants_sink)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    request = Request(*arguments)
    query, *rows, heads, _ = request.query, *request.query.shape
    out = query.new_empty(*rows, heads, request.value.shape[-1])
    shape = (heads, *rows) if request.is_ragged else (rows[0], heads, rows[1])
    state = query.new_empty(2 if request.dropout_p else 0, dtype=torch.int64)
    return out, query.new_empty(shape, dtype=torch.float32), state


def _fake_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    request = Request(*arguments[_GIVEN_BACK:])
    grads = (t.new_empty(t.shape) for t in (request.query, request.key, request.value))
    sink = request.query.new_empty(0 if request.sink is None else request.sink.shape, dtype=torch.float32)
    return *grads, sink  # type: ignore[return-value]
