"""What an executor receives: the tensors of one call, and the plan that the decision became."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from attnroute.masks.kept import Keeper
from attnroute.masks.lowered.form import FULL, LoweredMask
from attnroute.vocabulary import Repair

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Output = tuple[Tensor, Tensor | None]


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
        training: Gradients will be asked for.
        return_lse: The caller wants the log-sum-exp.
        device_type: "cpu" or "cuda".
        options: Tile options that table rows state for the kernel, by name.
        deterministic: Only deterministic algorithms may run.
        may_reroute: A kernel that refuses to start may be replaced, as nobody asked for it or for strictness.
    """

    backend: str
    repairs: tuple[Repair, ...]
    training: bool
    return_lse: bool
    device_type: str
    options: tuple[tuple[str, int | bool | str], ...] = ()
    deterministic: bool = False
    may_reroute: bool = False
