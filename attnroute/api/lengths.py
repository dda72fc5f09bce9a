"""What calls have in common that differ only in how many keys they have, as the steps of decoding do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnroute.masks import KeyPadding
from attnroute.masks.tracing import is_capturing

if TYPE_CHECKING:
    from attnroute.api.records import Problem, RouteKey

_DIMS: Final = 4
_FLAG_DIMS: Final = 2
_SHORTEST: Final = 2
"""Keys from which on contiguous memory is described alike at every length."""


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
        if type(mask) is not KeyPadding or mask.keep is None or mask.keep.dim() != _FLAG_DIMS:
            return None
        if mask.keep.shape[1] != keys.shape[2]:
            return None
        padding = (mask.finite, mask.keep.shape[0], mask.keep.device)
    (batch, heads, _, head_dim), (batch_v, heads_v, _, head_dim_v) = keys.shape, values.shape
    sizes = (key.shapes[0], batch, heads, head_dim, batch_v, heads_v, head_dim_v)
    return (sizes, key.memory[0], key.memory[-1], padding, key[2:8], key[9:])
