"""The mask and the scores of a call in FlexAttention's language: lists of blocks, and two expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnroute.masks.lowered.blocks import BLOCK, Guess, guess
from attnroute.masks.lowered.form import Extent, as_4d
from attnroute.masks.lowered.mods import EVERYBODY, Names, entry, expression
from attnroute.masks.tracing import is_tracing
from attnroute.memory import cached

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from attnroute.executors.protocol import Inputs
    from attnroute.masks.lowered.form import LoweredMask

BANDS_KEPT: Final = 64
"""BlockMasks of causal and window masks that are kept; each holds a few bytes per 128 x 128 pairs."""
LEAST_ROOM: Final = (8, 4096)
"""On the CPU: smallest sizes, but for 1, of what an expression reads: leading dimensions and the last one."""


class Part(NamedTuple):
    """One expression over indices, with the tensors and functions that it names.

    Attributes:
        text: The expression; None where nothing is to be done.
        tensors: The tensors that it names.
        functions: The functions that it names.
    """

    text: str | None = None
    tensors: tuple[Tensor, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()

    @property
    def structure(self) -> Hashable:
        """What the code of a part depends on: parts that are equal in it share compiled code."""
        kinds = tuple((t.dim(), t.dtype) for t in self.tensors)
        return self.text, kinds, tuple(_specialization_key(f) for f in self.functions)


class Blocked(NamedTuple):
    """A mask: its expression, and which blocks are not empty.

    Attributes:
        part: The expression.
        blocks: The eight tensors of a BlockMask, the last six None where it has none.
        size: Queries and keys of a block.
    """

    part: Part = Part()
    blocks: tuple[Tensor | None, ...] = ()
    size: tuple[int, int] = BLOCK


class Settings(NamedTuple):
    """What is fixed in the code of a structure beside the expressions.

    Attributes:
        scale: Factor on QK^T; None = head_dim_qk ** -0.5.
        enable_gqa: Query heads share key heads.
        return_lse: The log-sum-exp is wanted.
        size: Queries and keys of a block.
        options: Options of the kernel.
    """

    scale: float | None
    enable_gqa: bool
    return_lse: bool
    size: tuple[int, int]
    options: tuple[tuple[str, Any], ...]

    @property
    def backend(self) -> str:
        """The backend whose kernels the options select."""
        return "flex_fa4" if ("BACKEND", "FLASH") in self.options else "flex"


_NO_MASK: Final = Blocked()


def blocked(inputs: Inputs, size: tuple[int, int] | None = None, *, cute: bool = False) -> Blocked:
    """Return the mask of a call, its blocks listed once per mask object and lengths.

    Args:
        inputs: The call.
        size: Queries and keys that a block has, or a whole number of times; None = `BLOCK`.
        cute: The expression becomes code of CuTe DSL.
    """
    mask = inputs.mask
    if mask.is_full:
        return _NO_MASK
    given = mask.sparse[0] if len(mask.sparse) == 1 and mask == type(mask)(sparse=mask.sparse) else None
    if (
        given is not None
        and _fits(given, size or BLOCK)
        and _ends_with_tokens(given, inputs)
        and _lists_alike(given)
    ):
        # Beside a function that lets everything pass, torch ignores the lists where CuTe DSL runs
        # (pytorch#188322), and it sees none in a conjunction.
        text = f"mf0(b, h, i, j) & ({EVERYBODY})" if cute else "mf0(b, h, i, j)"
        part = Part(text, (), (given.mask_mod,))
        lists = _tensors(given)
        return Blocked(part, _with_full(lists) if cute else lists, tuple(given.BLOCK_SIZE))
    query, key = inputs.query, inputs.key
    extent = Extent(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    size = size or BLOCK
    if mask.is_band_only and not is_tracing():
        return _of_band(mask, extent, size, cute)
    keeper, band = inputs.keeper, (mask.band_lo, mask.band_hi)
    # The expression names the mask's own tensors, which must not be referenced by what is kept with them.
    blocks = (
        _listed_blocks(mask, extent, size)
        if keeper is None
        else keeper.keep(("blocks", extent, band, size), lambda: _listed_blocks(mask, extent, size))
    )
    return Blocked(_expressed(mask, extent, cute), blocks, size)


def _fits(block_mask: BlockMask, size: tuple[int, int]) -> bool:
    return all(n % least == 0 for n, least in zip(block_mask.BLOCK_SIZE, size, strict=True))


def _ends_with_tokens(block_mask: BlockMask, inputs: Inputs) -> bool:
    """Return whether the last blocks reach no further than the tokens, as far as the kernels rely on it.

    Before torch 2.14 they look for the end of the tokens only where a length is no multiple of 128, and so
    read beyond it in a larger block that ends later.
    """
    lengths = (inputs.query.shape[2], inputs.key.shape[2])
    return not any(
        n % step and step < n and n % least == 0
        for n, step, least in zip(lengths, block_mask.BLOCK_SIZE, BLOCK, strict=True)
    )


def _lists_alike(block_mask: BlockMask) -> bool:
    """Return whether partial and full blocks lie in memory alike: before torch 2.12 kernels take them to."""
    lists = _tensors(block_mask)
    pairs = zip((*lists[:2], *lists[4:6]), (*lists[2:4], *lists[6:]), strict=True)
    return all(one is None or other is None or one.stride() == other.stride() for one, other in pairs)


@cached(BANDS_KEPT)
def _of_band(mask: LoweredMask, extent: Extent, size: tuple[int, int], cute: bool) -> Blocked:
    with torch.inference_mode(mode=False), torch.no_grad():
        return Blocked(_expressed(mask, extent, cute), _listed_blocks(mask, extent, size), size)


def _expressed(mask: LoweredMask, extent: Extent, cute: bool) -> Part:
    # At the bottom right the limits of a band change with every length.
    constants = extent.seqlen_q == extent.seqlen_kv
    names = Names("m", constants=constants, cute_heads=extent.num_heads_q if cute else 0)
    return _part(expression(mask, names, extent.device), names)


def _listed_blocks(mask: LoweredMask, extent: Extent, size: tuple[int, int]) -> tuple[Tensor | None, ...]:
    return _tensors(_block_mask(guess(mask, extent, size), extent, size))


def _block_mask(blocks: Guess, extent: Extent, size: tuple[int, int]) -> BlockMask:
    grid = tuple(-(-n // step) for n, step in zip((extent.seqlen_q, extent.seqlen_kv), size, strict=True))
    leading = torch.broadcast_shapes(blocks.some.shape, blocks.every.shape)[:2]
    some, every = (t.expand(*leading, *grid) for t in blocks)
    return BlockMask.from_kv_blocks(*_listed(some & ~every), *_listed(every), BLOCK_SIZE=size)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row are set, and their columns, set ones first."""
    columns = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), columns.to(torch.int32).contiguous()


