"""Tensors, mask and arguments of a call of the sweep, for `attention()` and for stock attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnroute import masks

if TYPE_CHECKING:
    from sweep_calls import SweepCall

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
LARGEST_STOCK_MASK = 2**30
"""Bytes of the largest mask tensor that is made for stock attention."""


class Problem(NamedTuple):
    """What one call is made of.

    Attributes:
        tensors: Query, key and value.
        ours: The other arguments of `attention()`; mask objects are made once, as a model makes them.
        stock: Returns the other arguments of stock attention; None where it cannot say the call.
        leaves: What gets a gradient; empty in inference.
        grad: The gradient of the output.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    ours: dict[str, Any]
    stock: Callable[[], dict[str, Any]] | None
    leaves: tuple[Tensor, ...]
    grad: Tensor


def build(call: SweepCall, device: str) -> Problem:
    """Make the tensors of a call, the same each time."""
    torch.manual_seed(0)
    trains = call.phase == "training"
    dtype = DTYPES[call.dtype]
    tensors = tuple(
        _stored(call, heads, seqlen, width, device).requires_grad_(trains)
        for heads, seqlen, width in (
            (call.heads[0], call.seqlen_q, call.dims[0]),
            (call.heads[1], call.seqlen_kv, call.dims[0]),
            (call.heads[1], call.seqlen_kv, call.dims[1]),
        )
    )
    grad = _stored(call, call.heads[0], call.seqlen_q, call.dims[1], device)
    ours, allowed = _thd(call, device) if call.is_thd else _mask(call, device)
    scores = _scores(call, device, dtype)
    stock = None if call.is_thd else _stock(call, allowed, scores, device, dtype)
    trained = tuple(t for t in scores.values() if isinstance(t, Tensor) and t.requires_grad)
    leaves = (*tensors, *trained) if trains else ()
    return Problem(tensors, ours | scores, stock, leaves, grad)  # type: ignore[arg-type]


def _stored(call: SweepCall, heads: int, seqlen: int, width: int, device: str) -> Tensor:
    if call.is_thd:
        shape: tuple[int, ...] = (seqlen, heads, width)
    elif call.memory == "tokens":
        shape = (call.batch, seqlen, heads, width)
    else:
        shape = (call.batch, heads, seqlen, width)
    tensor = torch.randn(shape, device=device, dtype=DTYPES[call.dtype])
    return tensor.transpose(1, 2) if call.memory == "tokens" and not call.is_thd else tensor


def parts(total: int, count: int) -> list[int]:
    """Return lengths that differ and sum to a total, at most so many."""
    count = max(1, min(count, total))
    weights = [1.0 + (i * 0.618) % 1 for i in range(count)]
    lengths = [max(1, int(total * w / sum(weights))) for w in weights]
    lengths[-1] += total - sum(lengths)
    return lengths if lengths[-1] > 0 else [total]


def _distance(call: SweepCall, device: str, *, bottom_right: bool) -> Tensor:
    """Return for each query and key how far the key lies behind the diagonal."""
    offset = call.seqlen_kv - call.seqlen_q if bottom_right else 0
    rows = torch.arange(call.seqlen_q, device=device)[:, None] + offset
    return torch.arange(call.seqlen_kv, device=device) - rows


Allowed = Callable[[], Tensor | None]
"""Makes the bool tensor of who may attend whom; None is everybody."""


