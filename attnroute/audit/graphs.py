"""Graphs of the cuDNN frontend, as the checks in its headers read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Names:
    """An enumeration of C++: each value is its name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Optional:
    """An optional of C++."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Say whether there is one."""
        return self._value is not None

    def value(self) -> Any:
        """Return it."""
        return self._value

    def value_or(self, other: Any) -> Any:
        """Return it, or another one where there is none."""
        return other if self._value is None else self._value


class _Found:
    """What a map of C++ finds."""

    def __init__(self, second: Any) -> None:
        self.second = second


class Map(dict[str, Any]):
    """A map of C++; what is None is not in it."""

    def find(self, name: str) -> Any:
        """Return what has a name, or the end."""
        return self.end() if self.get(name) is None else _Found(self[name])

    def at(self, name: str) -> Any:
        """Return what has a name."""
        return self[name]

    def end(self) -> Any:
        """Return what is found where nothing is."""
        return None


class _Numbers(list[int]):
    """A vector of C++."""

    def empty(self) -> bool:
        return not self

    def size(self) -> int:
        return len(self)


class GraphTensor:
    """A tensor of a graph, of 16-bit numbers."""

    def __init__(self, dim: Sequence[int] = (), stride: Sequence[int] = ()) -> None:
        self._dim = _Numbers(dim)
        self._stride = _Numbers(stride)
        self._ragged_offset: object = None

    def get_dim(self) -> _Numbers:
        """Return its shape."""
        return self._dim

    def get_stride(self) -> _Numbers:
        """Return its strides."""
        return self._stride

    def get_data_type(self) -> str:
        """Return its dtype."""
        return "HALF"

    def get_ragged_offset(self) -> object:
        """Return where its sequences begin, None in a padded batch."""
        return self._ragged_offset

    def set_ragged_offset(self, offset: object) -> GraphTensor:
        """Say where its sequences begin."""
        self._ragged_offset = offset
        return self

    def set_dim(self, dim: Sequence[int]) -> GraphTensor:
        """Say its shape."""
        self._dim = _Numbers(dim)
        return self

    def set_stride(self, stride: Sequence[int]) -> GraphTensor:
        """Say its strides."""
        self._stride = _Numbers(stride)
        return self

    def _same(self, _: object) -> GraphTensor:
        return self

    set_uid = set_output = set_data_type = set_name = _same


class _Verdict(str):
    """What a check of C++ returns: why it refuses."""

    __slots__ = ()

    def is_good(self) -> bool:
        return not self


class Attributes:
    """The attributes of a node for attention, forward or backward.

    Attributes:
        surface: The check that both forward nodes share.
    """

    def __init__(self, inputs: Map, outputs: Map, given: dict[str, Any]) -> None:
        """Take tensors, and what a graph's method was given."""
        self.surface: Callable[[dict[str, Any]], str]
        self.inputs = inputs
        self.outputs = outputs
        self.padding_mask = given["use_padding_mask"]
        self.diagonal_alignment = given["diagonal_alignment"]
        self.left_bound = Optional(given["diagonal_band_left_bound"])
        self.right_bound = Optional(given["diagonal_band_right_bound"])
        self.attn_scale_value = Optional(given["attn_scale"])
        self.generate_stats = Optional(given.get("generate_stats"))
        self.is_deterministic_algorithm = given.get("use_deterministic_algorithm", False)
        self.max_total_seq_len_q = Optional(given.get("max_total_seq_len_q"))
        self.max_total_seq_len_kv = Optional(given.get("max_total_seq_len_kv"))
        self.alibi_mask = False
        self.attention_score_modifier = None
        self.dropout_probability = self.max_seq_len_kv = Optional()
        self.mma_core_mode = "HALF"
        self.implementation = "COMPOSITE"

    def has_bias(self) -> bool:
        """Say that it has none."""
        return False

    def has_sink_token(self) -> bool:
        """Say whether it has sinks."""
        return self.inputs.find("SINK_TOKEN") is not None

    def has_causal_like_masking(self) -> bool:
        """Say whether the band ends on its right side."""
        return self.right_bound.has_value()

    def has_causal_mask_bottom_right(self) -> bool:
        """Say whether such a band is counted from the bottom right."""
        return self.has_causal_like_masking() and self.diagonal_alignment == "BOTTOM_RIGHT"

    def set_padding_mask(self, on: bool) -> None:
        """Say whether sequences have lengths."""
        self.padding_mask = on

    def set_seq_len_q(self, lengths: object) -> Attributes:
        """Give lengths to queries."""
        self.inputs["SEQ_LEN_Q"] = lengths
        return self

    def set_seq_len_kv(self, lengths: object) -> Attributes:
        """Give lengths to keys."""
        self.inputs["SEQ_LEN_KV"] = lengths
        return self

    def validate_sdpa_support_surface(
        self, context: Any, s_kv: int, is_paged_k: bool, is_paged_v: bool
    ) -> _Verdict:
        """Return why the surface refuses, whose names are those of this object's members."""
        members = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        parameters = {"context": context, "s_kv": s_kv, "is_paged_k": is_paged_k, "is_paged_v": is_paged_v}
        return _Verdict(self.surface({**members, **parameters}))
