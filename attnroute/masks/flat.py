"""Turn mask objects into nested tuples and tensors, which torch.compile can put into a graph, and back.

Where code between wants a tensor, `as_tensor` makes one. The tracers of a graph hand the same Python object
from call to call, so `made_of` finds the mask behind it: nothing reads the tensor, and no graph makes it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from attnroute.masks.lowered.sequences import tokens
from attnroute.masks.objects.arbitrary import Dense
from attnroute.masks.objects.bands import Causal, PrefixLM, Window
from attnroute.masks.objects.base import All, Either, Mask, Not
from attnroute.masks.objects.ragged import Ragged
from attnroute.masks.objects.tokens import Documents, KeyPadding

_OTHER_DOCUMENTS: Final = (
    "cu_seqlens requires the documents that the mask of the model has already, which start where positions "
    "do not go up by one; got others; pass only one of both."
)
Spec = Any
"""A nested tuple of words and numbers; `("tensor", n)` stands for the n-th tensor."""

_CLASSES: Final = {
    kind.__name__: kind
    for kind in (All, Causal, Dense, Documents, Either, KeyPadding, Not, PrefixLM, Ragged, Window)
}
"""The masks that are made of numbers, tensors and such masks alone. By name, as dynamo follows `is_flat`."""
FIELDS: Final = {name: tuple(field.name for field in fields(kind)) for name, kind in _CLASSES.items()}
"""The arguments that make them."""


def is_flat(mask: object) -> bool:
    """Return whether a mask is made of numbers and tensors alone."""
    name = type(mask).__name__
    if name in ("All", "Either"):
        return all(is_flat(part) for part in mask.parts)  # type: ignore[attr-defined]
    return is_flat(mask.part) if name == "Not" else name in FIELDS  # type: ignore[attr-defined]


def take_apart(mask: object, tensors: list[Tensor]) -> Spec:
    """Return a mask's description, appending its tensors."""
    if isinstance(mask, Tensor):
        tensors.append(mask)
        return ("tensor", len(tensors) - 1)
    if isinstance(mask, tuple | list):
        return ("tuple", *[take_apart(part, tensors) for part in mask])
    name = type(mask).__name__
    if name not in FIELDS:
        return ("value", mask)
    return (name, *[take_apart(getattr(mask, field), tensors) for field in FIELDS[name]])


def put_together(spec: Spec, tensors: list[Tensor]) -> Any:
    """Return what `take_apart` took apart."""
    kind, *parts = spec
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "value":
        # A number that varies would be a number of the tracer's, where a mask has numbers of its own.
        return int(parts[0]) if type(parts[0]).__name__ == "SymInt" else parts[0]
    made = [put_together(part, tensors) for part in parts]
    return tuple(made) if kind == "tuple" else _CLASSES[kind](*made)


def as_tensor(mask: Mask, sizes: tuple[int, int, int], device: torch.device | str) -> Tensor:
    """Return a mask of numbers and tensors as a tensor of the graph that is being made.

    Args:
        mask: The mask.
        sizes: Batch size, queries and keys.
        device: Where the tensor lies.

    Returns:
        Bool tensor (batch, 1, seqlen_q, seqlen_kv), True = attend. Calls of `attention()` in this graph that
        get the tensor itself run with the mask; what is made from it is a tensor like any other.
    """
    tensors: list[Tensor] = []
    spec = take_apart(mask, tensors)
    return _as_tensor(spec, tensors, *sizes, device)  # type: ignore[no-any-return]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _as_tensor(
    spec: Spec, tensors: list[Tensor], batch: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str
) -> Tensor:
    # Somebody may write into the tensors later, which changes no mask that was made of them.
    return _made(
        put_together(spec, [tensor.clone() for tensor in tensors]), batch, seqlen_q, seqlen_kv, device
    )


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def with_documents(tensor: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return a mask of one batch row in a graph, with packed documents that prefix sums state.

    Args:
        tensor: Bool tensor (1, 1, seqlen, seqlen). Where `as_tensor` made it of a mask with documents, the
            graph asserts that those are the ones stated, and kernels get the sums.
        cu_seqlens: Integer tensor (documents + 1,).

    Returns:
        A tensor as of `as_tensor`, the same one for all layers that ask.
    """
    known, answer = getattr(tensor, "stated", (None, tensor))
    if known is cu_seqlens and not (_was_written(cu_seqlens) or _was_written(answer)):
        return answer
    seqlen = tensor.shape[-1]
    mask, sums = made_of(tensor, seqlen, seqlen), cu_seqlens.clone()
    kept = _beside(mask, tokens("cu_seqlens", sums, seqlen, tensor.device).ids[0])
    answer = _made(All((*kept, Documents(cu_seqlens=sums))), 1, seqlen, seqlen, tensor.device)
    tensor.stated = cu_seqlens, answer  # type: ignore[attr-defined]
    return answer


def _beside(mask: Mask | Tensor, stated: Tensor) -> list[Mask]:
    """Return what a mask says beside its documents, which the graph asserts to be the stated ones."""
    kept: list[Mask] = []
    for node in (Dense(mask.clone()),) if isinstance(mask, Tensor) else mask.nodes:
        if isinstance(node, Documents) and node.ids is not None:
            # Equal bounds: then those that are stated divide the tokens at least as far.
            bounds = [ids[1:] != ids[:-1] for ids in (node.ids[0], stated)]
            torch._assert_async((bounds[0] == bounds[1]).all(), _OTHER_DOCUMENTS)  # noqa: SLF001
        else:
            kept.append(node)
    return kept


def _made(mask: Mask, batch: int, seqlen_q: int, seqlen_kv: int, device: torch.device | str) -> Tensor:
    found = mask.materialize(seqlen_q, seqlen_kv, batch=batch, device=device)
    found = found.expand(batch, 1, seqlen_q, seqlen_kv).clone()
    found.made_of = mask  # type: ignore[attr-defined]
    return found


def made_of(tensor: Tensor, seqlen_q: int, seqlen_kv: int) -> Mask | Tensor:
    """Return the mask that `as_tensor` made a tensor of for these lengths; else the tensor.

    It counts itself where somebody wrote into it, or where it is to broadcast.
    """
    mask: Mask | Tensor = getattr(tensor, "made_of", tensor)
    same = tuple(tensor.shape[-2:]) == (seqlen_q, seqlen_kv) and not _was_written(tensor)
    return mask if same else tensor


def _was_written(tensor: Tensor) -> bool:
    """Return whether somebody may have written into a tensor that was made in a graph.

    The tensors of which a graph is made know of each write into their memory, also of those through `data`.
    dynamo runs the calls before that, for their shapes alone. A backend that makes no graph of them runs them
    on tensors with memory, which do not know.
    """
    if isinstance(tensor, FunctionalTensor):
        found = torch._functionalize_has_data_mutation(tensor.elem)  # type: ignore[attr-defined]  # noqa: SLF001
        return bool(found)
    return not isinstance(tensor, FakeTensor) or tensor._version != 0
