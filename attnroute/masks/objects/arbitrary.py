"""Masks of any pattern: a dense tensor, a predicate over indices, a BlockMask of torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from attnroute.masks import checks, picture
from attnroute.masks.lowered.form import Extent, LoweredMask, MaskFunction, as_4d, intersect
from attnroute.masks.objects.bands import Causal
from attnroute.masks.objects.base import Mask
from attnroute.masks.objects.captures import captured_tensors
from attnroute.question import fits
from attnroute.question.nodes import FunctionNode, MaskNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A bool tensor, True = attend, that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv).

    Raises:
        ArgumentError: It is no bool tensor.
    """

    _shown: ClassVar[tuple[str, ...]] = ("tensor",)

    tensor: Tensor

    def __post_init__(self) -> None:
        """Check the type; the shape is checked against a call."""
        checks.bools("mask Dense", self.tensor, "pass a float tensor as bias")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor."""
        return (self.tensor,)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the dense node without reading the tensor's values."""
        from attnroute.masks.layout import dense_node

        return (dense_node(self.tensor),)

    def _wish(self) -> picture.Wish:
        shape = (1,) * (4 - self.tensor.dim()) + tuple(self.tensor.shape)
        batch, heads, queries, keys = (0 if size == 1 else size for size in shape)
        return picture.Wish(batch, heads, queries, keys, is_fixed=True)

    def key(self) -> object:
        """Return what the description depends on."""
        from attnroute.masks.layout import tensor_key

        return ("dense", *tensor_key(self.tensor))

    def check(self, extent: Extent) -> None:
        """The tensor must broadcast in one way only."""
        fits.broadcast("mask", tuple(self.tensor.shape), extent, is_mask=True)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add the tensor."""
        return into if extent.is_empty else intersect(into, LoweredMask(dense=as_4d(self.tensor)))


@dataclass(frozen=True, eq=False, repr=False)
class Function(Mask):
    """A predicate over indices, as FlexAttention's mask_mod.

    Args:
        mask_mod: ``(batch, head, query index, key index) -> bool``, written with torch operators over 0-D
            integer tensors. Tensors that it reads may change between calls, and get no gradient; numbers and
            other values that it reads are taken to stay.
        per_batch: False states that it does not read the batch index, which saves work.
        per_head: False states that it does not read the head index.

    Raises:
        ArgumentError: It cannot be called.
    """

    _shown: ClassVar[tuple[str, ...]] = ("mask_mod",)

    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    per_batch: bool = True
    per_head: bool = True

    def __post_init__(self) -> None:
        """It must be callable."""
        checks.function("mask Function", self.mask_mod)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it reads, as far as its code names them."""
        return captured_tensors(self.mask_mod)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the function node."""
        return (FunctionNode(per_batch=self.per_batch, per_head=self.per_head),)

    def _wish(self) -> picture.Wish:
        # Tensors that it reads are mostly indexed by tokens.
        lengths = [tensor.shape[-1] for tensor in self.tensors if tensor.dim()]
        return picture.square(min(lengths, default=picture.CELLS))

    def key(self) -> object:
        """Return what the description depends on."""
        return ("function", self.per_batch, self.per_head)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add the predicate."""
        if extent.is_empty:
            return into
        function = MaskFunction(self.mask_mod, self.per_batch, self.per_head)
        return replace(into, functions=(*into.functions, function))


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """A BlockMask of torch's FlexAttention; `attention()` also takes the BlockMask itself.

    Args:
        block_mask: It allows what its full blocks hold and what its mask_mod allows in its partial blocks.

    Raises:
        ArgumentError: It is no BlockMask.
    """

    _shown: ClassVar[tuple[str, ...]] = ("block_mask",)

    block_mask: BlockMask

    def __post_init__(self) -> None:
        """Check the type; the lengths are checked against a call."""
        checks.blocks(self.block_mask)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the blocks, and those that the mask_mod reads."""
        blocks = tuple(t for t in vars(self.block_mask).values() if checks.is_tensor(t))
        return (*blocks, *captured_tensors(self.block_mask.mask_mod))

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return the function node with the lengths that the blocks were made for."""
        batch, heads = self.block_mask.shape[:2]
        lengths = checks.block_lengths(self.block_mask)
        return (FunctionNode(block_mask_shape=lengths, per_batch=batch > 1, per_head=heads > 1),)

    def _wish(self) -> picture.Wish:
        batch, heads = self.block_mask.shape[:2]
        return picture.Wish(batch, heads, *checks.block_lengths(self.block_mask), is_fixed=True)

    def key(self) -> object:
        """Return what the description depends on."""
        device = self.block_mask.kv_num_blocks.device
        return ("blocks", tuple(self.block_mask.shape), checks.block_lengths(self.block_mask), device)

    def check(self, extent: Extent) -> None:
        """The blocks must have been made for these lengths."""
        checks.block_mask(self.block_mask, extent)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add the blocks."""
        return into if extent.is_empty else replace(into, sparse=(*into.sparse, self.block_mask))

    def __repr__(self) -> str:
        """Name the shape, not the blocks."""
        return f"Blocks(BlockMask {tuple(self.block_mask.shape)})"


def from_torch(mask: object) -> Mask | None:
    """Return the mask object that equals one of torch's own mask objects, None for anything else.

    Args:
        mask: A BlockMask of ``torch.nn.attention.flex_attention`` becomes `Blocks`; a CausalBias of
            ``torch.nn.attention.bias`` becomes `Causal` of the same corner. The lengths that a CausalBias was
            made for are left to the caller to compare.
    """
    # What is an instance of a class of a module comes from that module being loaded.
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(mask, flex.BlockMask):
        return Blocks(mask)
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is not None and isinstance(mask, bias.CausalBias):
        lower_right = mask.variant == bias.CausalVariant.LOWER_RIGHT
        return Causal("bottom_right" if lower_right else "top_left")
    return None
