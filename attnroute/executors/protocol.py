"""What a backend's module must offer: an `Executor` that computes attention for `Inputs` as a `Plan` says.

The module that a backend's table names has it under the name `executor`. Everything that a plug-in's module
needs from attnroute is in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from attnroute.masks.kept import Keeper
from attnroute.masks.lowered.form import FULL, LoweredMask
from attnroute.vocabulary import Repair

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Output = tuple[Tensor, Tensor | None]
"""(batch, num_heads_q, seqlen_q, head_dim_v), and the log-sum-exp: (batch, num_heads_q, seqlen_q), natural,
-inf in rows with no key; None where the plan does not request it."""
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of query, key, value and the dense tensor `Inputs.attn`."""
Wanted = tuple[bool, bool, bool, bool]
"""Which of `Grads` to compute."""


@dataclass(slots=True)
class Inputs:
    """One call's tensors, in layout bhsd.

    Attributes:
        query: (batch, num_heads_q, seqlen_q, head_dim_qk).
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk).
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
        mask: Who may attend.
        keeper: Keeps what is prepared from the mask for as long as it lives; None = keep nothing.
        bias: Float tensor added to the scores.
        attn: The mask and bias in the form an operator takes, made by the repairs.
        scale: Factor on QK^T; None = head_dim_qk ** -0.5 of the unpadded head.
        softcap: 0.0 = off.
        sink: (num_heads_q,) or None.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q) or None.
        dropout_p: Probability of dropping an attention weight.
        score_mod: ``(score, batch, head, query index, key index) -> score``, applied after the softcap.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: LoweredMask = FULL
    keeper: Keeper | None = None
    bias: Tensor | None = None
    attn: Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    score_mod: ScoreMod | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How one class of calls is run: fixed when the decision is made, looked up afterwards.

    Attributes:
        backend: The executor's name.
        repairs: Preparations in the order in which the engine made them.
        training: Gradients will be computed.
        return_lse: The caller wants the log-sum-exp.
        device_type: "cpu" or "cuda".
        options: Tile options that table rows state for the kernel, by name.
        deterministic: Only deterministic algorithms may run.
        may_reroute: A kernel that refuses to start may be replaced: neither is it required nor is strict on.
    """

    backend: str
    repairs: tuple[Repair, ...]
    training: bool
    return_lse: bool
    device_type: str
    options: tuple[tuple[str, int | bool | str], ...] = ()
    deterministic: bool = False
    may_reroute: bool = False


class ForwardResult(NamedTuple):
    """What a kernel's forward alone gives.

    Attributes:
        out: (batch, num_heads_q, seqlen_q, head_dim_v), new memory.
        lse: (batch, num_heads_q, seqlen_q), natural log, -inf for rows with no key.
        rest: What else the kernel's backward takes, in an order of its own.
    """

    out: Tensor
    lse: Tensor
    rest: tuple[Any, ...] = ()


Run = Callable[[Inputs, Plan], Output]
Bound = Callable[..., Tensor | None]
"""Runs a call that was bound: from query, key, value, `Inputs.attn` and, in calls with a sink, that to the
output. None where something outside of the arguments has changed since, so that the call must be run as any
other."""
Bind = Callable[[Inputs, Plan], Bound | None]
BoundForward = Callable[..., tuple[Tensor, Tensor] | None]
"""As `Bound`, to the output and the log-sum-exp as the kernel gives it, (batch, num_heads_q, at least
seqlen_q), perhaps with a last dimension of size 1. It may be anything in rows with no key."""
FitTo = Callable[[Tensor, Tensor], Tensor]
"""Returns a gradient in memory that the backward of an output can read."""
BindForward = Callable[[Inputs, Plan], BoundForward | None]


@dataclass(frozen=True, slots=True)
class Pair:
    """A kernel's two directions, for preparations that work on the log-sum-exp between them.

    Attributes:
        forward: Runs the kernel, recording no gradient.
        backward: Returns the gradients for `out` and `lse` of a `ForwardResult`, which
            need not be those that this forward gave; here lse is +inf in rows with no key.
        bind: As `Executor.bind`, for calls whose output and log-sum-exp are needed.
        rereads: Where such a call trains, autograd's backward reads both where they lie, so that what is
            written there counts. What `bind` returns then takes ``watched=False`` from who fits gradients.
        fit: Makes a gradient one that such a backward takes; None = it takes any.
    """

    forward: Callable[[Inputs, Plan], ForwardResult]
    backward: Callable[[Inputs, Plan, ForwardResult, Tensor, Wanted], Grads]
    bind: BindForward | None = None
    rereads: bool = False
    fit: FitTo | None = None


@dataclass(frozen=True, slots=True)
class Executor:
    """How a backend runs.

    Attributes:
        run: Computes one call, whose tensors are prepared as the plan says. Gradients are autograd's.
        pair: Where rows of the backend's tables name the repairs `sink_from_lse` or `backward_from_chunked`.
        compiled_seconds: For a backend that compiles per structure: how many seconds that of a call took in
            this process, None where it was not compiled yet.
        bind: For a kernel that has a shorter way for calls that differ from these inputs in the values of
            tensors alone: returns that, or None where there is none for this call.
        spared: Repairs that what `bind` returns makes itself, on query, key, value and a bias as given.
    """

    run: Run
    pair: Pair | None = None
    compiled_seconds: Callable[[Inputs, Plan], float | None] | None = None
    bind: Bind | None = None
    spared: frozenset[Repair] = frozenset()