def window_of(call: SweepCall) -> tuple[int, int]:
    """Return how many keys before and after the diagonal a window mask allows."""
    if call.mask.endswith("large"):
        return max(1, call.seqlen_kv // 3), 0
    return (256, 256) if call.mask.endswith("sides") else (127, 0)


def _mask(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    return _MADE[call.mask.partition("_")[0]](call, device)


def _none(*_: object) -> tuple[dict[str, Any], Allowed]:
    return {}, lambda: None


def _causal(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    bottom_right = call.mask.endswith("br")
    corner = {"causal_alignment": "bottom_right"} if bottom_right else {}
    return {"is_causal": True, **corner}, lambda: _distance(call, device, bottom_right=bottom_right) <= 0


def _window(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    left, right = window_of(call)

    def allowed() -> Tensor:
        distance = _distance(call, device, bottom_right=True)
        return (distance >= -left) & (distance <= right)

    return {"window": (left, right), "causal_alignment": "bottom_right"}, allowed


def _documents(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    lengths = parts(call.seqlen_q, 3 if call.mask.endswith("few") else 16)
    mask: Any = masks.Documents(lengths=lengths)
    full = call.mask.endswith("full")

    def allowed() -> Tensor:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        same = ids[:, None] == ids
        return same if full else same & (_distance(call, device, bottom_right=False) <= 0)

    return {"mask": mask if full else masks.Causal() & mask}, allowed


def _padding(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    shares = torch.linspace(1.0, 0.5, call.batch + 1)[1:]
    counts = (shares * call.seqlen_kv).long().clamp_min(1).to(device)
    is_right, causal = "right" in call.mask, call.mask.endswith("causal")
    mask: Any = (
        masks.KeyPadding(lengths=counts) if is_right else masks.KeyPadding(left=call.seqlen_kv - counts)
    )

    def allowed() -> Tensor:
        keys = torch.arange(call.seqlen_kv, device=device)
        kept = keys < counts[:, None] if is_right else keys >= call.seqlen_kv - counts[:, None]
        whole = kept[:, None, None]
        return whole & (_distance(call, device, bottom_right=True) <= 0) if causal else whole

    return {"mask": masks.Causal("bottom_right") & mask if causal else mask}, allowed


def _bools(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    if call.mask == "bool_causal":
        tensor = _distance(call, device, bottom_right=False) <= 0
    else:
        rows = (call.batch, 1) if call.mask == "bool_batch" else ()
        tensor = torch.rand((*rows, call.seqlen_q, call.seqlen_kv), device=device, dtype=torch.float16) < 0.6
        tensor[..., 0] = True
    return {"mask": tensor}, lambda: tensor


def _prefix(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    lengths = [max(1, call.seqlen_kv // (3 + i % 3)) for i in range(call.batch)]

    def allowed() -> Tensor:
        keys = torch.arange(call.seqlen_kv, device=device)
        prefix = keys < torch.tensor(lengths, device=device)[:, None, None, None]
        return prefix | (_distance(call, device, bottom_right=False) <= 0)

    return {"mask": masks.PrefixLM(lengths)}, allowed


def _function(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    offset = call.seqlen_kv - call.seqlen_q

    def strided(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        distance = query + offset - key
        return (distance >= 0) & ((distance < 64) | (key % 64 == 0))

    def allowed() -> Tensor:
        keys = torch.arange(call.seqlen_kv, device=device)
        distance = -_distance(call, device, bottom_right=True)
        return (distance >= 0) & ((distance < 64) | (keys % 64 == 0))

    return {"mask": masks.Function(strided, per_batch=False, per_head=False)}, allowed


_MADE: dict[str, Callable[[SweepCall, str], tuple[dict[str, Any], Allowed]]] = {
    "none": _none,
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    "pad": _padding,
    "bool": _bools,
    "prefix": _prefix,
    "function": _function,
}
"""By the first word of a mask's name."""


def _thd(call: SweepCall, device: str) -> tuple[dict[str, Any], Allowed]:
    lengths = parts(call.seqlen_q, call.batch)
    sums = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    options: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": sums, "max_seqlen_q": max(lengths)}
    if call.mask == "thd_window":
        options["window"] = window_of(call)
    elif call.mask == "thd_causal":
        options["is_causal"] = True
    return options, lambda: None


def _scores(call: SweepCall, device: str, dtype: torch.dtype) -> dict[str, Any]:
    heads, trains = call.heads[0], call.phase == "training"
    if call.extra == "sink":
        return {"sink": torch.randn(heads, device=device).requires_grad_(trains)}
    if call.extra == "softcap":
        return {"softcap": 30.0}
    if call.extra == "alibi":
        slopes = [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
        return {"alibi_slopes": torch.tensor(slopes, device=device)}
    if call.extra in ("bias", "bias_grad"):
        shape = (1, heads, call.seqlen_q, call.seqlen_kv)
        bias = torch.randn(shape, device=device, dtype=dtype)
        return {"bias": bias.requires_grad_(trains and call.extra == "bias_grad")}
    return {}


def _stock(
    call: SweepCall, allowed: Allowed, scores: dict[str, Any], device: str, dtype: torch.dtype
) -> Callable[[], dict[str, Any]] | None:
    """Return the arguments of stock attention; a bias that trains is masked in each call, the rest before."""
    if call.extra in ("sink", "softcap"):
        return None
    if call.extra == "none" and call.mask in ("none", "causal"):
        options = {"is_causal": True} if call.mask == "causal" else {}
        return lambda: options
    per_entry = 2 * call.heads[0] if call.extra != "none" else 1
    rows = call.batch if call.mask.startswith(("pad", "prefix", "bool_batch")) else 1
    if per_entry * rows * call.seqlen_q * call.seqlen_kv > LARGEST_STOCK_MASK:
        return None
    who = allowed()
    if call.extra == "none":
        return lambda: {"attn_mask": who}
    bias = scores.get("bias")
    if bias is None:
        slopes = scores["alibi_slopes"][:, None, None]
        bias = (-slopes * _distance(call, device, bottom_right=True).abs()).to(dtype)[None]
    if bias.requires_grad:
        return lambda: {"attn_mask": bias if who is None else bias.masked_fill(~who, -math.inf)}
    term = bias if who is None else bias.masked_fill(~who, -math.inf)
    return lambda: {"attn_mask": term}
