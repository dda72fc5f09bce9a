"""The parts of a mask, and the biases, as plain data: what `Call.mask` and `Call.bias` hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from attnroute.question.fits import depth, depth_of
from attnroute.question.plain import Record
from attnroute.vocabulary import Alignment, Dtype, EmptyRows

Count = Annotated[int, Field(ge=0)]


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

    `lengths` are the same documents for every batch row; None when only the device knows them. `count` is
    then how many there are, None when that is not known either.
    `contiguous` is false where it is not known that a document's tokens lie side by side (ids per token).
    `cross` is true for a ragged batch whose queries and keys have lengths of their own: causal and window
    nodes beside it then have a diagonal in each document.
    """

    kind: Literal["documents"] = "documents"
    lengths: tuple[Count, ...] | None = None
    count: Count | None = None
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


def nested(nodes: Iterable[MaskNode]) -> Iterator[MaskNode]:
    """Yield the nodes, and those that disjunctions and negations among them hold."""
    for node in nodes:
        yield node
        if isinstance(node, AnyNode):
            for part in node.parts:
                yield from nested(part)
        elif isinstance(node, NotNode):
            yield from nested(node.part)
