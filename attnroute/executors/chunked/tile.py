"""What chunked attention applies to one tile of scores: bias, ALiBi, masks, dropout.

Tensors are kept in five dimensions (batch, num_heads_kv, group, seqlen_q, seqlen_kv) with size 1 where
they broadcast, `group` being the query heads that share a key head; a tile is a slice of such views, so
nothing that broadcasts is ever expanded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnroute.masks.lowered.region import Region, allowed

if TYPE_CHECKING:
    from attnroute.executors.chunked.plan import Block, Chunk, Geometry, Limits
    from attnroute.executors.protocol import ScoreMod
    from attnroute.masks.lowered.form import LoweredMask


class Spec(NamedTuple):
    """The plain values of a call.

    Attributes:
        scale: Multiplies QK^T.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0.0 is off.
        dropout_p: Probability with which a probability is dropped.
        seed: Seed of the dropout masks, drawn once per call; 0 without dropout.
        limits: The band and the document bounds.
        block_q: Queries per block; None chooses.
        program: The part of the mask that is evaluated tile by tile; None = there is none.
        score_mod: ``(score, batch, head, query index, key index) -> score``, applied after the softcap.
    """

    scale: float
    softcap: float
    dropout_p: float
    seed: int
    limits: Limits
    block_q: int | None
    program: LoweredMask | None = None
    score_mod: ScoreMod | None = None

    @property
    def keep_scale(self) -> float:
        """What the probabilities that dropout keeps are multiplied with."""
        return 1.0 / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else 0.0


class Extras(NamedTuple):
    """The tensors of a call beside query, key and value, as the caller gave them."""

    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None
    key_keep: Tensor | None = None
    ids_q: Tensor | None = None
    ids_kv: Tensor | None = None
    dense: Tensor | None = None


class Tile(NamedTuple):
    """One tile: queries [i0, i1) against keys [j0, j1) of a chunk, and what applies to its scores.

    Attributes:
        shape: (batch rows, key heads, group, queries, keys) of the tile.
        limits: The band, in absolute positions.
        softcap: As in `Spec`; 0.0 where a score function has already applied it.
        diagonal: Key position that ALiBi takes as distance 0 for query 0: seqlen_kv - seqlen_q.
        bias: Five-dimensional slice, any float dtype, or None.
        slopes: (batch or 1, key heads, group, 1, 1) in the dtype of the scores, or None.
        sink: (1, key heads, group, 1, 1), any float dtype, or None; a block's first tile takes it.
        allow: Five-dimensional bool slice, True = attend, or None.
        keep: Bool tensor of `shape`, False = dropped, or None.
        keep_scale: As in `Spec`.
    """

    shape: tuple[int, int, int, int, int]
    i0: int
    j0: int
    limits: Limits
    softcap: float
    diagonal: int
    bias: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None
    allow: Tensor | None
    keep: Tensor | None
    keep_scale: float

    def distance(self, like: Tensor) -> Tensor:
        """Return -|i + diagonal - j| as (queries, keys) in the dtype and on the device of `like`."""
        _, _, _, queries, keys = self.shape
        first_q, first_k = self.i0 + self.diagonal, self.j0
        i = torch.arange(first_q, first_q + queries, device=like.device, dtype=like.dtype)
        j = torch.arange(first_k, first_k + keys, device=like.device, dtype=like.dtype)
        return (i[:, None] - j).abs_().neg_()


class TileSource:
    """Cuts tiles out of a call; drop masks come in visiting order, so both directions see the same ones."""

    def __init__(
        self, shape: Geometry, spec: Spec, extras: Extras, score_dtype: torch.dtype, device: torch.device
    ) -> None:
        """Bring every tensor into five dimensions.

        Args:
            shape: Sizes of the call.
            spec: Plain values of the call.
            extras: Tensors of the call.
            score_dtype: Dtype of the scores.
            device: Where the tensors are.
        """
        self._shape = shape
        self._spec = spec
        self.bias = None if extras.bias is None else five_dims(extras.bias, shape.group)
        self.slopes = _slopes5(extras.slopes, shape, score_dtype)
        self.sink = None if extras.sink is None else five_dims(extras.sink[:, None, None], shape.group)
        self._dense = None if extras.dense is None else five_dims(extras.dense, shape.group)
        self._key_keep = extras.key_keep
        self._device = device
        self._ids_q, self._ids_kv = _document_ids(shape, spec.limits, extras, device)
        masks = (self._key_keep, self._dense, self._ids_q, self._ids_kv, spec.program)
        self._is_masked = any(mask is not None for mask in masks)
        self._generator: torch.Generator | None = None

    def tile(self, chunk: Chunk, block: Block, j0: int, j1: int, *, dropout: bool = True) -> Tile:
        """Return the tile of `block` against keys [j0, j1), its drop mask drawn if there is dropout."""
        size = (chunk.b1 - chunk.b0, chunk.h1 - chunk.h0, self._shape.group, block.i1 - block.i0, j1 - j0)
        return Tile(
            shape=size,
            i0=block.i0,
            j0=j0,
            limits=self._spec.limits,
            softcap=0.0 if self._spec.score_mod is not None else self._spec.softcap,
            diagonal=self._shape.seqlen_kv - self._shape.seqlen_q,
            bias=None if self.bias is None else cut(self.bias, chunk, block, j0, j1),
            slopes=None if self.slopes is None else cut(self.slopes, chunk, block, j0, j1),
            sink=self.sink_of(chunk),
            allow=self._allow(chunk, block, j0, j1) if self._is_masked else None,
            keep=self._keep(size) if dropout else None,
            keep_scale=self._spec.keep_scale,
        )

    def sink_of(self, chunk: Chunk) -> Tensor | None:
        """Return the sinks of a chunk's heads as a `Tile` has them."""
        if self.sink is None or self.sink.shape[1] == 1:
            return self.sink
        return self.sink[:, chunk.h0 : chunk.h1]

    def region(self, chunk: Chunk, block: Block, j0: int, j1: int) -> Region:
        """Return where the tile lies, in query heads."""
        h0, h1 = chunk.h0 * self._shape.group, chunk.h1 * self._shape.group
        return Region(chunk.b0, chunk.b1, h0, h1, block.i0, block.i1, j0, j1, self._device)

    def _allow(self, chunk: Chunk, block: Block, j0: int, j1: int) -> Tensor | None:
        parts: list[Tensor] = []
        if self._key_keep is not None:
            parts.append(_batch_rows(self._key_keep, chunk)[:, None, None, None, j0:j1])
        mixed = not self._spec.limits.one_document(block.i0, block.i1, j0, j1)
        if mixed and self._ids_q is not None and self._ids_kv is not None:
            ids_q = _batch_rows(self._ids_q, chunk)[:, block.i0 : block.i1, None]
            ids_kv = _batch_rows(self._ids_kv, chunk)[:, None, j0:j1]
            parts.append((ids_q == ids_kv)[:, None, None])
        if self._dense is not None:
            parts.append(cut(self._dense, chunk, block, j0, j1))
        if self._spec.program is not None:
            programmed = allowed(self._spec.program, self.region(chunk, block, j0, j1))
            parts += [] if programmed is None else [five_dims(programmed, self._shape.group)]
        if not parts:
            return None
        allow = parts[0]
        for part in parts[1:]:
            allow = allow & part
        return allow

    def _keep(self, size: tuple[int, int, int, int, int]) -> Tensor | None:
        if self._spec.dropout_p <= 0.0:
            return None
        if self._generator is None:
            self._generator = torch.Generator(device=self._device).manual_seed(self._spec.seed)
        keep = torch.empty(size, dtype=torch.bool, device=self._device)
        return keep.bernoulli_(1.0 - self._spec.dropout_p, generator=self._generator)


