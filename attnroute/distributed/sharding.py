"""Which part of a call each process computes, and which part of each tensor that needs: numbers alone.

Each dimension of a mesh splits a call along its batch rows or its heads, in the chunks of `torch.chunk`, or
repeats it. Batch rows and heads do not read each other, so what is split so needs no communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.errors import ArgumentError, argument_error
from attnroute.question import fits

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH: Final = "batch"
HEADS: Final = "heads"
KV_HEADS: Final = "key/value heads"
TOKENS: Final = "tokens"
HEAD_DIM: Final = "head_dim"
REST: Final = "entries"
"""What the dimensions of a tensor count; it may be split along the first three."""
_SPLITS: Final = {BATCH: BATCH, HEADS: HEADS, KV_HEADS: HEADS}
_INPUTS: Final = ("query", "key", "value")


class Placed(NamedTuple):
    """A tensor of a call, and how it lies on the mesh.

    Attributes:
        name: The argument.
        axes: What each dimension counts.
        sizes: Of the whole tensor.
        shards: For each dimension of the mesh: the dimension of the tensor that is sharded on it, None where
            it is replicated, or another placement as text.
    """

    name: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    shards: tuple[int | str | None, ...]


class Cut(NamedTuple):
    """The part of a local tensor that the local call needs, along one dimension.

    Attributes:
        dim: The dimension.
        has: How many entries the local tensor has there.
        start: The first one that is needed.
        length: How many are needed.
        heads: Which ones instead, where no range of key/value heads belongs to the query heads.
    """

    dim: int
    has: int
    start: int
    length: int
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """What one process computes.

    Attributes:
        splits: For each dimension of the mesh: "batch", "heads", or None where the call is repeated.
        cuts: For each tensor of the call, in order.
        first: Its first batch row and its first query head.
        is_empty: There are more processes than batch rows or heads, and none is left for this one.
    """

    splits: tuple[str | None, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    first: tuple[int, int]
    is_empty: bool


def splits_of(inputs: Sequence[Placed]) -> tuple[str | None, ...]:
    """Return along what each dimension of the mesh splits a call.

    Args:
        inputs: Query, key and value; sizes are not read.

    Raises:
        ArgumentError: One lies in a way that needs communication, or two lie in ways that do not go together.
    """
    return tuple(_split(inputs, at) for at in range(len(inputs[0].shards)))


def share_of(
    tensors: Sequence[Placed],
    splits: tuple[str | None, ...],
    mesh: tuple[int, ...],
    at: tuple[int, ...],
) -> Share:
    """Return what one process computes.

    Every process of the mesh is looked at, so that all of them raise what one must raise.

    Args:
        tensors: Those of the call, query, key and value first.
        splits: Along what each dimension of the mesh splits the call.
        mesh: The sizes of the mesh.
        at: Where in the mesh the process is.

    Raises:
        ArgumentError: A process would need a part of a tensor that another one has.
    """
    totals = _totals(tensors)
    for tensor in tensors:
        _check(tensor, splits, totals)
        if any(isinstance(shard, int) for shard in tensor.shards):
            for place in product(*map(range, mesh)):
                _cuts(tensor, splits, mesh, place, totals)
    cuts = tuple(_cuts(tensor, splits, mesh, at, totals) for tensor in tensors)
    rows, heads = (
        _needed(axis, splits, mesh, at, totals) if axis in splits else None for axis in (BATCH, HEADS)
    )
    first = (rows[0] if rows else 0, heads[0] if heads else 0)
    return Share(splits, cuts, first, any(part and part[0] == part[1] for part in (rows, heads)))


def chunk(size: int, parts: Sequence[int], at: Sequence[int]) -> tuple[int, int]:
    """Return the range that is left of a size after `torch.chunk` into parts, again and again.

    Args:
        size: How many entries there are.
        parts: Into how many chunks each step cuts; the last ones may be shorter, or empty.
        at: Which chunk is taken in each step.
    """
    start, stop = 0, size
    for count, index in zip(parts, at, strict=True):
        length = -(-(stop - start) // count)
        start, stop = min(start + index * length, stop), min(start + (index + 1) * length, stop)
    return start, stop


def redistribution(tensor: Placed, at: int, to: int | None) -> str:
    """Return the call that places a tensor otherwise on one dimension of the mesh."""
    shards = [to if i == at else shard for i, shard in enumerate(tensor.shards)]
    words = ["Replicate()" if not isinstance(shard, int) else f"Shard({shard})" for shard in shards]
    # A tensor of a mask object is no argument of its own.
    name = tensor.name.replace("mask ", "").replace(" ", ".")
    return f"{name}.redistribute(mesh, [{', '.join(words)}])"


def refused(tensor: Placed, at: int, required: str, to: int | None) -> ArgumentError:
    """Return the error about a tensor's placement on one dimension of the mesh."""
    shard = tensor.shards[at]
    got = f"Shard({shard}), its {tensor.axes[shard]}," if isinstance(shard, int) else shard or "Replicate()"
    return argument_error(
        tensor.name,
        required,
        f"{got} on dimension {at} of the mesh",
        f"pass {redistribution(tensor, at, to)}",
    )


