"""Makes tensors, mask and arguments of a call that was recorded, of random values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attnroute import biases, masks
from attnroute.api.records import Given
from attnroute.masks.objects.base import Mask
from attnroute.masks.objects.captures import captured_tensors
from attnroute.question.call import Call
from attnroute.question.nodes import (
    AlibiBias,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    MaskNode,
    PrefixNode,
    WindowNode,
)

if TYPE_CHECKING:
    from attnroute.api.recording import TracedCall

_DOCUMENTS: Final = 4
"""How many documents a mask has that does not say it."""
_ALLOWED: Final = 0.6
"""The share of allowed pairs in a bool mask of no known structure."""
_ROW: Final = 8
"""Rows of a mask or bias are aligned where their strides are multiples of this."""


class Problem(NamedTuple):
    """A call that can be run.

    Attributes:
        given: The arguments of `attention()`.
        leaves: What gets a gradient, by name; empty in inference.
        grad: The gradient of the output.
    """

    given: Given
    leaves: dict[str, Tensor]
    grad: Tensor


def remake(traced: TracedCall) -> Problem:
    """Return the tensors of a recorded call, the same each time, on its device."""
    call = traced.call
    torch.manual_seed(0)
    orders = traced.memory or ("bshd" if call.mask and call.strides.tokens_contiguous else "bhsd",) * 3
    trains = call.phase == "training" and call.qkv_requires_grad is not False
    sizes = (
        (call.num_heads_q, call.seqlen_q, call.head_dim_qk),
        (call.num_heads_kv, call.seqlen_kv, call.head_dim_qk),
        (call.num_heads_kv, call.seqlen_kv, call.head_dim_v),
    )
    tensors = [
        _in_layout(call, _stored(call, traced.device, shape, order, is_kv=at > 0)).requires_grad_(trains)
        for at, (shape, order) in enumerate(zip(sizes, orders, strict=True))
    ]
    grad_shape = (call.num_heads_q, call.seqlen_q, call.head_dim_v)
    grad = _in_layout(call, _filled(call, traced.device, grad_shape, orders[0]))
    options: dict[str, Any] = {**_mask(call, traced.device), **_scores(call, traced.device), **_numbers(call)}
    query, key, value = tensors
    given = Given(query, key, value, **options)
    return Problem(given, _leaves(given) if call.phase == "training" else {}, grad)


def _leaves(given: Given) -> dict[str, Tensor]:
    bias = given.bias
    found: dict[str, object] = {name: getattr(given, name) for name in ("query", "key", "value")}
    found |= {"sink": given.sink, "alibi_slopes": given.alibi_slopes, "bias": bias}
    if isinstance(bias, biases.Function):
        (found["bias"],) = captured_tensors(bias.score_mod)
    return {n: t for n, t in found.items() if isinstance(t, Tensor) and t.requires_grad}


def _in_layout(call: Call, tensor: Tensor) -> Tensor:
    """Return (batch, heads, tokens, features) as the call's layout has it, as a leaf."""
    if call.layout == "thd":
        return tensor[0].transpose(0, 1).detach()
    return (tensor.transpose(1, 2) if call.layout == "bshd" else tensor).detach()


def _filled(call: Call, device: str, shape: tuple[int, int, int], order: str) -> Tensor:
    """Return a dense tensor (batch, heads, tokens, features) whose dimensions lie in an order."""
    sizes = dict(zip("bhsd", (call.batch, *shape), strict=True))
    values = torch.randn([sizes[n] for n in order], device=device).to(getattr(torch, call.dtype))
    return values.permute([order.index(n) for n in "bhsd"])


def _stored(call: Call, device: str, shape: tuple[int, int, int], order: str, *, is_kv: bool) -> Tensor:
    """Return a tensor that lies in memory as the call says: with gaps, expanded heads, at odd addresses."""
    strides, (heads, tokens, width) = call.strides, shape
    if is_kv and strides.kv_heads_expanded:
        return _filled(call, device, (1, tokens, width), order).expand(-1, heads, -1, -1)
    if not strides.last_dim_contiguous:
        return _filled(call, device, (heads, tokens, 2 * width), order)[..., ::2]
    if not (strides.packed or strides.aligned_16):
        return _filled(call, device, (heads, tokens, width + 1), order)[..., :width]
    if not strides.packed:
        # As where query, key and value are parts of one projection.
        if order.index("h") > order.index("s"):
            return _filled(call, device, (3 * heads, tokens, width), order)[:, :heads]
        return _filled(call, device, (heads, 3 * tokens, width), order)[:, :, :tokens]
    tensor = _filled(call, device, shape, order)
    return tensor if strides.aligned_16 else _moved(tensor)


