"""Attention on DTensors: the local call of this process, and its result as DTensors.

Nothing is communicated. A tensor that is replicated where the call is split is read in part, so its gradient
is a partial sum there. This module imports `torch.distributed`, so it is imported for DTensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from attnroute.distributed import consensus, sharding
from attnroute.distributed.call_tensors import (
    INPUTS,
    LAYOUTS,
    Change,
    axes_of_input,
    changed,
    changed_object,
    check_function,
    from_row_and_head,
)
from attnroute.distributed.dtensor_calls import Calls, Spread, place_of
from attnroute.distributed.sharding import BATCH, HEAD_DIM, HEADS, KV_HEADS, TOKENS, Cut, Placed
from attnroute.errors import ArgumentError, argument_error
from attnroute.masks.kept import remember
from attnroute.masks.objects.base import Mask
from attnroute.masks.tracing import is_traced
from attnroute.memory import Memory
from attnroute.settings import seeks_consensus

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from attnroute.api.records import Given, Output
    from attnroute.engine.decision import Decision

_KEPT: Final = 4096
_LSE: Final = (BATCH, HEADS, TOKENS)
_LSE_THD: Final = (HEADS, TOKENS)


class _Part(NamedTuple):
    """What this process needs of one tensor.

    Attributes:
        name: Of the tensor.
        cuts: What is needed of the local tensor.
        grads: The placements of its gradient.
    """

    name: str
    cuts: tuple[Cut, ...]
    grads: tuple[Placement, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """What this process computes, with the placements of torch.

    Attributes:
        parts: Of each tensor, in the order in which `changed` comes to them.
        axes: For each dimension of the mesh: along what it splits the call.
        first: The first batch row and the first query head of this process.
        is_empty: Nothing is left for this process.
        is_split: Processes compute different parts.
        is_repeated: Several processes compute the same part.
    """

    parts: tuple[_Part, ...]
    axes: tuple[str | None, ...]
    first: tuple[int, int]
    is_empty: bool
    is_split: bool
    is_repeated: bool

    def placements(self, axes: tuple[str, ...]) -> tuple[Placement, ...]:
        """Return the placements of a result whose dimensions count this."""
        return tuple(Replicate() if axis is None else Shard(axes.index(axis)) for axis in self.axes)


_KNOWN: Memory[object, _Layout] = Memory(_KEPT, f"{__name__}._KNOWN", "never: the mesh is part of the key")
_CALLS: Memory[object, tuple[_Layout, Calls | None]] = Memory(
    _KEPT,
    f"{__name__}._CALLS",
    "when such a call comes on another mesh object: equal ones may have other process groups",
)
"""Of calls with three tensors also what they have in common, None where they go the long way."""


def run(given: Given, attend: Callable[[Given], Output], decide: Callable[[Given], Decision]) -> Output:
    """Run a call on DTensors.

    Args:
        given: The arguments; query, key or value is a DTensor.
        attend: Runs a call on plain tensors.
        decide: Decides about one.

    Returns:
        The output and, where the call requests it, the log-sum-exp, split as the call is.

    Raises:
        ArgumentError: A placement needs communication; the message names the redistribution to ask for.
        ConsensusError: ATTNROUTE_CONSENSUS is set, and another process would run the call differently.
    """
    known = _same_mesh(place_of(given), given)
    if known is not None and known[1] is not None and not seeks_consensus():
        _check_dropout(given, known[0])
        return known[1].run(given, attend)
    layout = _layout_of(given)
    _check_dropout(given, layout)
    local = _local(given, layout)
    if seeks_consensus():
        consensus.seek(given, local, decide, takes_part=not layout.is_empty)
    out, lse = _nothing(local) if layout.is_empty else attend(local)
    of_out, of_lse = _results(given, layout)
    whole = of_out.dtensor(out)
    if not given.return_lse or lse is None:
        return whole, None
    return whole, of_lse.dtensor(lse)


def _same_mesh(place: object, given: Given) -> tuple[_Layout, Calls | None] | None:
    """Return what is kept of calls like one on the same mesh object."""
    known = None if place is None else _CALLS.get(place)
    if known is None or known[1] is None:
        return known
    return known if known[1].mesh is cast("DTensor", given.query).device_mesh else None


def _check_dropout(given: Given, layout: _Layout) -> None:
    if given.dropout_p and layout.is_repeated:
        required = "0.0 where processes compute the same part, as each drops weights of its own"
        raise argument_error("dropout_p", required, given.dropout_p, "shard batch or heads on each dimension")


def _results(given: Given, layout: _Layout) -> tuple[Spread, Spread]:
    """Return how output and log-sum-exp lie."""
    axes, of_lse = LAYOUTS[given.layout], _LSE_THD if given.layout == "thd" else _LSE
    sizes = dict(zip(axes, given.query.shape, strict=True)) | {HEAD_DIM: given.value.shape[-1]}
    mesh = cast("DTensor", given.query).device_mesh
    out, lse = (
        Spread(mesh, layout.placements(which), tuple(sizes[axis] for axis in which))
        for which in (axes, of_lse)
    )
    return out, lse


def _calls(given: Given, layout: _Layout) -> Calls | None:
    """Return what calls like one have in common; None where this process has no part of them."""
    if layout.is_empty:
        return None
    mesh, names = cast("DTensor", given.query).device_mesh, [part.name for part in layout.parts]
    cuts = [part.cuts for part in layout.parts]

    def cut(local: list[Tensor]) -> list[Tensor]:
        return [_cut(*its) if its[2] else its[1] for its in zip(names, local, cuts, strict=True)]

    gradients = [
        Spread(mesh, part.grads, tuple(tensor.shape))
        for part, tensor in zip(layout.parts, given[:3], strict=True)
    ]
    return Calls(cut, tuple(gradients), _results(given, layout))


def local_call(given: Given) -> Given:
    """Return the call of this process on plain tensors.

    Raises:
        ArgumentError: A placement needs communication, or this process computes nothing.
    """
    layout = _layout_of(given)
    if layout.is_empty:
        required = "at least one batch row and one head for this process"
        raise argument_error("query", required, "none", "ask on another one")
    return _local(given, layout)


def is_local(given: Given) -> bool:
    """Return whether `run` takes a call: no placement in it needs communication."""
    try:
        layout = _layout_of(given)
    except ArgumentError:
        return False
    return not (given.dropout_p and layout.is_repeated)


def _layout_of(given: Given) -> _Layout:
    """Return what this process computes of a call, from the placements and sizes of all its tensors."""
    place = place_of(given)
    known = _same_mesh(place, given)
    if known is not None:
        return known[0]
    if given.layout not in LAYOUTS:
        raise argument_error("layout", f"one of {', '.join(LAYOUTS)}", given.layout, "pass one of them")
    mesh = _mesh_of(given)
    splits = sharding.splits_of(
        [
            _placed(name, tensor, axes_of_input(name, given.layout), mesh, ())
            for name, tensor in zip(INPUTS, given[:3], strict=True)
        ]
    )
    tensors: list[Placed] = []

    def note(name: str, value: Any, axes: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor | tuple):
            tensors.append(_placed(name, value, axes, mesh, splits))
        else:
            check_function(name, value, splits)
        return value

    changed(given, note)
    key = mesh, _coordinate(mesh), tuple(tensors)
    layout = _KNOWN.keep(key, lambda: _made(mesh, tensors, splits))
    if place is not None:
        _CALLS.put(place, (layout, _calls(given, layout)))
    return layout


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    found = mesh.get_coordinate()
    return None if found is None else tuple(found)


def _made(mesh: DeviceMesh, tensors: list[Placed], splits: tuple[str | None, ...]) -> _Layout:
    sizes = tuple(mesh.size(at) for at in range(mesh.ndim))
    coordinate = _coordinate(mesh)
    # A process outside of the mesh has empty tensors.
    share = sharding.share_of(tensors, splits, sizes, coordinate or (0,) * mesh.ndim)
    cuts = ((),) * len(tensors) if coordinate is None else share.cuts
    parts = [_Part(t.name, cut, _grads(t, splits)) for t, cut in zip(tensors, cuts, strict=True)]
    return _Layout(
        tuple(parts),
        splits,
        share.first,
        coordinate is None or share.is_empty,
        any(split is not None and size > 1 for split, size in zip(splits, sizes, strict=True)),
        any(split is None and size > 1 for split, size in zip(splits, sizes, strict=True)),
    )


def _grads(tensor: Placed, splits: tuple[str | None, ...]) -> tuple[Placement, ...]:
    """Return the placements of a gradient: where each process reads a part, or a part reads it, a sum."""
    return tuple(
        Shard(shard) if isinstance(shard, int) else Replicate() if split is None else Partial()
        for shard, split in zip(tensor.shards, splits, strict=True)
    )


def _mesh_of(given: Given) -> DeviceMesh:
    """Return the mesh of query, key and value.

    Raises:
        ArgumentError: One of them is no DTensor, or they lie on different meshes.
    """
    named = dict(zip(("query", "key", "value"), given[:3], strict=True))
    first, whole = next((name, t) for name, t in named.items() if isinstance(t, DTensor))
    for name, tensor in named.items():
        if not isinstance(tensor, DTensor):
            to_do = f"pass DTensor.from_local({name}, mesh, placements), or plain tensors alone"
            raise argument_error(name, f"a DTensor, as the {first} is", type(tensor).__name__, to_do)
    return whole.device_mesh


def _placed(
    name: str, value: Any, axes: tuple[str, ...], mesh: DeviceMesh, splits: tuple[str | None, ...]
) -> Placed:
    """Describe how a tensor lies on the mesh; sizes along what no dimension of it splits are left out."""
    shards: tuple[int | str | None, ...] = (None,) * mesh.ndim
    if isinstance(value, Tensor):
        if isinstance(value, DTensor):
            if value.device_mesh != mesh:
                to_do = "distribute all tensors of a call over one mesh"
                raise argument_error(name, f"the mesh of the query, {mesh}", value.device_mesh, to_do)
            shards = tuple(map(_shard, value.placements))
        if value.dim() > len(axes) or (name in INPUTS and value.dim() != len(axes)):
            raise argument_error(name, f"{len(axes)} dimensions", value.dim(), "reshape it")
        axes = axes[len(axes) - value.dim() :]
        shape = tuple(value.shape)
    else:
        shape = (len(value),)
    sizes = [
        int(n) if axis in (HEADS, KV_HEADS) or axis in splits else 0
        for n, axis in zip(shape, axes, strict=True)
    ]
    return Placed(name, axes, tuple(sizes), shards)


def _shard(placement: Placement) -> int | str | None:
    if type(placement) is Shard:
        return placement.dim
    return None if type(placement) is Replicate else str(placement)


def _local(given: Given, layout: _Layout) -> Given:
    """Return the part of a call that this process computes, on plain tensors."""
    mask, parts = given.mask, layout.parts
    if not isinstance(mask, Mask):
        return changed(given, _taking(parts, layout))
    of_mask = [part for part in parts if part.name.startswith("mask ")]
    # What is prepared of a mask is kept with it, so the local mask is one object as long as the whole one is.
    local = remember(mask, layout, lambda: changed_object("mask", mask, _taking(of_mask, layout)))
    others = [part for part in parts if not part.name.startswith("mask ")]
    return changed(given._replace(mask=None), _taking(others, layout))._replace(mask=local)


def _taking(parts: Iterable[_Part], layout: _Layout) -> Change:
    """Return what takes the parts of tensors, which come in their order."""
    left = iter(parts)

    def change(name: str, value: Any, _: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            return _part_of(name, value, next(left), layout)
        if isinstance(value, tuple):
            for cut in next(left).cuts:
                value = value[cut.start : cut.start + cut.length]
            return value
        return from_row_and_head(value, *layout.first)

    return change


def _part_of(name: str, tensor: Tensor, part: _Part, layout: _Layout) -> Tensor:
    """Return the part of a tensor that this process needs, as a plain tensor.

    Raises:
        ArgumentError: A plain tensor gets a gradient, or a local tensor has other sizes than its chunk.
    """
    trains = tensor.requires_grad and torch.is_grad_enabled()
    if not isinstance(tensor, DTensor):
        if trains and layout.is_split:
            required = "a DTensor where it gets a gradient, as each process computes a part of that"
            to_do = "pass distribute_tensor of it, with Replicate() where it is whole"
            raise argument_error(name, required, "a plain tensor", to_do)
        local = tensor
    elif trains:
        local = tensor.to_local(grad_placements=part.grads)
    else:
        # So it is the same object in each call, and what is made of a mask is kept.
        with torch.no_grad():
            local = tensor.to_local()
    if type(local).__name__ == "AsyncCollectiveTensor":
        # Any operator but `view` waits for the communication and returns a plain tensor.
        local = local.unsqueeze(0).squeeze(0)
    cut = _cut(name, local, part.cuts)
    if cut is local or cut.dtype != torch.bool or is_traced(cut):
        return cut
    # A mask is inspected once, and what is kept with a tensor may be no view of it.
    return remember(local, part, cut.clone)


def _cut(name: str, local: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
    for cut in cuts:
        if local.shape[cut.dim] != cut.has:
            required = (
                f"chunks as torch.chunk cuts, {cut.has} in dimension {cut.dim} of this process's tensor"
            )
            to_do = "make it with distribute_tensor, or with the shape of the whole in DTensor.from_local"
            raise argument_error(name, required, local.shape[cut.dim], to_do)
        if cut.heads is not None:
            heads = [local.narrow(cut.dim, cut.start + head, 1) for head in cut.heads]
            local = torch.cat(heads, cut.dim)
        elif cut.length != cut.has:
            local = local.narrow(cut.dim, cut.start, cut.length)
    return local


def _nothing(local: Given) -> Output:
    """Return the result of a process that computes nothing; its backward takes part as that of any other."""
    query, value = local.query, local.value
    out = query.new_empty((*query.shape[:-1], *value.shape[-1:]))

    def join(_: str, tensor: Any, __: tuple[str, ...]) -> Any:
        nonlocal out
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            out = out + tensor.sum().to(out.dtype)
        return tensor

    changed(local, join)
    if not local.return_lse:
        return out, None
    shape = out.shape[:-1] if local.layout == "bhsd" else out.transpose(-2, -3).shape[:-1]
    return out, out.new_empty(shape, dtype=torch.float32)