def _split(inputs: Sequence[Placed], at: int) -> str | None:
    found: tuple[str, Placed] | None = None
    for tensor in inputs:
        shard = tensor.shards[at]
        if shard is None:
            continue
        if isinstance(shard, str):
            raise refused(tensor, at, _required(tensor), None)
        split = _SPLITS.get(tensor.axes[shard])
        if split is None:
            raise refused(tensor, at, _required(tensor), _dim(tensor, HEADS))
        if found is None:
            found = split, tensor
        elif split != found[0]:
            required = f"its {found[0]} sharded as those of the {found[1].name}, or Replicate()"
            raise refused(tensor, at, required, _dim(tensor, found[0]))
    return None if found is None else found[0]


def _dim(tensor: Placed, split: str) -> int:
    return next(i for i, axis in enumerate(tensor.axes) if _SPLITS.get(axis) == split)


def _required(tensor: Placed) -> str:
    dims = {axis: f"Shard({i})" for i, axis in enumerate(tensor.axes) if axis in _SPLITS}
    ways = [f"{shard} ({axis})" for axis, shard in dims.items()]
    return f"{', '.join(ways)} or Replicate() on each dimension of the mesh"


def _totals(tensors: Sequence[Placed]) -> dict[str, int]:
    """Return the sizes of the call; those of its other tensors are these or 1."""
    query, key = tensors[:2]
    totals = dict(zip(query.axes, query.sizes, strict=True))
    totals[KV_HEADS] = key.sizes[key.axes.index(KV_HEADS)]
    fits.heads(totals[HEADS], totals[KV_HEADS])
    return totals


def _check(tensor: Placed, splits: tuple[str | None, ...], totals: dict[str, int]) -> None:
    """Refuse sizes that do not go together, and shards along what the call is not split along.

    Raises:
        ArgumentError: The tensor cannot be cut as the call is.
    """
    for at, shard in enumerate(tensor.shards):
        split = splits[at]
        if shard is not None and (isinstance(shard, str) or _SPLITS.get(tensor.axes[shard]) != split):
            required = (
                "Replicate()" if split is None else f"its {split} sharded as the call's, or Replicate()"
            )
            raise refused(tensor, at, required, None)
    for dim, (axis, size) in enumerate(zip(tensor.axes, tensor.sizes, strict=True)):
        total = totals.get(axis, size)
        broadcasts = size == 1 and tensor.name not in _INPUTS
        if axis in _SPLITS and _SPLITS[axis] in splits and size != total and not broadcasts:
            required = f"size {total} in dimension {dim}, the {axis} of the whole call"
            raise argument_error(tensor.name, required, size, "pass the whole tensor, or a DTensor of it")


def _cuts(
    tensor: Placed,
    splits: tuple[str | None, ...],
    mesh: tuple[int, ...],
    at: tuple[int, ...],
    totals: dict[str, int],
) -> tuple[Cut, ...]:
    """Return what is needed of a tensor at one place of the mesh.

    Raises:
        ArgumentError: Another process has a part of it.
    """
    cuts = []
    for dim, (axis, size) in enumerate(zip(tensor.axes, tensor.sizes, strict=True)):
        if axis not in _SPLITS or _SPLITS[axis] not in splits:
            continue
        sharded = [i for i, shard in enumerate(tensor.shards) if shard == dim]
        first, last = chunk(size, [mesh[i] for i in sharded], [at[i] for i in sharded])
        start, stop = _needed(axis, splits, mesh, at, totals)
        if size != totals[axis]:
            start, stop = 0, size
        if start < stop and not first <= start <= stop <= last:
            required = f"on each process the {axis} that its part of the call reads, or Replicate()"
            got = f"{size} {axis} in {mesh[sharded[0]]} chunks beside {totals[HEADS]} query heads"
            raise argument_error(
                tensor.name, required, got, f"pass {redistribution(tensor, sharded[0], None)}"
            )
        start = min(max(start, first), last)
        index = _index(splits, mesh, at, totals, (start, stop)) if axis == KV_HEADS else None
        cut = Cut(dim, last - first, start - first, max(stop - start, 0), index)
        if sharded or index or cut.length != cut.has:
            cuts.append(cut)
    return tuple(cuts)


def _needed(
    axis: str,
    splits: tuple[str | None, ...],
    mesh: tuple[int, ...],
    at: tuple[int, ...],
    totals: dict[str, int],
) -> tuple[int, int]:
    """Return which entries of an axis the call of a process is about."""
    along = [i for i, split in enumerate(splits) if split == _SPLITS[axis]]
    total = totals[HEADS if axis == KV_HEADS else axis]
    start, stop = chunk(total, [mesh[i] for i in along], [at[i] for i in along])
    if axis == KV_HEADS:
        shared = totals[HEADS] // totals[KV_HEADS]
        return start // shared, -(-stop // shared) if start < stop else start // shared
    return start, stop


def _index(
    splits: tuple[str | None, ...],
    mesh: tuple[int, ...],
    at: tuple[int, ...],
    totals: dict[str, int],
    kv: tuple[int, int],
) -> tuple[int, ...] | None:
    """Return the key/value head of each query head, where these do not share heads evenly."""
    start, stop = _needed(HEADS, splits, mesh, at, totals)
    shared = totals[HEADS] // totals[KV_HEADS]
    heads = kv[1] - kv[0]
    if heads <= 1 or stop - start == heads * shared:
        return None
    return tuple(head // shared - kv[0] for head in range(start, stop))