def _moved(tensor: Tensor) -> Tensor:
    """Return a copy that begins one element behind an aligned address, with the same strides."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def _numbers(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = {"layout": call.layout, "softcap": call.softcap, "dropout_p": call.dropout_p}
    # As most calls leave it: what states it never goes the short way.
    found |= {"return_lse": call.return_lse, "deterministic": call.deterministic or None}
    if call.scale != "positive":
        found["scale"] = 0.0 if call.scale == "zero" else -(call.head_dim_qk**-0.5)
    return found


def _scores(call: Call, device: str) -> dict[str, Any]:
    trains, heads, bias = call.phase == "training", call.num_heads_q, call.bias
    found: dict[str, Any] = {}
    if call.sink:
        found["sink"] = torch.randn(heads, device=device).requires_grad_(trains)
    if isinstance(bias, AlibiBias):
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], device=device)
        slopes = slopes.repeat(call.batch, 1) if bias.per_batch else slopes
        found["alibi_slopes"] = slopes.requires_grad_(trains and bias.requires_grad)
    elif isinstance(bias, DenseBias):
        values = _rows(torch.randn(bias.shape, device=device).to(getattr(torch, bias.dtype)), bias)
        found["bias"] = values.requires_grad_(trains and bias.requires_grad)
    elif bias is not None:
        found["bias"] = biases.Function(_score_mod(heads, device, trains=trains and bias.requires_grad))
    return found


def _score_mod(heads: int, device: str, *, trains: bool) -> Any:
    weights = torch.rand(heads, device=device).requires_grad_(trains)

    def nearer_counts_more(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - weights[head] * (query - key).abs()

    return nearer_counts_more


def _rows(values: Tensor, node: DenseNode | DenseBias) -> Tensor:
    """Return a mask or bias tensor whose rows lie in memory as the node says."""
    width = values.shape[-1] if values.dim() else 0
    if not node.last_dim_contiguous:
        return values.repeat_interleave(2, -1)[..., ::2]
    # One row is as wide as it likes, and where it must be odd it ends behind an odd place.
    step = -(-width // _ROW) * _ROW + (0 if node.aligned else 1)
    if width <= 1 or step == width:
        return values
    room = values.new_zeros((*values.shape[:-1], step))
    room[..., :width] = values
    return room[..., :width]


def _mask(call: Call, device: str) -> dict[str, Any]:
    if call.layout == "thd":
        return _packed(call, device)
    if call.strides.tokens_contiguous and (band := _band(call.mask)) is not None:
        return band
    made = [_node(node, call, device) for node in call.mask]
    return {"mask": made[0] if len(made) == 1 else masks.All(tuple(made))}


def _band(nodes: tuple[MaskNode, ...]) -> dict[str, Any] | None:
    """Return causal and window as arguments, as most calls have them; None where those say less."""
    kinds = [node.kind for node in nodes if isinstance(node, CausalNode | WindowNode)]
    if len(kinds) < len(nodes) or len(set(kinds)) < len(kinds):
        return None
    found: dict[str, Any] = {}
    for node in nodes:
        found |= _band_of(node)
    alignments = {node.alignment for node in nodes if isinstance(node, CausalNode | WindowNode)}
    return found if len(alignments) < 2 else None


def _band_of(node: MaskNode) -> dict[str, Any]:
    if isinstance(node, CausalNode):
        return {"is_causal": True, "causal_alignment": node.alignment}
    if isinstance(node, WindowNode):
        return {"window": (node.left, node.right), "causal_alignment": node.alignment}
    return {}


def _packed(call: Call, device: str) -> dict[str, Any]:
    """Return the lengths of a packed batch, and the band that holds in each of its sequences."""
    # A line need not say documents: what is packed has some.
    found: dict[str, Any] = _sums("q", call.seqlen_q, _DOCUMENTS, device)
    found |= _sums("kv", call.seqlen_kv, _DOCUMENTS, device) if call.seqlen_q != call.seqlen_kv else {}
    for node in call.mask:
        if isinstance(node, DocumentsNode):
            count = node.count or _DOCUMENTS
            found |= _sums("q", call.seqlen_q, count, device)
            found |= _sums("kv", call.seqlen_kv, count, device) if node.cross else {}
        found |= _band_of(node)
    return found


def _sums(name: str, total: int, count: int, device: str) -> dict[str, Any]:
    lengths = parts(total, count)
    sums = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return {f"cu_seqlens_{name}": sums, f"max_seqlen_{name}": max(lengths)}


def parts(total: int, count: int) -> list[int]:
    """Return so many lengths that differ and sum to a total; those for which nothing is left are 0."""
    weights = [1.0 + (at * 0.618) % 1 for at in range(count)]
    lengths = [int(total * weight / sum(weights)) for weight in weights]
    lengths[-1] += total - sum(lengths)
    return lengths


def _node(node: MaskNode, call: Call, device: str) -> Mask:
    """Return the mask object or the tensor that a node describes."""
    return _MADE[node.kind](node, call, device)


def _prefix(node: PrefixNode, call: Call, device: str) -> Mask:
    own = [max(1, call.seqlen_kv // (3 + at % 3)) for at in range(call.batch)]
    lengths = torch.tensor(own, device=device) if node.lengths is None else node.lengths
    return masks.PrefixLM(lengths, node.alignment)


def _all(nodes: tuple[MaskNode, ...], call: Call, device: str) -> Mask:
    return masks.All(tuple(_node(node, call, device) for node in nodes))


def _documents(node: DocumentsNode, call: Call, device: str) -> Mask:
    if node.lengths is not None:
        return masks.Documents(lengths=node.lengths)
    if not node.contiguous:
        ids = torch.arange(call.seqlen_q, device=device) * _DOCUMENTS // max(1, call.seqlen_q)
        return masks.Documents(ids=ids)
    lengths = torch.tensor(parts(call.seqlen_q, node.count or _DOCUMENTS))
    if node.count is None:
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        return masks.Documents(position_ids=positions.to(device))
    return masks.Documents(cu_seqlens=functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32))


def _padding(node: KeyPaddingNode, call: Call, device: str) -> Mask:
    shares = torch.linspace(1.0, 0.5, call.batch + 1)[1:]
    counts: Any = (shares * call.seqlen_kv).long().clamp_min(1).to(device)
    if node.side == "any":
        keep = torch.arange(call.seqlen_kv, device=device) < counts[:, None]
        return masks.KeyPadding(keep=keep, finite=node.finite)
    if node.lengths is not None:
        counts = node.lengths
    if node.side == "right":
        return masks.KeyPadding(lengths=counts, finite=node.finite)
    left = [call.seqlen_kv - n for n in counts] if isinstance(counts, tuple) else call.seqlen_kv - counts
    return masks.KeyPadding(left=left, finite=node.finite)


def _dense(node: DenseNode, call: Call, device: str) -> Tensor:
    if node.recognized is not None:
        found = _all(node.recognized, call, device).materialize(
            call.seqlen_q, call.seqlen_kv, batch=call.batch, num_heads_q=call.num_heads_q, device=device
        )
        shape = (*(1,) * (4 - len(node.shape)), *node.shape)
        for dim, size in enumerate(shape):
            found = found.narrow(dim, 0, 1) if size == 1 else found
        values = found.expand(shape).reshape(node.shape).clone()
    else:
        values = torch.rand(node.shape, device=device) < _ALLOWED
        values[..., :1] = True
        if node.empty_rows == "some" and values.dim() > 1:
            values[..., :1, :] = False
    return _rows(values, node)


def _function(node: FunctionNode, call: Call, device: str) -> Mask:
    offset = call.seqlen_kv - call.seqlen_q
    of_batch, of_head = int(node.per_batch), int(node.per_head)

    def strided(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        period = 64 + batch % 2 * of_batch + head % 2 * of_head
        return (distance >= 0) & ((distance < 64) | (key % period == 0))

    if node.block_mask_shape is None:
        return masks.Function(strided, per_batch=node.per_batch, per_head=node.per_head)
    from torch.nn.attention.flex_attention import create_block_mask

    rows = call.batch if node.per_batch else None
    heads = call.num_heads_q if node.per_head else None
    seqlen_q, seqlen_kv = node.block_mask_shape[-2:]
    return masks.Blocks(create_block_mask(strided, rows, heads, seqlen_q, seqlen_kv, device=device))


_MADE: Final[dict[str, Callable[[Any, Call, str], Mask]]] = {
    "causal": lambda node, _call, _device: masks.Causal(node.alignment),
    "window": lambda node, _call, _device: masks.Window(node.left, node.right, node.alignment),
    "documents": _documents,
    "key_padding": _padding,
    "prefix": _prefix,
    "dense": lambda node, call, device: masks.Dense(_dense(node, call, device)),
    "function": _function,
    "any": lambda node, call, device: masks.Either(tuple(_all(p, call, device) for p in node.parts)),
    "not": lambda node, call, device: masks.Not(_all(node.part, call, device)),
}
