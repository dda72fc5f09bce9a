"""Sees calls of torch's own scaled_dot_product_attention for traces, and says which kernel torch selects.

A TorchFunctionMode sees them, below every other mode of its thread: what comes so far runs as torch's own.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode

from attnroute import settings
from attnroute.api import multi_head, recorder, sdpa
from attnroute.api.faster import Asked
from attnroute.api.intake import take
from attnroute.api.question import call_of
from attnroute.api.recorder import Seen, traced_call
from attnroute.api.recording import How, TracedCall
from attnroute.api.sdpa_block import PLAIN, UNFLATTEN, with_calls_inside
from attnroute.errors import AttnRouteError, shortened
from attnroute.masks.tracing import innermost_transform, is_capturing, is_traced, size_hint
from attnroute.probes.torch_host import host_of
from attnroute.tables.load import load

_KERNELS: Final = ("flash", "efficient", "cudnn", "overrideable")
"""What stands in the names of torch's operators; math has none of its own."""
_NUMBERS: Final = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
"""The backends of `torch.nn.attention.SDPBackend`."""
_count_function_modes = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_frames: Any = torch._C._dynamo.eval_frame


class _Arguments(NamedTuple):
    """Those of torch's function, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class _Operators(TorchDispatchMode):
    """Sees which of torch's kernels a call becomes."""

    backend = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "attention" in name:
            self.backend = next((found for found in _KERNELS if found in name), self.backend)
        return func(*args, **(kwargs or {}))


class _Mode(TorchFunctionMode):
    """Sees each function of torch that is called on the thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if CausalBias in types:
            # It says itself what a function means for it.
            return func(*args, **named)
        if torch.compiler.is_compiling():
            if func is UNFLATTEN:
                # As inside of `route_sdpa()`.
                return args[0].unflatten(*args[1:], **named)
            return _in_graph(*args, **named) if func is sdpa.stock else func(*args, **named)
        if func is sdpa.stock:
            # Nor may it compile what records the call.
            compiling = _frames.set_eval_frame(None)
            try:
                return _run(*args, **named)
            finally:
                _frames.set_eval_frame(compiling)
        if func in _INSIDE and PLAIN.issuperset(types):
            func = _INSIDE[func]
        return func(*args, **named)


def _keep_from_dynamo(code: CodeType) -> None:
    """Have dynamo compile a function with its callers alone, as `torch._dynamo.eval_frame.skip_code` does.

    Where it compiles no caller, as those of torch.nn, it would compile this one, for each function of torch.
    """
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(code)
        return
    actions = _frames._FrameAction
    _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))


_keep_from_dynamo(_Mode.__torch_function__.__code__)
_MODE: Final = _Mode()
"""One for all traces: graphs of torch.compile are made for a mode, and fit each trace so."""
_INSIDE: Final[dict[Any, Any]] = {
    function: with_calls_inside(function, _MODE)
    for function in (multi_head.stock, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
"""Functions in which torch's own may be called, while the mode that sees them is off."""


def see() -> None:
    """See the calls of this thread, below every other mode."""
    above = _lifted()
    _push_mode(_MODE)
    _put_back(above)


def unsee() -> bool:
    """Undo `see` once; return False in a thread that did not see."""
    modes = _lifted()
    found = [at for at, mode in enumerate(modes) if mode is _MODE]
    if found:
        del modes[found[-1]]
    _put_back(modes)
    return bool(found)


def _lifted() -> list[Any]:
    """Take all modes of this thread off, the innermost first."""
    return [_pop_mode() for _ in range(_count_function_modes())]


def _put_back(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def _is_seen_below() -> bool:
    return any(_function_mode_at(at) is _MODE for at in range(_count_function_modes()))


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(*args: Any, **named: Any) -> Tensor:
    return _run(*args, **named)


def _run(*args: Any, **named: Any) -> Tensor:
    """Run a call as torch does, and tell every trace of it."""
    try:
        call = _Arguments(*args, **named)
        traced = is_traced(call.query)
    except (AttributeError, TypeError):
        # torch says what is wrong.
        return sdpa.stock(*args, **named)
    if not recorder.ACTIVE or _is_seen_below():
        return sdpa.stock(*args, **named)
    if traced:
        with _Operators() as operators:  # type: ignore[no-untyped-call]
            out = sdpa.stock(*args, **named)
        return recorder.record(_seen(call, "compiled", operators.backend), lambda: (out, None))[0]
    how: How = "captured" if is_capturing(call.query) else "eager"
    return recorder.record(_seen(call, how, _selected(call)), lambda: (sdpa.stock(*args, **named), None))[0]


def _selected(call: _Arguments) -> str:
    """Return the kernel that torch selects."""
    try:
        choice = torch._fused_sdp_choice(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
    except (RuntimeError, TypeError):
        return "unknown"
    return _NUMBERS.get(choice, "unknown")


def _seen(call: _Arguments, how: How, backend: str) -> Seen:
    mask, tensors = call.attn_mask, [t for t in call[:4] if t is not None]
    is_plain = innermost_transform() is None and not _count_dispatch_modes()
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    key = (
        "torch",
        how,
        backend,
        trains,
        *(_form(t) for t in tensors),
        None if mask is None else mask.dim(),
        call[4:],
    )
    return Seen(
        key=key,
        is_stock=True,
        how=how,
        query=call.query,
        inputs=tuple(tensors) if is_plain else None,
        label=f"attention: {backend} of torch" if is_plain else "",
        describe=lambda: _described(call, how, backend),
    )


def _form(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells kinds of tensors apart; the sizes of nested ones are not asked for."""
    if tensor.is_nested:
        return (tensor.device, tensor.dtype)
    sizes = (*map(size_hint, tensor.shape), *map(size_hint, tensor.stride()))
    return (tensor.device, tensor.dtype, sizes)


def _described(call: _Arguments, how: How, backend: str) -> tuple[TracedCall, Asked | None]:
    """Say what a call is; one that `attention()` does not take has no line."""
    try:
        unread = sdpa.left_to_torch(*call)
        given = sdpa.given_of(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        if given is not None:
            problem, policy = take(given), settings.current()
            recognize = policy.recognize and problem.transform is None and not problem.traced
            question = call_of(problem, recognize=recognize)
            host = host_of(*problem.device, load(policy.tables).providers)
            return traced_call(problem, question, backend, how), Asked(question, host, policy)
    except (AttnRouteError, RuntimeError) as error:
        # A trace ends no program.
        unread = shortened(str(error))
    clock: Literal["device", "host"] = "device" if call.query.is_cuda else "host"
    device = str(call.query.device)
    return TracedCall(line="", device=device, backend=backend, how=how, clock=clock, unread=unread), None
