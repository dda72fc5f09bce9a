"""Tensors of a case in the memory that it names, what `attention()` is given, and the float64 truth."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnroute import masks

if TYPE_CHECKING:
    from right_cases import Case

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_GARBAGE = {"nan": math.nan, "inf": math.inf, "huge": 3e4}


class Problem(NamedTuple):
    """What one case is made of.

    Attributes:
        given: The tensors that `attention()` gets, in its layout; those that train require a gradient.
        mask: The mask object or tensor, or None.
        options: The keyword arguments.
        clean: The same query, key and value as (batch, heads, seqlen, head_dim), without garbage.
        truth: What `attend` is told besides.
        left_out: Bool (batch, 1, seqlen_kv, 1), where garbage stands; None without.
    """

    given: tuple[Tensor, Tensor, Tensor]
    mask: Any
    options: dict[str, Any]
    clean: tuple[Tensor, Tensor, Tensor]
    truth: dict[str, Any]
    left_out: Tensor | None


_ORDERS = {
    "plain": (0, 1, 2, 3),
    "tokens_outer": (0, 2, 1, 3),
    "sbhd": (2, 0, 1, 3),
    "dim_strided": (0, 1, 3, 2),
}
"""Which dimension of (batch, heads, seqlen, head_dim) lies outermost, and so on."""


def build(case: Case, device: str) -> Problem:
    """Make the tensors of a case."""
    torch.manual_seed(case.seed)
    batch, seqlen_q, seqlen_kv = (1, *_totals(case)) if case.api == "thd" else case.lengths
    clean = _numbers(case, batch, seqlen_q, seqlen_kv, device)
    mask, options, allowed, left_out = _who(case, batch, seqlen_q, seqlen_kv, device)
    truth: dict[str, Any] = {"allowed": allowed}
    _scores(case, options, truth, (batch, seqlen_q, seqlen_kv), device)
    if case.phase.endswith("lse"):
        options["return_lse"] = True
    dirty = clean
    if left_out is not None and case.garbage != "none":
        filled = (t.masked_fill(left_out, _GARBAGE[case.garbage]) for t in clean[1:])
        dirty = (clean[0], *filled)  # type: ignore[assignment]
    trains = case.phase.startswith("train")
    names = case.query, case.key, case.value
    given = tuple(
        outward(case, stored(t, name)).requires_grad_(trains) for t, name in zip(dirty, names, strict=True)
    )
    # What storage makes of a tensor may hold other numbers: one head stands for all.
    clean = tuple(_same(stored(t, n)) for t, n in zip(clean, names, strict=True))  # type: ignore[assignment]
    return Problem(given, mask, options, clean, truth, left_out)  # type: ignore[arg-type]


def outward(case: Case, tensor: Tensor) -> Tensor:
    """Return a view in the layout of the call of a tensor (batch, heads, seqlen, head_dim); a new leaf."""
    tensor = tensor.detach()
    if case.api == "bshd":
        return tensor.transpose(1, 2)
    return tensor[0].transpose(0, 1) if case.api == "thd" else tensor


def inward(case: Case, tensor: Tensor) -> Tensor:
    """Undo `outward`."""
    if case.api == "bshd":
        return tensor.transpose(1, 2)
    return tensor.transpose(0, 1)[None] if case.api == "thd" else tensor


def stored(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor (batch, heads, seqlen, head_dim) that lies in memory as the name says."""
    batch, heads, seqlen, width = tensor.shape
    rows = tensor.transpose(1, 2)
    if name in _ORDERS:
        order = _ORDERS[name]
        return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
    if name == "shifted":
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if name == "row_gap":
        return torch.cat([tensor, tensor], -1)[..., :width]
    if name == "one_head":
        return tensor[:, :1].contiguous().expand(-1, heads, -1, -1)
    if name == "one_batch":
        return tensor[:1].contiguous().expand(batch, -1, -1, -1)
    extra = {"qkv": 0, "qkv_8b": 4, "qkv_odd": 1}[name]
    wide = tensor.new_zeros(batch, seqlen, 3 * heads * width + extra)
    part = wide[..., heads * width + extra : 2 * heads * width + extra].unflatten(-1, (heads, width))
    return part.copy_(rows).transpose(1, 2)


