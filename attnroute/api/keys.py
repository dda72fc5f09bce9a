"""The key of a call, made in a few microseconds; only a new dense mask is waited for."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from attnroute.api.records import Given, Problem, RouteKey
from attnroute.masks import Dense, Mask
from attnroute.masks.layout import tensor_key
from attnroute.masks.recognition.summary import INSPECT_THRESHOLD, inspect_mask
from attnroute.question.fits import LARGEST

if TYPE_CHECKING:
    from attnroute.question.policy import Policy

_ALIGNMENT_BITS: Final = 15
_TENSORS: Final = ("query", "key", "value", "mask", "bias", "sink", "alibi_slopes")
_PACKED: Final = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
_SPECIAL: Final = {*_TENSORS, *_PACKED, "scale", "deterministic", "backend", "prefer"}
"""Arguments with a field of their own: packed lengths are in the mask's, backends in the policy's."""
_others = itemgetter(*(at for at, name in enumerate(Given._fields) if name not in _SPECIAL))
"""Every other argument is part of the key as it is, so that a new one cannot be left out of it."""


def key_of(problem: Problem, policy: Policy) -> RouteKey:
    """Return the key of a call's route.

    Raises:
        AttributeError, RuntimeError, TypeError: An argument is malformed; the checks say which.
    """
    query, key, value = problem.query, problem.key, problem.value
    given = problem.given
    memory = None
    if problem.transform is None and not query.is_nested:
        misaligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & _ALIGNMENT_BITS
        memory = (query.stride(), key.stride(), value.stride(), misaligned)
    arguments = _others(given)
    types = tuple(map(type, arguments))
    if given.window is not None:
        types += tuple(map(type, given.window))
    trains = problem.training and (query.requires_grad or key.requires_grad or value.requires_grad)
    fields = (
        (query.shape, key.shape, value.shape),
        memory,
        (query.dtype, key.dtype, value.dtype),
        (query.device, key.device, value.device),
        problem.training,
        trains,
        problem.transform,
        problem.dispatch_mode,
        problem.distributed,
        None if problem.mask is None else _mask_key(problem.mask, problem, policy),
        None if problem.bias is None else _tensor_key(problem.bias),
        None if given.sink is None else _tensor_key(given.sink),
        None if given.alibi_slopes is None else _tensor_key(given.alibi_slopes),
        None if problem.score_mod is None else any(t.requires_grad for t in problem.captured),
        None if problem.scale is None else _scale_key(problem.scale),
        problem.deterministic,
        arguments,
        types,
        policy.key,
        False,
    )
    # As RouteKey(*fields), in a quarter of the time: each call of the user waits for this.
    return tuple.__new__(RouteKey, fields)


def _scale_key(scale: float) -> tuple[object, ...]:
    """Return what a decision and the checks depend on: numbers of two types may be equal."""
    return (type(scale), scale > 0, scale < 0, isinstance(scale, int | float) and abs(scale) <= LARGEST)


def _mask_key(mask: object, problem: Problem, policy: Policy) -> object:
    if isinstance(mask, Tensor):
        return (*tensor_key(mask), _recognized(mask, problem, policy))
    if isinstance(mask, Mask):
        return tuple(_node_key(node, problem, policy) for node in mask.nodes)
    return ("not a mask", id(mask))


def _node_key(node: Mask, problem: Problem, policy: Policy) -> object:
    if isinstance(node, Dense):
        return ("dense", *tensor_key(node.tensor), _recognized(node.tensor, problem, policy))
    return node.key()


def _tensor_key(value: object) -> object:
    return tensor_key(value) if isinstance(value, Tensor) else ("not a tensor", id(value))


def _recognized(mask: Tensor, problem: Problem, policy: Policy) -> object:
    """Return what a dense mask was recognized as, once per tensor; it makes a route of its own."""
    if not policy.recognize or mask.dtype != torch.bool or problem.transform is not None:
        return None
    if problem.query.dim() != 4 or problem.key.dim() != 4:
        # The checks refuse it.
        return None
    extent = problem.extent
    if extent.seqlen_q * extent.seqlen_kv < INSPECT_THRESHOLD:
        return None
    return inspect_mask(mask, extent)