def _with_full(lists: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Add empty lists of whole blocks, which torch's code for CuTe DSL requires."""
    count, places, full, _, count_q, places_q, *_ = lists
    if full is not None:
        return lists
    empty, empty_q = (
        (None if t is None else torch.zeros_like(t) for t in pair)
        for pair in ((count, places), (count_q, places_q))
    )
    return count, places, *empty, count_q, places_q, *empty_q


def _tensors(block_mask: BlockMask) -> tuple[Tensor | None, ...]:
    return (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        block_mask.q_num_blocks,
        block_mask.q_indices,
        block_mask.full_q_num_blocks,
        block_mask.full_q_indices,
    )


def scored(inputs: Inputs, *, cute: bool = False) -> Part:
    """Return what changes the scores after the scale: softcap, then bias, ALiBi or a function.

    Args:
        inputs: The call.
        cute: The expression becomes code of CuTe DSL.
    """
    names, text = Names("s", cute_heads=inputs.query.shape[1] if cute else 0), "s"
    if inputs.softcap:
        text = f"{inputs.softcap} * torch.tanh({text} / {inputs.softcap})"
    if inputs.score_mod is not None:
        text = f"{names.function(inputs.score_mod)}({text}, b, h, i, j)"
    elif inputs.alibi_slopes is not None:
        text = f"{text} - {_alibi(inputs, inputs.alibi_slopes, names)}"
    elif inputs.bias is not None:
        text = f"{text} + {_bias(inputs.bias, names)}"
    return Part() if text == "s" else _part(text, names)


def _part(text: str, names: Names) -> Part:
    tensors = (t if t.device.type != "cpu" else _padded(t) for t in names.tensors)
    return Part(text, tuple(tensors), tuple(names.functions))


def _padded(tensor: Tensor) -> Tensor:
    """Fill up to sizes that rarely change, and keep dynamo from letting them vary.

    inductor's C++ template writes its block lengths over the names of varying sizes that begin alike (torch
    2.13, CppFlexAttentionTemplate.modification): the code does not compile, or reads elsewhere.
    """
    if not tensor.dim():
        return tensor
    least = (LEAST_ROOM[0],) * (tensor.dim() - 1) + LEAST_ROOM[1:]
    missing = [_room(n, start) - n for n, start in zip(tensor.shape, least, strict=True)]
    filled = pad(tensor, [n for more in reversed(missing) for n in (0, more)])
    torch._dynamo.mark_static(filled)
    return filled


def _room(size: int, least: int) -> int:
    """Return 1, or the first of `least`, four times that and so on that is not smaller than the size."""
    if size == 1:
        return 1
    while least < size:
        least *= 4
    return least


def _alibi(inputs: Inputs, slopes: Tensor, names: Names) -> str:
    diagonal = inputs.key.shape[2] - inputs.query.shape[2]
    slope = f"{names.tensor(slopes.float())}[{'b, h' if slopes.dim() > 1 else 'h'}]"
    shift = "" if diagonal == 0 else f" + {names.number(diagonal, slopes.device)}"
    return f"{slope} * (i{shift} - j).abs()"


def _bias(bias: Tensor, names: Names) -> str:
    """A bias that trains is widened first: its gradient is summed over what it broadcasts to."""
    wide = bias.requires_grad and torch.is_grad_enabled()
    return entry(as_4d(bias.float() if wide else bias), names)


def _specialization_key(function: Any) -> Hashable:
    code = getattr(function, "__code__", None)
    return id(function) if code is None else code


def key_of(qkv: tuple[Tensor, Tensor, Tensor], mask: Blocked, score: Part, settings: Settings) -> Hashable:
    """Return what makes compiled code of its own: everything but lengths and the values of tensors."""
    query = qkv[0]
    return (
        mask.part.structure,
        score.structure,
        settings,
        tuple((t.shape[1], t.shape[3], _order(t), t.requires_grad) for t in qkv),
        query.dtype,
        query.device,
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        torch.is_autocast_enabled(query.device.type),
        tuple(t is None or tuple(n > 1 for n in t.shape[:2]) for t in mask.blocks[:3]),
    )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the widest stride to the narrowest: dynamo guards on strides."""
    return tuple(sorted(range(4), key=tensor.stride, reverse=True))
