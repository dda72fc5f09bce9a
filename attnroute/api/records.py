"""The records that one call becomes: what the user passed, what to compute, the key of its route."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from attnroute.biases import Bias
from attnroute.masks import All, Causal, Dense, Mask, Window
from attnroute.masks.lowered.form import Extent

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from attnroute.executors.protocol import ScoreMod
    from attnroute.vocabulary import Alignment, Distributed

Output = tuple[Tensor, Tensor | None]
"""What a call returns, and its log-sum-exp where that was requested."""


class Given(NamedTuple):
    """The arguments of one `attention()` call under their names, in their order, with their defaults.

    A NamedTuple, because dynamo can follow the making of one into a graph.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | Mask | BlockMask | None = None
    bias: Tensor | Bias | None = None
    is_causal: bool = False
    causal_alignment: str | None = None
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0
    layout: str = "bhsd"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    deterministic: bool | None = None
    return_lse: bool = False
    backend: str | None = None
    prefer: str | Iterable[str] | None = None


class Options(TypedDict, total=False):
    """The keyword arguments but `return_lse`, by which type checkers tell the two results apart."""

    bias: Tensor | Bias | None
    is_causal: bool
    causal_alignment: str | None
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float
    sink: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    layout: str
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    deterministic: bool | None
    backend: str | None
    prefer: str | Iterable[str] | None
    attn_mask: Tensor | None
    enable_gqa: bool | None


@dataclass(slots=True)
class Problem:
    """What is to be computed, in layout bhsd, and what surrounds the call; `intake.take` makes it.

    Attributes:
        given: The arguments, with bias objects and torch's own mask objects replaced by what they mean. An
            argument without a field here is read from it.
        query: (batch, num_heads_q, seqlen_q, head_dim_qk); a packed batch is one batch row.
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk).
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
        mask: Who may attend, causal and window aside: a bool tensor or a mask object.
        is_causal: Causal as well; in a packed batch the mask says it.
        window: Window as well; in a packed batch the mask says it.
        bias: The one float tensor that is added to the scores.
        score_mod: The function of a bias object.
        captured: The tensors that the function reads.
        scale: Factor on QK^T; None = head_dim_qk ** -0.5.
        traced: The tensors are a tracer's: torch.compile, torch.export; or they lie on the device "meta".
        deterministic: Only deterministic algorithms may run.
        training: Gradients will be computed.
        transform: The functorch transform around the call.
        dispatch_mode: A TorchDispatchMode is active.
        no_values: The values had no features before some were added, and the output has none.
        distributed: Its place among the calls of several ranks.
    """

    given: Given
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | Mask | None
    is_causal: bool
    window: tuple[int | None, int | None] | None
    bias: Tensor | None
    score_mod: ScoreMod | None
    captured: tuple[Tensor, ...]
    scale: float | None
    traced: bool
    deterministic: bool = False
    training: bool = False
    transform: str | None = None
    dispatch_mode: bool = False
    no_values: bool = False
    distributed: Distributed | None = None

    @property
    def extent(self) -> Extent:
        """Batch, query heads, lengths and device."""
        batch, heads, seqlen_q, _ = self.query.shape
        return Extent(batch, heads, seqlen_q, self.key.shape[2], self.query.device)

    @property
    def device(self) -> tuple[str, int | None]:
        """Type and index of the device whose kernels are considered: those of the CPU for "meta"."""
        device = self.query.device
        return ("cpu", None) if device.type == "meta" else (device.type, device.index)

    @property
    def whole_mask(self) -> Mask | None:
        """Everything that masks as one object: mask, causal and window apply together."""
        if isinstance(self.mask, Mask) and not self.is_causal and self.window is None:
            return self.mask
        nodes: list[Mask] = []
        if isinstance(self.mask, Mask):
            nodes.extend(self.mask.nodes)
        elif isinstance(self.mask, Tensor):
            nodes.append(Dense(self.mask))
        alignment = cast("Alignment", self.given.causal_alignment or "top_left")
        if self.is_causal:
            nodes.append(Causal(alignment))
        if self.window is not None:
            nodes.append(Window(*self.window, alignment))
        if len(nodes) > 1:
            return All(tuple(nodes))
        return nodes[0] if nodes else None

    def in_given_layout(self, out: Tensor, lse: Tensor | None) -> Output:
        """Return a result in bhsd as the user's layout and arguments have it."""
        if self.no_values:
            out = out[..., :0]
        if not self.given.return_lse:
            lse = None
        elif lse is not None:
            lse = lse.float()
        if self.given.layout == "bhsd":
            return out, lse
        if self.given.layout == "bshd":
            return out.transpose(1, 2), lse
        return out.squeeze(0).transpose(0, 1), None if lse is None else lse.squeeze(0)


class RouteKey(NamedTuple):
    """Everything that a decision may depend on, hashable: calls with equal keys share a route.

    Attributes:
        shapes: Of query, key and value, in bhsd.
        memory: Their strides, and which of the last four bits of their addresses are set; None where a tensor
            has no memory of its own.
        dtypes: Of query, key and value.
        devices: The same.
        training: Gradients will be computed.
        trains_inputs: Query, key or value get one.
        transform: The functorch transform around the call.
        dispatch_mode: A TorchDispatchMode is active.
        distributed: Its place among the calls of several ranks.
        mask: What the mask says of itself: kinds and sizes, no values.
        bias: Dtype, shape, strides, alignment and gradient of the bias.
        sink: The same.
        alibi_slopes: The same.
        trains_function: Whether a tensor that the score function reads gets a gradient; None without one.
        scale: Type, sign and size.
        deterministic: Only deterministic algorithms may run.
        arguments: Every other argument as it was passed.
        types: Of these: numbers of two types may be equal.
        policy: `Policy.key`.
        is_lasting: The shape came back so often that a plan for it is worth its time, though shapes vary.
    """

    shapes: tuple[torch.Size, ...]
    memory: tuple[object, ...] | None
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    training: bool
    trains_inputs: bool
    transform: str | None
    dispatch_mode: bool
    distributed: Distributed | None
    mask: object
    bias: object
    sink: object
    alibi_slopes: object
    trains_function: bool | None
    scale: object
    deterministic: bool
    arguments: tuple[object, ...]
    types: tuple[type, ...]
    policy: object
    is_lasting: bool = False
