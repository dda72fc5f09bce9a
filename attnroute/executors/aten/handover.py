"""The short way of torch's kernels: `scaled_dot_product_attention` itself, where it selects the same one.

That function costs the host less than its operators do from Python, which return what only a backward needs.
What torch selects follows from the arguments and from switches of the process; it is asked once, and the
switches are compared in each call. Where torch selects another kernel, the operator is called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attnroute.executors.aten.operators import is_causal
from attnroute.executors.protocol import Pair
from attnroute.executors.strides import attach, fitted, hooks_of

if TYPE_CHECKING:
    from torch.nn.attention import SDPBackend

    from attnroute.executors.protocol import Bind, Bound, Inputs, Plan

_attention = torch._C._nn.scaled_dot_product_attention  # type: ignore[attr-defined]
_count_function_modes = torch._C._len_torch_function_stack
_SWITCHES: Final[tuple[Callable[[], object], ...]] = tuple(
    getattr(torch._C, name)
    for name in sorted(dir(torch._C))
    if name.startswith("_get_") and name.endswith("_sdp_enabled")
)
"""What `sdpa_kernel` and `torch.backends.cuda` turn on and off; versions of torch have more or fewer."""
_ORDER: Final[Callable[[], object]] = getattr(torch._C, "_get_sdp_priority_order", tuple)
"""What they put in order, from torch 2.6 on."""
_ASKED: Final = 6
_DIMS: Final = (2, 4)
"""Of masks that torch's function takes."""

Launch = Callable[..., Any]
"""Calls an operator with query, key, value and `Inputs.attn`. It returns the output, with ``whole=True`` all
that the operator returns: output and log-sum-exp first. None where what was kept of a mask is gone."""
LaunchOf = Callable[["Inputs", "Plan"], Launch | None]
"""Returns what calls the kernel's operator for calls like one; None where that needs more, or repairs that
torch's function makes itself."""


def short_way(
    choice: SDPBackend,
    launch_of: LaunchOf,
    *,
    as_output: bool = False,
    no_dropout: float | None = None,
) -> Bind:
    """Return the `Bind` of one of torch's fused kernels.

    Args:
        choice: What torch calls the kernel.
        launch_of: How its operator is called.
        as_output: The gradient of an output must have the strides of the output.
        no_dropout: What torch's function is given for no dropout in calls that train; None = nothing.
    """

    def bind(inputs: Inputs, plan: Plan) -> Bound | None:
        run: Bound | None
        run = direct = launch_of(inputs, plan)
        if "to_varlen" not in plan.repairs:
            dropout_p = inputs.dropout_p or (no_dropout if plan.training else None)
            run = _handed_over(choice, inputs, direct, dropout_p) or direct
        if run is None or not plan.training or plan.device_type == "cpu":
            # Kernels of the CPU take gradients in any memory.
            return run
        return _watched(run, as_output=as_output)

    return bind


def pair_of(forward: Any, backward: Any, launch_of: LaunchOf, *, as_output: bool = False) -> Pair:
    """Return the two directions of one of torch's fused kernels, and the short way of its forward.

    Args:
        forward: As in `Pair`.
        backward: The same.
        launch_of: How its operator is called.
        as_output: The gradient of an output must have the strides of the output.
    """

    def bind(inputs: Inputs, plan: Plan) -> Callable[..., tuple[Tensor, Tensor]] | None:
        launch = launch_of(inputs, plan)
        if launch is None or "to_varlen" in plan.repairs:
            return None
        trains = plan.training and plan.device_type != "cpu"
        watch = _watch(as_output=as_output) if trains else None

        def run(
            query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None, *, watched: bool = True
        ) -> tuple[Tensor, Tensor]:
            out, lse, *_ = launch(query, key, value, attn, whole=True)
            if watched and watch is not None:
                watch(out)
            return out, lse

        return run

    return Pair(forward, backward, bind, rereads=True, fit=partial(fitted, as_output=as_output))


def _handed_over(
    choice: SDPBackend,
    inputs: Inputs,
    operator: Bound | None,
    dropout_p: float | None,
) -> Bound | None:
    """Return torch's function, with the operator for calls after a switch was moved; None = only that."""
    attn, mask = inputs.attn, inputs.mask
    if attn is None and not (mask.band_lo is None and mask.band_hi in (None, 0)):
        return None
    if attn is not None and attn.dim() not in _DIMS:
        return None
    # Each argument that torch must read costs the host more than it looks.
    named: dict[str, Any] = {"is_causal": True} if is_causal(inputs) else {}
    if dropout_p is not None:
        named["dropout_p"] = dropout_p
    if inputs.scale is not None:
        named["scale"] = inputs.scale
    if inputs.query.shape[1] != inputs.key.shape[1]:
        named["enable_gqa"] = True
    if torch._fused_sdp_choice(inputs.query, inputs.key, inputs.value, attn, **named) != choice.value:
        return None
    handed_over: Bound = partial(_attention, **named) if named else _attention
    # Each call waits for the switches. They are asked without a loop, which takes twice as long; in the place
    # of those that torch has not stands what always returns one object.
    first, second, third, fourth, fifth, sixth = (*_SWITCHES, *[tuple] * _ASKED)[:_ASKED]
    last = _ORDER if len(_SWITCHES) <= _ASKED else partial(_all_of, (*_SWITCHES[_ASKED:], _ORDER))
    # Read after torch has selected: its first selection in a process puts cuDNN in front.
    one, two, three, four, five, six = first(), second(), third(), fourth(), fifth(), sixth()
    order = last()

    def run(query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None) -> Tensor | None:
        if (
            first() is one
            and second() is two
            and third() is three
            and fourth() is four
            and fifth() is five
            and sixth() is six
            and last() == order
            # A TorchFunctionMode sees torch's function, and one of `route_sdpa()` would route it again.
            and not _count_function_modes()
        ):
            return handed_over(query, key, value, attn)
        return None if operator is None else operator(query, key, value, attn)

    return run


def _all_of(switches: tuple[Callable[[], object], ...]) -> list[object]:
    """Return how switches stand."""
    return [switch() for switch in switches]


def _watched(run: Bound, *, as_output: bool) -> Bound:
    """Have gradients of the output fitted."""
    watch = _watch(as_output=as_output)

    def watched(query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None) -> Tensor | None:
        out = run(query, key, value, attn)
        if out is not None:
            watch(out)
        return out

    return watched


def _watch(*, as_output: bool) -> Callable[[Tensor], None]:
    """Return what has gradients of outputs fitted, which lie alike in all calls."""
    hooks: OrderedDict[int, Any] | None = None

    def watch(out: Tensor) -> None:
        nonlocal hooks
        node = out.grad_fn
        if node is not None:
            hooks = hooks or hooks_of(out, as_output=as_output)
            attach(out, node, hooks)

    return watch