def cotangent(case: Case, like: Tensor) -> Tensor:
    """Return the gradient of an output that is given as (batch, heads, seqlen, head_dim), in its memory."""
    whole = torch.randn(like.shape, device=like.device).to(like.dtype)
    zero = {"last_0": 3, "heads_0": 1, "tokens_0": 2}
    if case.grad == "scalar":
        return whole.new_ones(()).expand(whole.shape)
    if case.grad in zero:
        return whole.narrow(zero[case.grad], 0, 1).contiguous().expand(whole.shape)
    return stored(whole, case.grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _numbers(
    case: Case, batch: int, seqlen_q: int, seqlen_kv: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = DTYPES[case.dtype]

    def draw(heads: int, seqlen: int, width: int) -> Tensor:
        return torch.randn(batch, heads, seqlen, width, device=device)

    (heads_q, heads_kv), (width, width_v) = case.heads, case.dims
    query, key = draw(heads_q, seqlen_q, width), draw(heads_kv, seqlen_kv, width)
    value = draw(heads_kv, seqlen_kv, width_v)
    if case.values == "near_-120":
        query.zero_()[..., 0] = 1.0
        key *= 0.1
        key[..., 0] = -120.0 * width**0.5
    elif case.values == "sharp":
        query, key = query * 4, key * 4
    elif case.values == "large":
        value = value * 300
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _parts(total: int) -> list[int]:
    """Return lengths that sum to a total, an empty one among them."""
    if total < 8:
        return [total]
    first, third = total // 3, total // 7
    return [first, 0, third, 1, total - first - third - 1]


def _totals(case: Case) -> tuple[int, int]:
    return case.lengths[1], case.lengths[2]


_BANDS: dict[str, tuple[int | None, int | None]] = {
    "none": (None, None),
    "causal": (None, 0),
    "window": (37, 0),
    "sides": (20, 33),
    "future": (None, 5),
}


def _who(case: Case, batch: int, seqlen_q: int, seqlen_kv: int, device: str) -> tuple[Any, ...]:
    """Return mask, arguments, who may attend (None is everybody) and which keys are left out altogether."""
    if case.api == "thd":
        return _packed(case, seqlen_q, seqlen_kv, device)
    word, _, corner = case.mask.partition("_")
    if word in _BANDS:
        band = _BANDS[word]
        allowed = _between(_distance(seqlen_q, seqlen_kv, device, corner), *band)
        return None, _band_arguments(band, corner), allowed, None
    if word == "dense":
        shape = (batch, case.heads[0] if corner else 1, seqlen_q, seqlen_kv)
        tensor = torch.rand(shape, device=device) < 0.6
        tensor[:, :, ::7] = False
        return tensor, {}, tensor, None
    if word == "documents":
        return _documents(case, seqlen_q, device)
    counts = torch.linspace(seqlen_kv, max(1, seqlen_kv // 3), batch + 1, device=device)[1:].long()
    keys = torch.arange(seqlen_kv, device=device)
    kept = keys < counts[:, None] if "right" in case.mask else keys >= seqlen_kv - counts[:, None]
    mask: Any = (
        masks.KeyPadding(lengths=counts)
        if "right" in case.mask
        else masks.KeyPadding(left=seqlen_kv - counts)
    )
    allowed = kept[:, None, None]
    if case.mask.endswith("causal"):
        mask = masks.Causal("bottom_right") & mask
        allowed = allowed & _between(_distance(seqlen_q, seqlen_kv, device, "br"), None, 0)
    return mask, {}, allowed, ~kept[:, None, :, None]


def _documents(case: Case, seqlen: int, device: str) -> tuple[Any, ...]:
    lengths = [n for n in _parts(seqlen) if n]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    allowed = ids[:, None] == ids
    mask: Any = masks.Documents(lengths=lengths)
    distance = _distance(seqlen, seqlen, device, "tl")
    if case.mask.endswith("causal"):
        return masks.Causal() & mask, {}, allowed & (distance <= 0), None
    if case.mask.endswith("window"):
        return masks.Window(37, 0) & mask, {}, allowed & (distance <= 0) & (distance >= -37), None
    return mask, {}, allowed, None


def _packed(case: Case, total_q: int, total_kv: int, device: str) -> tuple[Any, ...]:
    lengths_q = _parts(total_q)
    lengths_kv = lengths_q if total_q == total_kv else _parts(total_kv)
    if len(lengths_kv) != len(lengths_q):
        lengths_q, lengths_kv = [total_q], [total_kv]
    word, _, corner = case.mask.partition("_")
    options = _band_arguments(_BANDS[word], corner)
    sums = [
        torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_kv)
    ]
    options |= {"layout": "thd", "cu_seqlens_q": sums[0], "max_seqlen_q": max(lengths_q)}
    if lengths_kv is not lengths_q:
        options |= {"cu_seqlens_kv": sums[1], "max_seqlen_kv": max(lengths_kv)}
    allowed = torch.zeros(total_q, total_kv, dtype=torch.bool, device=device)
    starts = zip(sums[0].tolist(), sums[1].tolist(), lengths_q, lengths_kv, strict=False)
    for q0, k0, q, k in starts:
        inside = _between(_distance(q, k, device, corner), *_BANDS[word])
        allowed[q0 : q0 + q, k0 : k0 + k] = True if inside is None else inside
    return None, options, allowed, None


def _band_arguments(band: tuple[int | None, int | None], corner: str) -> dict[str, Any]:
    if band == (None, None):
        return {}
    alignment = {"causal_alignment": {"tl": "top_left", "br": "bottom_right"}[corner]}
    return {"is_causal": True, **alignment} if band == (None, 0) else {"window": band, **alignment}


def _distance(seqlen_q: int, seqlen_kv: int, device: str, corner: str) -> Tensor:
    offset = seqlen_kv - seqlen_q if corner == "br" else 0
    rows = torch.arange(seqlen_q, device=device)[:, None] + offset
    return torch.arange(seqlen_kv, device=device) - rows


def _between(distance: Tensor, left: int | None, right: int | None) -> Tensor | None:
    if left is None and right is None:
        return None
    allowed = torch.ones_like(distance, dtype=torch.bool)
    allowed = allowed if left is None else allowed & (distance >= -left)
    return allowed if right is None else allowed & (distance <= right)


def _scores(
    case: Case, options: dict[str, Any], truth: dict[str, Any], sizes: tuple[int, int, int], device: str
) -> None:
    heads = case.heads[0]
    trains = case.phase.startswith("train")
    _, seqlen_q, seqlen_kv = sizes
    if case.extra == "scale":
        options["scale"] = truth["scale"] = 0.31
    elif case.extra == "softcap":
        options["softcap"] = truth["softcap"] = 3.0
    elif case.extra == "sink":
        options["sink"] = torch.randn(heads, device=device).requires_grad_(trains)
    elif case.extra == "alibi":
        options["alibi_slopes"] = truth["alibi_slopes"] = torch.rand(heads, device=device) * 0.2
    elif case.extra.startswith("bias"):
        bias = torch.randn(1, heads, seqlen_q, seqlen_kv, device=device).to(DTYPES[case.dtype])
        options["bias"] = bias.requires_grad_(trains and case.extra == "bias_train")
    truth.update({n: options[n] for n in ("sink", "bias") if n in options})
