"""`Mask`, the base of all mask objects, and its combinations with `&`, `|` and `~`: All, Either, Not.

A mask object defines who may attend whom without a tensor of all pairs. It can return itself as plain data
for a decision (`describe`), add itself to the form that executors read (`lower`), and become a bool tensor
(`materialize`). Importing this module loads no torch.

Masks are equal when they are made of the same nodes in the same order. Numbers are compared by value, tensors
and functions by identity, because nobody waits for a device to compare what tensors hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

from attnroute.errors import argument_error
from attnroute.masks import picture
from attnroute.masks.lowered.form import FULL, NOBODY, Extent, LoweredMask, intersect
from attnroute.masks.objects.identity import format_field, identity
from attnroute.memory import KEEPER
from attnroute.question import fits
from attnroute.question.nodes import AnyNode, MaskNode, NotNode
from attnroute.question.normalize import alive, conjunction

if TYPE_CHECKING:
    from torch import Tensor

Lengths: TypeAlias = Union[Sequence[int], "Tensor"]


class Mask(ABC):
    """Base of every mask object: a frozen dataclass with ``eq=False, repr=False``: both come from here."""

    _shown: ClassVar[tuple[str, ...]] = ()
    """The fields that `repr` shows by position; it names the others, and leaves out their defaults."""

    @property
    def nodes(self) -> tuple[Mask, ...]:
        """The parts of the conjunction; a single node is its own only part."""
        return (self,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that were given; what is prepared from the mask is stale once one of them changes."""
        return ()

    def __and__(self, other: Mask) -> Mask:
        """Both must allow."""
        if not isinstance(other, Mask):
            return NotImplemented
        return All((*self.nodes, *other.nodes))

    def __or__(self, other: Mask) -> Mask:
        """One of both must allow."""
        if not isinstance(other, Mask):
            return NotImplemented
        return Either((*_alternatives(self), *_alternatives(other)))

    def __invert__(self) -> Mask:
        """What this mask allows is forbidden, and the reverse."""
        return Not(self)

    def __bool__(self) -> bool:
        """A mask is neither true nor false.

        Raises:
            ArgumentError: Always; ``and``, ``or`` and ``not`` would drop a mask without a word.
        """
        to_do = "combine masks with &, | and ~, and compare with `is None`"
        raise argument_error("bool(mask)", "a value that is true or false", repr(self), to_do)

    def __eq__(self, other: object) -> bool:
        """The same nodes with the same numbers and the identical tensors and functions."""
        if not isinstance(other, Mask):
            return NotImplemented
        return type(self) is type(other) and _fields(self) == _fields(other)

    def __hash__(self) -> int:
        """Hash what `==` compares."""
        return hash((type(self), _fields(self)))

    def __repr__(self) -> str:
        """Return the code that makes the mask, with dtype and shape in place of tensors."""
        parts = [format_field(getattr(self, name)) for name in self._shown]
        own: Sequence[Field[Any]] = fields(self) if is_dataclass(self) else ()
        for field in own:
            value = getattr(self, field.name)
            if field.name not in self._shown and identity(value) != identity(field.default):
                parts.append(f"{field.name}={format_field(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str | None:
        """Return the mask as a small picture for a notebook; None, which shows its text, if there is none."""
        try:
            return self._picture()
        except Exception:  # noqa: BLE001 - a mask_mod may raise anything, and what only shows a mask must not
            return None

    def _picture(self) -> str:
        wish = self._wish()
        lengths = (
            wish.seqlen_q or wish.seqlen_kv or picture.LENGTH,
            wish.seqlen_kv or wish.seqlen_q or picture.LENGTH,
        )
        device = next((tensor.device for tensor in self.tensors), None)
        extent = Extent(max(wish.batch, 1), max(wish.heads, 1), *lengths, device)
        self.check(extent)
        return picture.html(repr(self), extent, self._grids(extent))

    def _grids(self, extent: Extent) -> list[picture.Grid]:
        rows = range(min(extent.batch, picture.ROWS))
        plain = [picture.grid_of_nodes(self.describe(extent), row, extent) for row in rows]
        if None not in plain:
            return [grid for grid in plain if grid is not None]
        lowered = self.lower(FULL, extent)
        return [picture.grid_of_lowered(lowered, row, extent) for row in rows]

    def _wish(self) -> picture.Wish:
        """Return at which sizes a picture shows what the mask does."""
        return picture.Wish()

    @abstractmethod
    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return this mask as plain data, reading no device memory."""

    @abstractmethod
    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Return `into` with this mask added to it."""

    def key(self) -> object:
        """Return a hashable value that is equal only for masks with equal descriptions at equal extents."""
        return self

    def check(self, extent: Extent) -> None:  # noqa: B027 - most nodes fit every extent
        """Raise an ArgumentError when the mask cannot be read at this extent."""

    def materialize(
        self, seqlen_q: int, seqlen_kv: int, *, batch: int = 1, num_heads_q: int = 1, device: object = None
    ) -> Tensor:
        """Return the mask as a bool tensor, True = attend.

        Args:
            seqlen_q: Query length.
            seqlen_kv: Key length.
            batch: Batch size.
            num_heads_q: Query heads.
            device: Where the tensor lies; the CPU by default.

        Returns:
            Shape (batch or 1, num_heads_q or 1, seqlen_q, seqlen_kv).
        """
        # Importing torch here keeps mask objects usable where torch is not installed.
        from attnroute.masks.lowered.dense import materialize

        extent = Extent(batch, num_heads_q, seqlen_q, seqlen_kv, device)
        self.check(extent)
        return materialize(self.lower(FULL, extent), extent)


def _fields(mask: Mask) -> object:
    return tuple((name, identity(value)) for name, value in vars(mask).items() if name != KEEPER)


class _Combined(Mask):
    """A combination of parts, which hold its tensors and checks."""

    @property
    @abstractmethod
    def members(self) -> tuple[Mask, ...]:
        """The masks that are combined."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every part's tensors."""
        return tuple(t for part in self.members for t in part.tensors)

    def _wish(self) -> picture.Wish:
        return picture.together(part._wish() for part in self.members)  # noqa: SLF001 - parts are masks too

    def key(self) -> object:
        """Return the parts' keys."""
        return (type(self).__name__, *(part.key() for part in self.members))

    def check(self, extent: Extent) -> None:
        """Check every part."""
        for part in self.members:
            part.check(extent)


@dataclass(frozen=True, eq=False, repr=False)
class All(_Combined):
    """A conjunction, as `&` makes it. Of no parts, it allows everything."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        """Every part must be a mask."""
        _check_parts("All", self.parts)

    @property
    def members(self) -> tuple[Mask, ...]:
        """The parts."""
        return self.parts

    @property
    def nodes(self) -> tuple[Mask, ...]:
        """The parts, those of conjunctions among them laid open."""
        return tuple(node for part in self.parts for node in part.nodes)

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return every part's data in order."""
        return tuple(n for part in self.parts for n in part.describe(extent))

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add every part."""
        for part in self.parts:
            into = part.lower(into, extent)
        return into

    def __repr__(self) -> str:
        """Return the code that makes the mask."""
        if len(self.parts) < 2:
            return f"All({self.parts!r})"
        return " & ".join(f"({part!r})" if isinstance(part, Either) else repr(part) for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Either(_Combined):
    """A disjunction, as `|` makes it. Of no parts, it allows nothing."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        """Every part must be a mask."""
        _check_parts("Either", self.parts)

    @property
    def members(self) -> tuple[Mask, ...]:
        """The parts."""
        return self.parts

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return one node that holds every part's data."""
        return (AnyNode(parts=tuple(part.describe(extent) for part in self.parts)),)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add one disjunction of the parts that matter, which are those that the decision was based on."""
        return intersect(into, prepared(self, extent, lambda: self._lowered(extent)))

    def _lowered(self, extent: Extent) -> LoweredMask:
        # The decision was made without the parts that rule nothing out, so they may not be here either.
        found = alive([part.describe(extent) for part in self.parts], extent.sizes)
        if found is None:
            return FULL
        lowered = tuple(self.parts[place].lower(FULL, extent) for place, _ in found)
        if len(lowered) < 2:
            return lowered[0] if lowered else NOBODY
        return LoweredMask(either=(lowered,))

    def __repr__(self) -> str:
        """Return the code that makes the mask."""
        return f"Either({self.parts!r})" if len(self.parts) < 2 else " | ".join(map(repr, self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class Not(_Combined):
    """A negation, as `~` makes it."""

    part: Mask

    def __post_init__(self) -> None:
        """The part must be a mask."""
        _check_parts("Not", (self.part,))

    @property
    def members(self) -> tuple[Mask, ...]:
        """The part."""
        return (self.part,)

    def __invert__(self) -> Mask:
        """Two negations undo each other."""
        return self.part

    def describe(self, extent: Extent) -> tuple[MaskNode, ...]:
        """Return one node that holds the part's data."""
        return (NotNode(part=self.part.describe(extent)),)

    def lower(self, into: LoweredMask, extent: Extent) -> LoweredMask:
        """Add one negation; a negation of a negation is what that negates."""
        return intersect(into, prepared(self, extent, lambda: self._lowered(extent)))

    def _lowered(self, extent: Extent) -> LoweredMask:
        if allows_all(self, extent):
            return FULL
        inner = self.part.nodes
        if len(inner) == 1 and isinstance(inner[0], Not):
            return inner[0].part.lower(FULL, extent)
        return LoweredMask(exclude=(self.part.lower(FULL, extent),))

    def __repr__(self) -> str:
        """Return the code that makes the mask."""
        is_longer = isinstance(self.part, All | Either) and len(self.part.parts) > 1
        return f"~({self.part!r})" if is_longer else f"~{self.part!r}"


def prepared(mask: Mask, extent: Extent, make: Callable[[], LoweredMask]) -> LoweredMask:
    """Return what a mask is lowered to alone, made once per extent as long as none of its tensors changes."""
    # Imported here for the same reason.
    from attnroute.masks.kept import remember

    return remember(mask, ("lowered", extent), make)


def allows_all(mask: Mask, extent: Extent) -> bool:
    """Return whether the mask rules nothing out at these sizes, so that the decision is made without it.

    It must then not be in the lowered mask either: the chosen kernel may not support it.
    """
    return not conjunction(mask.describe(extent), extent.sizes)


def _check_parts(name: str, parts: Any) -> None:
    if not (isinstance(parts, tuple) and all(isinstance(part, Mask) for part in parts)):
        got = [type(part).__name__ for part in parts] if isinstance(parts, list | tuple) else parts
        raise argument_error(f"mask {name}", "a tuple of masks", got, "combine masks with & and |")
    fits.depth(1 + max([0, *[_depth(part) for part in parts]]))


def _depth(mask: Mask) -> int:
    # dynamo follows this, and knows neither a map here nor a default of max.
    return 1 + max([0, *[_depth(part) for part in mask.members]]) if isinstance(mask, _Combined) else 0


def _alternatives(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, Either) else (mask,)
