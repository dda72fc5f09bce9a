"""Mask and band of a call as one `LoweredMask`: made once for each mask where that may be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnroute.masks import Dense, Mask
from attnroute.masks.kept import Keeper, keeper_of
from attnroute.masks.lowered.form import FULL, Extent, LoweredMask, as_4d, open_band
from attnroute.masks.objects.ragged import Ragged
from attnroute.masks.recognition.summary import inspect_mask
from attnroute.masks.tracing import is_exporting

if TYPE_CHECKING:
    from attnroute.api.records import Problem
    from attnroute.api.routes import Route
    from attnroute.executors.prepare.bound import Lower
    from attnroute.executors.protocol import Inputs


def parts_of(mask: Mask | None, recognizes: bool, extent: Extent) -> tuple[Mask, ...]:
    """Replace dense masks by what they were recognized as: tensors that share a route may differ in it."""
    if mask is None or not recognizes:
        return () if mask is None else mask.nodes
    parts: list[Mask] = []
    for part in mask.nodes:
        found = inspect_mask(part.tensor, extent) if isinstance(part, Dense) else None
        parts.extend((part,) if found is None or found.masks is None else found.masks)
    return tuple(parts)


def lowered(parts: tuple[Mask, ...], extent: Extent) -> LoweredMask:
    """Return what masks allow together."""
    whole = FULL
    for part in parts:
        whole = part.lower(whole, extent)
    # An exported program serves all lengths, also for those at which the band rules something out.
    return whole if is_exporting() else open_band(whole, extent)


def put_into(inputs: Inputs, route: Route, problem: Problem, keeper: Keeper | None) -> None:
    """Lower the mask of a call, and find what keeps things with it."""
    extent, mask = problem.extent, problem.mask
    # Before anything makes views of a tensor: without views it is certain that the memory is its own.
    keeper = inputs.keeper = keeper_of(_owner(problem)) if keeper is None else keeper

    def make() -> LoweredMask:
        return lowered(parts_of(problem.whole_mask, route.recognizes, extent), extent)

    # Tensors that are made inside a transform belong to it.
    if keeper is None or not route.keeps or problem.transform is not None or problem.traced:
        inputs.mask = make()
        return
    band: object = (problem.is_causal, problem.window, problem.given.causal_alignment)
    if isinstance(mask, Ragged):
        band = (mask.left, mask.right, mask.max_seqlen)
    inputs.mask = keeper.keep(("lowered", extent, band, route.recognizes), make)


def of_any(route: Route, problem: Problem) -> Lower | None:
    """Return what lowers any mask of the form of a call's; None where its values take part in more.

    They do in a route that recognises masks, and what else a mask object refers to may be of that one alone.
    """
    mask, extent, whole = problem.mask, problem.extent, problem.whole_mask
    if mask is None or whole is None or route.recognizes or route.mask is not None:
        return None
    if problem.given.mask is None:
        # A packed batch is made of its sums, and what runs the call is given those of no other one.
        return None
    if isinstance(mask, Tensor):
        bands = whole.nodes[1:]
        if not bands:
            return lambda other: LoweredMask(dense=as_4d(other))
        return lambda other: lowered((Dense(other), *bands), extent)
    if not route.keeps:
        return None
    bands = whole.nodes[len(mask.nodes) :]

    def lower(other: Any) -> LoweredMask:
        return lowered((*other.nodes, *bands), extent)

    return lower


def _owner(problem: Problem) -> object:
    """Return the object that owns a mask, the band aside, under which what is prepared from it is kept.

    A packed batch has a new mask object in each call, and its sums stay; neither of two sums is enough.
    """
    if isinstance(problem.mask, Ragged):
        return problem.given.cu_seqlens_q if len(problem.mask.tensors) == 1 else None
    return problem.mask
