"""The question as plain data: what one attention call is, without any tensor.

Everything that a rule may ask about a call is in `Call` or computed from it by `attnroute.question.facts`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from attnroute.question.fits import call_softcap, depth, depth_of, heads, probability
from attnroute.question.plain import Plain, Record, raise_sentence
from attnroute.vocabulary import (
    Alignment,
    Distributed,
    Dtype,
    EmptyRows,
    Layout,
    Phase,
    ScaleSign,
    Transform,
)

Count = Annotated[int, Field(ge=0)]
Dynamic = Literal["batch", "seqlen_q", "seqlen_kv"]


class CausalNode(Record):
    """Query i may attend key j only if j <= i (top_left) or j <= i + seqlen_kv - seqlen_q (bottom_right)."""

    kind: Literal["causal"] = "causal"
    alignment: Alignment = "top_left"


class WindowNode(Record):
    """Keys from `left` before to `right` after the diagonal, both inclusive; None leaves that side open."""

    kind: Literal["window"] = "window"
    left: Count | None = None
    right: Count | None = None
    alignment: Alignment = "top_left"


class DocumentsNode(Record):
    """Packed documents: a query attends only keys of its own document.

    `lengths` are the same documents for every batch row; None when only the device knows them.
    `contiguous` is false when nobody said that a document's tokens lie side by side (ids per token).
    `cross` is true for a ragged batch whose queries and keys have lengths of their own: causal and window
    nodes beside it then have a diagonal in each document.
    """

    kind: Literal["documents"] = "documents"
    lengths: tuple[Count, ...] | None = None
    contiguous: bool = True
    cross: bool = False


class KeyPaddingNode(Record):
    """Per batch row, only some keys exist.

    `lengths` counts them when the padding is on the right (or on the left, with `side`); None when only
    the device knows. `finite` says that the keys and values left out hold no NaN and no infinity.
    """

    kind: Literal["key_padding"] = "key_padding"
    lengths: tuple[Count, ...] | None = None
    side: Literal["right", "left", "any"] = "right"
    finite: bool = False


class PrefixNode(Record):
    """Causal, except that the first `lengths[b]` keys of a row are visible to every query."""

    kind: Literal["prefix"] = "prefix"
    lengths: tuple[Count, ...] | None = None
    alignment: Alignment = "top_left"


RecognizedNode = Annotated[
    CausalNode | WindowNode | DocumentsNode | KeyPaddingNode | PrefixNode, Field(discriminator="kind")
]


class DenseNode(Record):
    """A bool tensor, True = attend.

    Attributes:
        shape: As given; broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv).
        aligned: Row, head and batch strides are multiples of 8 elements.
        empty_rows: Whether some query may attend no key, if somebody looked.
        recognized: The nodes that say the same as this tensor, if somebody looked and found them.
    """

    kind: Literal["dense"] = "dense"
    dtype: Literal["bool"] = "bool"
    shape: tuple[Count, ...]
    requires_grad: bool = False
    last_dim_contiguous: bool = True
    aligned: bool = True
    empty_rows: EmptyRows = "unknown"
    recognized: tuple[RecognizedNode, ...] | None = None


class FunctionNode(Record):
    """A predicate over (batch, head, query index, key index), e.g. FlexAttention's mask_mod."""

    kind: Literal["function"] = "function"
    block_mask_shape: tuple[Count, ...] | None = None
    per_batch: bool = True
    per_head: bool = True


class AnyNode(Record):
    """A disjunction: some part must allow; each part is a conjunction."""

    kind: Literal["any"] = "any"
    parts: tuple[tuple[MaskNode, ...], ...]

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        depth(depth_of(self))
        return self


class NotNode(Record):
    """A negation: the conjunction `part` must not allow."""

    kind: Literal["not"] = "not"
    part: tuple[MaskNode, ...]

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        depth(depth_of(self))
        return self


MaskNode = Annotated[
    CausalNode
    | WindowNode
    | DocumentsNode
    | KeyPaddingNode
    | PrefixNode
    | DenseNode
    | FunctionNode
    | AnyNode
    | NotNode,
    Field(discriminator="kind"),
]
AnyNode.model_rebuild()
NotNode.model_rebuild()


class DenseBias(Record):
    """A float tensor added to the scaled scores; broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv)."""

    kind: Literal["dense"] = "dense"
    dtype: Dtype
    shape: tuple[Count, ...]
    requires_grad: bool = False
    last_dim_contiguous: bool = True
    aligned: bool = True
    empty_rows: EmptyRows = "unknown"


class AlibiBias(Record):
    """One slope per head times minus the distance between query and key.

    `per_batch`: each batch row has slopes of its own.
    """

    kind: Literal["alibi"] = "alibi"
    requires_grad: bool = False
    per_batch: bool = False


class FunctionBias(Record):
    """A score_mod: any change of a score from its value and position.

    `requires_grad`: it reads a tensor that requires grad.
    """

    kind: Literal["function"] = "function"
    requires_grad: bool = False


Bias = Annotated[DenseBias | AlibiBias | FunctionBias, Field(discriminator="kind")]


class Strides(Record):
    """How query, key and value lie in memory, as far as a kernel cares.

    `tokens_contiguous`: they are contiguous as (batch, seqlen, num_heads, head_dim), or thd's (total,
    num_heads, head_dim). Without a mask it says nothing and stays true.
    """

    last_dim_contiguous: bool = True
    packed: bool = True
    tokens_contiguous: bool = True
    aligned_16: bool = True
    kv_heads_expanded: bool = False


class Context(Record):
    """What surrounds the call: compilation, capture, transforms, distribution.

    `dispatch_mode`: a TorchDispatchMode is active, which sees every operator and keeps torch.compile from
    compiling.
    """

    compiled: bool = False
    cuda_graph: bool = False
    dispatch_mode: bool = False
    dynamic: tuple[Dynamic, ...] = ()
    transform: Transform | None = None
    distributed: Distributed | None = None


class Call(Plain):
    """One attention call.

    Lengths and head counts are Python ints. `mask` is a conjunction. `scale` is only the sign of the
    factor on QK^T: kernels care about nothing else. `qkv_requires_grad` tells a call that trains only
    its bias from one that trains its inputs; None means nobody said.
    """

    dtype: Dtype
    batch: Count
    num_heads_q: Count
    num_heads_kv: Count
    seqlen_q: Count
    seqlen_kv: Count
    head_dim_qk: Annotated[int, Field(ge=1)]
    head_dim_v: Annotated[int, Field(ge=1)]
    layout: Layout = "bhsd"
    phase: Phase = "inference"
    mask: tuple[MaskNode, ...] = ()
    bias: Bias | None = None
    scale: ScaleSign = "positive"
    softcap: Annotated[float, AfterValidator(call_softcap)] = 0.0
    sink: bool = False
    dropout_p: Annotated[float, AfterValidator(probability)] = 0.0
    deterministic: bool = False
    return_lse: bool = False
    qkv_requires_grad: bool | None = None
    strides: Strides = Strides()
    context: Context = Context()

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        # No head at all is refused where the call is asked about, as `attention()` refuses it.
        if self.num_heads_kv or self.num_heads_q:
            heads(self.num_heads_q, self.num_heads_kv)
        return self

    def with_(self, **changes: Any) -> Call:
        """Return a validated copy with the given fields replaced.

        Raises:
            ArgumentError: A field is unknown or wrong.
        """
        try:
            return Call.model_validate({**self.__dict__, **changes})
        except ValidationError as error:
            raise_sentence(Call, error)
