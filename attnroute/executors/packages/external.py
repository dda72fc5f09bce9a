"""Runs kernels of other packages, eagerly and in compiled graphs, with gradients.

A `Kernel` launches a package's forward and backward. `External` makes the backend's executor from it.
Compiled graphs get two operators, `attnroute::<backend>` and `attnroute::<backend>_backward`. Eager calls use
an autograd function instead, because an operator of Python costs the host several times as much; profilers
and dispatch modes see them under the operators' names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnroute.errors import KernelRefusedError
from attnroute.executors.operators import Side, register
from attnroute.executors.packages import eager
from attnroute.executors.packages.launcher import Kernel, Launcher
from attnroute.executors.packages.request import (
    SCHEMA,
    TENSORS,
    Gradients,
    Launched,
    Like,
    Request,
    in_batch,
    packed,
    packed_lse,
    padded,
    padded_lse,
    request_of,
)
from attnroute.executors.protocol import (
    Bound,
    BoundForward,
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


class External:
    """The executor of one backend: `run`, and `forward` and `backward` for sinks and pairs."""

    def __init__(self, backend: str, kernel: Kernel) -> None:
        """Register the operators of a backend, once per process.

        Args:
            backend: Its name, which the operators have too.
            kernel: How it is launched.
        """
        self._backend = backend
        self._launcher = Launcher(backend, kernel)
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
        return Executor(self.run, Pair(self.forward, self.backward, self.bind_forward), bind=self.bind)

    def run(self, inputs: Inputs, plan: Plan) -> Output:
        """Run one call."""
        if not _is_in_graph(inputs.query):

            def made(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Request:
                given = replace(inputs, query=query, key=key, value=value, sink=sink)
                return self._request_of(given, plan)

            tensors = (inputs.query, inputs.key, inputs.value, inputs.sink)
            return eager.run(self._launcher, made, tensors, plan)
        request = request_of(inputs, plan, in_graph=True)
        out, lse, _ = self._forward(*request)
        # The backward knows no gradient of the log-sum-exp.
        asked = padded_lse(request, lse, inputs.query).detach() if plan.return_lse else None
        return padded(request, out, inputs.query.shape[0]), asked

    def bind(self, inputs: Inputs, plan: Plan) -> Bound | None:
        """Return what runs calls whose requests differ in query, key, value and sink alone."""
        if inputs.alibi_slopes is not None or inputs.dropout_p:
            return None
        with torch.no_grad():
            request = self._request_of(inputs, plan)
        like = Like(request, inputs.query, inputs.key, inputs.value)
        launcher = self._launcher.bound(request)
        del inputs, request

        def run(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            _: Tensor | None,
            sink: Tensor | None = None,
            *,
            whole: bool = False,
        ) -> Any:
            if not like.fits(query, key, value):
                return None
            try:
                made = eager.run(launcher, like.request_of, (query, key, value, sink), plan)
            except KernelRefusedError:
                # Run as any other it is refused again, and another backend takes it.
                return None
            return made if whole else made[0]

        return run

    def bind_forward(self, inputs: Inputs, plan: Plan) -> BoundForward | None:
        """Return what runs the same calls and gives their log-sum-exp too, for sinks that are added to it."""
        run = self.bind(inputs, plan)
        if run is None:
            return None

        def forward(
            query: Tensor, key: Tensor, value: Tensor, _: Tensor | None
        ) -> tuple[Tensor, Tensor] | None:
            made: Any = run(query, key, value, None, whole=True)
            return made if made is None else (made[0], made[1])

        return forward

    def forward(self, inputs: Inputs, plan: Plan) -> ForwardResult:
        """Run the forward alone, recording no gradient."""
        with torch.no_grad():
            if _is_in_graph(inputs.query):
                request = request_of(inputs, plan, in_graph=True)
                out, lse, state = self._forward(*request)
            else:
                request = self._request_of(inputs, plan)
                out, lse, state = self._launcher.forward(request)
        return ForwardResult(
            padded(request, out, inputs.query.shape[0]), padded_lse(request, lse, inputs.query), (state,)
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
            grads = self._launcher.backward(request, launched, grad)
        query, key, value, _sink = in_batch(request, grads, inputs.query.shape[0])
        return query, key, value, None

    def _request_of(self, inputs: Inputs, plan: Plan) -> Request:
        # What an operator returns in a graph lies in the order of its dimensions, and models have theirs so.
        return request_of(inputs, plan, heads_first=self._heads_first, in_place=self._in_place)

    def _forward_of_graphs(self, *arguments: Any) -> tuple[Tensor, ...]:
        """An operator's outputs lie as its fake ones do, and own their memory."""
        out, lse, state = self._launcher.forward(Request(*arguments))
        state = out.new_empty(0, dtype=torch.int64) if state is None else state
        return out.contiguous(), lse.contiguous(), state.contiguous()

    def _backward_of_graphs(self, *arguments: Any) -> tuple[Tensor, ...]:
        grad_out, out, lse, state, *fields = arguments
        result = Launched(out, lse, state if state.numel() else None)
        *grads, sink = self._launcher.backward(Request(*fields), result, grad_out)
        sink = out.new_empty(0, dtype=torch.float32) if sink is None else sink
        return *(g.contiguous() for g in grads), sink.contiguous()


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
