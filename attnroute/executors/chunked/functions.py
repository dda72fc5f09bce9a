"""The functions of a call on tiles of scores: its score function, and which tensors its functions read.

Functions read tensors that no argument names. They are found by calling each function once, at one position,
and looking at what its torch operations are given; so a gradient that such a tensor wants is never missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attnroute.masks.lowered.pointwise import evaluate
from attnroute.masks.lowered.region import Region, allowed

if TYPE_CHECKING:
    from attnroute.executors.chunked.tile import Spec
    from attnroute.executors.protocol import ScoreMod
    from attnroute.masks.lowered.form import LoweredMask


class Reads(NamedTuple):
    """The tensors that the functions of a call read, apart from those that they make."""

    mask: tuple[Tensor, ...] = ()
    score: tuple[Tensor, ...] = ()

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """Those that get a gradient: a mask gives none."""
        return tuple(t for t in self.score if t.requires_grad)

    @property
    def watched(self) -> tuple[Tensor, ...]:
        """Those whose changes before backward autograd can notice."""
        return tuple(t for t in (*self.mask, *self.score) if not t.is_inference())


def reads_of(spec: Spec, query: Tensor, key: Tensor) -> Reads:
    """Return what the functions of a call read."""
    without = spec.program is None and spec.score_mod is None
    if without or 0 in (*query.shape[:3], key.shape[2]):
        return Reads()
    place = Region(0, 1, 0, 1, 0, 1, 0, 1, query.device)
    mask, score = _Reading(), _Reading()
    with torch.no_grad():
        if spec.program is not None:
            with mask:
                allowed(spec.program, place)
        if spec.score_mod is not None:
            with score:
                wide = torch.float64 if query.dtype == torch.float64 else torch.float32
                start = torch.zeros((1, 1, 1, 1), dtype=wide, device=query.device)
                evaluate(spec.score_mod, place, score=start)
    return Reads(mask.found, score.found)


def is_wide(program: LoweredMask) -> bool:
    """Return whether evaluating a mask may make tensors as large as a tile, with all its heads or rows."""
    functions = any(f.per_batch or f.per_head for f in program.functions)
    blocks = any(max(mask.shape[:2]) > 1 for mask in program.sparse)
    parts = (*program.exclude, *(part for alternatives in program.either for part in alternatives))
    return functions or blocks or any(is_wide(part) for part in parts)


class ScoreFunction:
    """A score function, and before it the softcap, on tiles in both directions."""

    def __init__(
        self, function: ScoreMod, softcap: float, trained: tuple[Tensor, ...], dtype: torch.dtype
    ) -> None:
        """Prepare for the tiles of one pass.

        Args:
            function: ``(score, batch, head, query index, key index) -> score``.
            softcap: As in `Spec`; the function takes what it leaves.
            trained: Tensors that the function reads and that want a gradient. It reads copies in `dtype`.
            dtype: That of the scores.
        """
        self._function, self._softcap = function, softcap
        self._leaves = tuple(t.detach().to(dtype).requires_grad_() for t in trained)
        self._standing = _Standing(dict(zip(map(id, trained), self._leaves, strict=True)))
        self.grads = tuple(torch.zeros_like(leaf) for leaf in self._leaves)

    def apply(self, region: Region, scores: Tensor) -> None:
        """Replace scaled scores, (units, rows, keys), by what the function makes of them."""
        if self._softcap:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        view = _by_position(scores, region)
        view.copy_(self._values(view, region))

    def apply_on_tape(self, region: Region, scores: Tensor) -> Tape:
        """Do what `apply` does and return what `pull` needs."""
        view = _by_position(scores, region)
        start = view.clone().requires_grad_()
        with torch.enable_grad():
            capped = self._softcap * torch.tanh(start / self._softcap) if self._softcap else start
            values = self._values(capped, region).to(start.dtype)
        view.copy_(values.detach())
        return Tape(region, start, values)

    def pull(self, tape: Tape, grad: Tensor, into: Tensor) -> None:
        """Turn the gradient of the function's values into that of the scaled scores.

        Adds to `grads` what belongs to the tensors that the function reads.

        Args:
            tape: Of the same tile.
            grad: (units, rows, keys), the gradient of the values. Where it is 0, as behind a mask, so is the
                result, whatever the function's slope there.
            into: Same shape, receives the result; may be `grad`.
        """
        wanted = _by_position(grad, tape.region)
        found: tuple[Tensor | None, ...] = (None,) * (1 + len(self._leaves))
        if tape.values.requires_grad:
            inputs = (tape.start, *self._leaves)
            found = torch.autograd.grad(tape.values, inputs, wanted, allow_unused=True)
        for total, part in zip(self.grads, found[1:], strict=True):
            if part is not None:
                total.add_(part)
        if found[0] is None:
            into.zero_()
        else:
            _by_position(into, tape.region).copy_(found[0].masked_fill(wanted == 0.0, 0.0))

    def _values(self, scores: Tensor, region: Region) -> Tensor:
        if not self._leaves:
            return evaluate(self._function, region, score=scores)
        with self._standing:
            return evaluate(self._function, region, score=scores)


class Tape(NamedTuple):
    """One tile's way through a score function: the scaled scores, and the function's values."""

    region: Region
    start: Tensor
    values: Tensor


class _Reading(TorchFunctionMode):
    """Notes the tensors that torch operations are given and that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    @property
    def found(self) -> tuple[Tensor, ...]:
        return tuple(self._found.values())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not self._is_own(leaf):
                self._found[id(leaf)] = leaf
        result = func(*args, **(kwargs or {}))
        self._made |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _is_own(self, tensor: Tensor) -> bool:
        """Positions, and all that is computed from them, are wrapped by vmap."""
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # type: ignore[attr-defined]
        return bool(wrapped) or id(tensor) in self._made


class _Standing(TorchFunctionMode):
    """Gives torch operations other tensors in the place of some, by identity."""

    def __init__(self, stands_for: dict[int, Tensor]) -> None:
        super().__init__()
        self._stands_for = stands_for

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self._stands_for.get(id(tensor), tensor), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _by_position(scores: Tensor, region: Region) -> Tensor:
    """View (units, rows, keys) as (batch rows, query heads, queries, keys)."""
    batch, heads, queries = region.b1 - region.b0, region.h1 - region.h0, region.i1 - region.i0
    return scores.view(batch, heads, queries, scores.shape[2])
