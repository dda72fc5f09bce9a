"""The keyword arguments of `attention()` as a type, so that a type checker tells its two results apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from torch import Tensor  # noqa: TC002 - typing.get_type_hints must find it

from attnroute.biases import Bias


class Options(TypedDict, total=False):
    """Every keyword argument but `return_lse`; `attention()` documents them."""

    bias: Tensor | Bias | None
    is_causal: bool
    causal_alignment: str | None
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float
    sink: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    layout: str
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    deterministic: bool | None
    backend: str | None
    prefer: str | Iterable[str] | None
