"""What calls have in common that differ only in how many keys they have, and families whose shapes vary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnroute.api.records import RouteKey
from attnroute.engine.rounding import FEW
from attnroute.masks import KeyPadding, Mask
from attnroute.masks.tracing import is_capturing
from attnroute.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnroute.api.records import Problem

_at = RouteKey._fields.index  # By name, as fields are added.
_KIND: Final = slice(_at("dtypes"), _at("mask"))
_NUMBERS: Final = slice(_at("trains_function"), _at("types"))
_BESIDE_MASK: Final = slice(_at("bias"), None)
_DIMS: Final = 4
_FLAG_DIMS: Final = 2
_SHORTEST: Final = 2
"""Keys from which on contiguous memory is described alike at every length."""

VARIED: Final = 8
"""From so many shapes of a family on they vary: lengths that a benchmark compares, or that batches are filled
up to, are fewer, and each is worth its one plan."""
VARIED_FEW: Final = 3
"""The same of few queries, whose shapes are those of a growing cache: another at every step."""
_FAMILIES_KEPT: Final = 256

_FAMILIES: Memory[Hashable, frozenset[Hashable]] = Memory(
    _FAMILIES_KEPT,
    f"{__name__}._FAMILIES",
    "never: shapes that were seen",
)
"""The first shapes of each family: of calls that differ only in their lengths and batch sizes."""
_LASTING_KEPT: Final = 4096
LASTING: Memory[RouteKey, bool] = Memory(
    _LASTING_KEPT,
    f"{__name__}.LASTING",
    "never: how often a shape came back",
)
"""Calls of shapes that came back often enough to repay a plan, though those of their family vary."""


def lasting(key: RouteKey) -> RouteKey:
    """Return what the route of a call is remembered under, which another one has where its shape lasts."""
    return key._replace(is_lasting=True) if LASTING.get(key) else key


def note_shape(problem: Problem, key: RouteKey) -> bool:
    """Note the shape of a call without a route, and return whether those of its family vary."""
    found = None if key.is_lasting else _family(problem, key)
    if found is None:
        return False
    family, most = found
    seen = _FAMILIES.get(family) or frozenset()
    if len(seen) < most and key.shapes not in seen:
        seen = seen | {key.shapes}
        _FAMILIES.put(family, seen)
    return len(seen) >= most


def do_vary(problem: Problem, key: RouteKey) -> bool:
    """Return whether `note_shape` would say that shapes vary, noting nothing."""
    found = None if key.is_lasting else _family(problem, key)
    if found is None:
        return False
    family, most = found
    return len((_FAMILIES.get(family) or frozenset()) | {key.shapes}) >= most


def _family(problem: Problem, key: RouteKey) -> tuple[Hashable, int] | None:
    """Return what calls of other lengths and batch sizes have alike, and from how many shapes on they vary.

    A few queries stay as they are: decoding is not the prompt before it. What a CUDA graph captures runs
    again and again, whatever else is captured.

    Returns:
        None where nobody counts shapes.
    """
    of_query, of_key, of_value = map(len, key.shapes)
    if not of_query == of_key == of_value == _DIMS or is_capturing(problem.query):
        return None
    (_, heads, seqlen_q, head_dim), (_, heads_kv, _, _), (_, _, _, head_dim_v) = key.shapes
    mask = problem.mask
    kinds = tuple(map(type, mask.nodes)) if isinstance(mask, Mask) else type(mask)
    has = (key.bias is None, key.sink is None, key.alibi_slopes is None)
    sizes = (heads, heads_kv, head_dim, head_dim_v, min(seqlen_q, FEW + 1))
    family = (sizes, kinds, has, key[_KIND], key[_NUMBERS])
    return family, VARIED_FEW if seqlen_q <= FEW else VARIED


def place_of(problem: Problem, key: RouteKey) -> object:
    """Return what is the same for all calls like one, whatever the number of their keys.

    Between such calls nothing else differs that checks and descriptions read. None where the number takes
    part in more: in a diagonal, in a tensor, in the memory of keys with gaps between them.
    """
    keys, values, mask = problem.key, problem.value, problem.mask
    if (
        key.memory is None
        or problem.is_causal
        or problem.window is not None
        or problem.bias is not None
        or problem.score_mod is not None
        or problem.given.alibi_slopes is not None
        or not len(key.shapes[0]) == len(keys.shape) == len(values.shape) == _DIMS
        or not _SHORTEST <= keys.shape[2] == values.shape[2]
        # Where queries are as many as keys, neither number comes alone.
        or key.shapes[0][2] == keys.shape[2]
        or 0 in keys.shape
        or not (keys.is_contiguous() and values.is_contiguous())
        or is_capturing(problem.query)
    ):
        return None
    padding: object = None
    if mask is not None:
        if not is_padding(mask, keys):
            return None
        padding = kind_of_padding(mask)
    (batch, heads, _, head_dim), (batch_v, heads_v, _, head_dim_v) = keys.shape, values.shape
    sizes = (key.shapes[0], batch, heads, head_dim, batch_v, heads_v, head_dim_v)
    return (sizes, key.memory[0], key.memory[-1], padding, key[_KIND], key[_BESIDE_MASK])


def is_padding(mask: object, keys: Tensor) -> bool:
    """Return whether a mask is a flag for each key, of which the number of keys changes nothing else."""
    if type(mask) is not KeyPadding or mask.keep is None or mask.keep.dim() != _FLAG_DIMS:
        return False
    return mask.keep.shape[1] == keys.shape[2]


def kind_of_padding(mask: Any) -> object:
    """Return what of such a mask is the same at every number of keys."""
    return mask.finite, mask.keep.shape[0], mask.keep.device