def five_dims(tensor: Tensor, group: int) -> Tensor:
    """View a tensor that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) in five dimensions."""
    full = tensor[(None,) * (4 - tensor.dim())]
    return full.unsqueeze(2) if full.shape[1] == 1 else full.unflatten(1, (-1, group))


def cut(tensor: Tensor, chunk: Chunk, block: Block, j0: int, j1: int) -> Tensor:
    """Slice a five-dimensional tensor to a tile; dimensions of size 1 are kept whole."""
    ranges = {0: (chunk.b0, chunk.b1), 1: (chunk.h0, chunk.h1), 3: (block.i0, block.i1), 4: (j0, j1)}
    for dim, (start, stop) in ranges.items():
        if tensor.shape[dim] != 1:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _batch_rows(tensor: Tensor, chunk: Chunk) -> Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[chunk.b0 : chunk.b1]


def _slopes5(slopes: Tensor | None, shape: Geometry, dtype: torch.dtype) -> Tensor | None:
    if slopes is None:
        return None
    rows = slopes if slopes.dim() == 2 else slopes[None]
    by_group: Tensor = rows.to(dtype).unflatten(1, (shape.heads_kv, shape.group))
    return by_group[..., None, None]


def _document_ids(
    shape: Geometry, limits: Limits, extras: Extras, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of queries and keys; bounds that come without ids are turned into ids."""
    if extras.ids_q is not None or limits.bounds is None:
        return extras.ids_q, extras.ids_kv
    ends = torch.tensor(limits.bounds[1:], device=device)
    longest = torch.arange(max(shape.seqlen_q, shape.seqlen_kv), device=device)
    ids = torch.bucketize(longest, ends, right=True)[None]
    return ids[:, : shape.seqlen_q], ids[:, : shape.seqlen_kv]
