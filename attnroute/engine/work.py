"""What a call asks of a kernel, as numbers: products, bytes, thread blocks, and what it has besides.

Lengths that only the device knows are guessed: padding leaves three quarters of the keys, documents end
anywhere, some 1024 tokens apart where nobody knows how many there are, prefixes take a third. Kernels work
in tiles of 128 queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Final, NamedTuple, get_args

from attnroute.engine.rounding import FEW
from attnroute.memory import INSTALLED, cached
from attnroute.question.call import Call
from attnroute.question.nodes import (
    AlibiBias,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionBias,
    KeyPaddingNode,
    MaskNode,
    PrefixNode,
    WindowNode,
)
from attnroute.tables.costs import HeadDim
from attnroute.vocabulary import DTYPE_BYTES, Repair

TILE: Final = 128
"""Queries, and keys, that a block of a kernel takes at a time."""
HALF_TILE: Final = 64
"""The fewest queries that tensor cores work on."""
_STEP: Final = 2**26
"""Scores that `chunked` holds at a time."""
_WORTH_A_BLOCK: Final = 2**23
"""Scores for which it makes one block of queries more."""
_BLOCKS: Final = 4.0
_BLOCK_LEAST: Final = 256
_BLOCK_MOST: Final = 1024
_ROWS_LOOKED_AT: Final = 64
_MEASURED_BYTES: Final = 2
"""Of an element: rates of products are those of 16-bit numbers."""
_PADDED: Final = 0.75
_DOCUMENT: Final = 1024
_SHARES: Final = (0.14, 0.48, 1.0, 2.38)
"""Of the mean length: the means of the four quarters of documents that end anywhere, the shortest first."""
_PREFIX: Final = 1 / 3
_DIMS: Final = tuple(int(name.removeprefix("d")) for name in get_args(HeadDim))


class Work(NamedTuple):
    """What a kernel does for one call in one direction.

    Attributes:
        flops: Operations of the forward's two matrix products, in whole tiles.
        flops_packed: The same where the query heads of one key head share tiles.
        blocks: Tiles of queries, of all heads and batch rows.
        blocks_packed: The same where heads share tiles.
        keys: Keys that one query tile meets and several blocks may share: 1 where a tensor has a row for each
            query, since kernels share none then.
        bytes: Of query, key, value and output.
        mask_bytes: Of mask and bias tensors, as often as they are read.
        repair_bytes: What each repair allocates, of those that allocate anything.
        repairs: How many repairs run something on the device.
        is_ragged: 1 in a ragged batch, else 0.
        head_dim: The larger head_dim, rounded up to one that `tflops` of a `Kernel` names.
        traits: What `factor` of a `Kernel` may name.
        is_few: 16 queries or fewer, not in a ragged batch.
    """

    flops: float
    flops_packed: float
    blocks: float
    blocks_packed: float
    keys: float
    bytes: float
    mask_bytes: float
    repair_bytes: Mapping[Repair, float]
    repairs: int
    is_ragged: int
    head_dim: int
    traits: frozenset[str]
    is_few: bool


class _Tiles(NamedTuple):
    """Pairs of query and key in whole tiles of keys, and how many keys are met."""

    pairs: float
    keys: float


def work_of(given: Call, final: Call, repairs: tuple[Repair, ...], sizes: tuple[int, ...]) -> Work | None:
    """Return what a kernel does for a call.

    Args:
        given: The call, normalised.
        final: The call as the kernel gets it.
        repairs: What was done to it before.
        sizes: What each of them allocates, in bytes.

    Returns:
        None where a length is 0, or where nothing was measured: head_dims that are larger, and dtypes that
        are not of 16 bits.
    """
    shape = (final.batch, final.num_heads_q, final.num_heads_kv, final.seqlen_q, final.seqlen_kv)
    head_dim = next((d for d in _DIMS if d >= max(final.head_dim_qk, final.head_dim_v)), None)
    if 0 in shape or head_dim is None or DTYPE_BYTES[final.dtype] != _MEASURED_BYTES:
        return None
    batch, heads, heads_kv, seqlen_q, seqlen_kv = shape
    group = heads // heads_kv
    lengths = _sequences(given, final)
    has_tensor = isinstance(final.bias, DenseBias) or any(isinstance(n, DenseNode) for n in final.mask)
    kept = _PADDED if _pads(given) and not has_tensor else 1.0
    parts = [_part(final, *part, group) for part in lengths]
    pairs, packed, tiles, packed_tiles = (sum(column) for column in list(zip(*parts, strict=True))[:4])
    keys = max(part[4] for part in parts)
    is_one = len(lengths) == 1 and lengths[0][2] == 1
    if not is_one and final.layout != "thd":
        # Tiles do not end with documents: each meets one more tile of keys.
        whole = _part(final, seqlen_q, seqlen_kv, 1, group)
        pairs, packed = (min(whole[at], part + seqlen_q * TILE) for at, part in enumerate((pairs, packed)))
        tiles, packed_tiles = whole[2:4]
    dims = final.head_dim_qk + final.head_dim_v
    products = 2.0 * batch * heads * kept * (_dim(final.head_dim_qk) + _dim(final.head_dim_v))
    reached = (min(keys, seqlen_kv) if is_one else seqlen_kv) * kept
    return Work(
        flops=products * pairs,
        flops_packed=products * packed,
        blocks=batch * heads * tiles,
        blocks_packed=batch * heads_kv * packed_tiles,
        keys=1.0 if any(map(_per_query, _tensors(final))) else max(1.0, keys * kept),
        bytes=DTYPE_BYTES[final.dtype] * batch * dims * (heads * seqlen_q + heads_kv * reached),
        mask_bytes=_mask_bytes(final, min(1.0, pairs / (seqlen_q * seqlen_kv))),
        repair_bytes={name: size for name, size in zip(repairs, sizes, strict=True) if size},
        repairs=sum(repair not in _FREE for repair in repairs),
        is_ragged=int(final.layout == "thd"),
        head_dim=head_dim,
        traits=_traits(given, final, repairs),
        is_few=seqlen_q <= FEW and final.layout != "thd" and is_one,
    )


def steps_of(final: Call) -> float:
    """Return in about how many steps a backend goes through the scores of a call that holds a part at a time.

    Where a mask leaves keys out, queries go in up to four blocks, each of which skips some.
    """
    queries = final.seqlen_q
    scores = float(final.batch * final.num_heads_q * queries)
    if not any(isinstance(n, CausalNode | WindowNode | DocumentsNode) for n in final.mask):
        return ceil(scores * final.seqlen_kv / _STEP)
    blocks = min(max(scores * final.seqlen_kv / _WORTH_A_BLOCK, 1.0), _BLOCKS, queries / _BLOCK_LEAST)
    blocks = max(1.0, blocks, queries / _BLOCK_MOST)
    keys = max(part.keys for part in (_tiles(final.mask, n, m) for n, m, _ in _sequences(final, final)))
    keys = min(keys + queries / blocks, final.seqlen_kv)
    return max(blocks, ceil(scores * keys / _STEP))


_FREE: Final = frozenset({"recognize_mask", "from_varlen", "backward_from_chunked"})
"""Repairs that run nothing on the device before the kernel."""


def _part(final: Call, seqlen_q: int, seqlen_kv: int, times: float, group: int) -> tuple[float, ...]:
    """Return pairs and tiles of sequences of one size, each plain and packed, and the keys of a tile."""
    found = _tiles(final.mask, seqlen_q, seqlen_kv)
    rows = seqlen_q * group
    return (
        times * found.pairs * _whole(seqlen_q) / seqlen_q,
        times * found.pairs * _whole(rows) / rows,
        times * -(-seqlen_q // TILE),
        times * -(-rows // TILE),
        found.keys,
    )


def _dim(head_dim: int) -> int:
    return next(d for d in _DIMS if d >= head_dim)


def _whole(queries: int) -> int:
    return -(-queries // HALF_TILE) * HALF_TILE


def _pads(call: Call) -> bool:
    return any(isinstance(node, KeyPaddingNode) for node in call.mask)


def _sequences(given: Call, final: Call) -> list[tuple[int, int, float]]:
    """Return queries and keys of the sequences that a kernel keeps apart, and how many there are of each."""
    whole = [(final.seqlen_q, final.seqlen_kv, 1.0)]
    keeps_apart = final.layout == "thd" or any(isinstance(n, DocumentsNode) for n in final.mask)
    node = next((n for n in given.mask if isinstance(n, DocumentsNode)), None)
    if node is None or not keeps_apart:
        return whole
    if node.lengths:
        return [(n, n, 1.0) for n in node.lengths if n] or whole
    count = node.count or max(1, given.seqlen_q // _DOCUMENT)
    if count == 1:
        return whole
    sizes = (given.seqlen_q / count, given.seqlen_kv / count)
    lengths = [tuple(max(1, round(share * size)) for size in sizes) for share in _SHARES]
    return [(one, other, count / len(_SHARES)) for one, other in lengths]


def _tiles(mask: tuple[MaskNode, ...], seqlen_q: int, seqlen_kv: int) -> _Tiles:
    """Return the tiles that a band leaves; those of other masks as far as they say it."""
    left, right, others = None, None, False
    for node in mask:
        if isinstance(node, CausalNode | WindowNode):
            offset = seqlen_kv - seqlen_q if node.alignment == "bottom_right" else 0
            sides = (node.left, node.right) if isinstance(node, WindowNode) else (None, 0)
            if sides[0] is not None:
                left = max(offset - sides[0], offset - sides[0] if left is None else left)
            if sides[1] is not None:
                right = min(offset + sides[1], offset + sides[1] if right is None else right)
        elif isinstance(node, PrefixNode):
            prefix = _PREFIX * seqlen_kv
            causal = _band(seqlen_q, seqlen_kv, None, 0)
            return _Tiles(causal.pairs + prefix * prefix / 2, causal.keys)
        elif not isinstance(node, DenseNode | DocumentsNode | KeyPaddingNode):
            others = True
    return _band(seqlen_q, seqlen_kv, left, 0 if others and right is None else right)


@cached(1024, INSTALLED)
def _band(seqlen_q: int, seqlen_kv: int, left: int | None, right: int | None) -> _Tiles:
    """Return the tiles of a band: keys from `left` to `right` of a query's index, None where it is open."""
    if left is None and right is None:
        return _Tiles(seqlen_q * float(-(-seqlen_kv // TILE) * TILE), seqlen_kv)
    rows = -(-seqlen_q // TILE)
    step = max(1, rows // _ROWS_LOOKED_AT)
    pairs = keys = seen = 0
    for row in range(0, rows, step):
        begin, end = row * TILE, min(seqlen_q, (row + 1) * TILE)
        first = 0 if left is None else max(0, begin + left)
        last = seqlen_kv - 1 if right is None else min(seqlen_kv - 1, end - 1 + right)
        seen += end - begin
        if last >= first:
            pairs += (end - begin) * (last // TILE + 1 - first // TILE) * TILE
            keys = max(keys, last + 1 - first)
    return _Tiles(pairs * seqlen_q / seen, keys)


def _mask_bytes(call: Call, reached: float) -> float:
    """Return what is read of mask and bias tensors: each query tile of each head reads its part.

    Args:
        call: The call as the kernel gets it.
        reached: The share of all queries and keys that lies in tiles which the kernel does not leave out.
    """
    total = 0.0
    rows = call.batch * call.num_heads_q * call.seqlen_kv * reached
    for node in _tensors(call):
        total += rows * (call.seqlen_q if _per_query(node) else 1) * DTYPE_BYTES[node.dtype]
    return total


def _tensors(call: Call) -> list[DenseNode | DenseBias]:
    return [node for node in (*call.mask, call.bias) if isinstance(node, DenseNode | DenseBias)]


def _per_query(node: DenseNode | DenseBias) -> bool:
    return len(node.shape) > 1 and node.shape[-2] > 1


def _traits(given: Call, final: Call, repairs: tuple[str, ...]) -> frozenset[str]:
    bias, kinds = final.bias, {node.kind for node in final.mask}
    is_band = not kinds.isdisjoint({"causal", "window"})
    found = {
        "alibi": isinstance(bias, AlibiBias),
        "rows_few": 1 < final.seqlen_q <= FEW and (is_band or any(map(_per_query, _tensors(final)))),
        "bias_grad": isinstance(bias, DenseBias) and bias.requires_grad,
        "causal": is_band,
        "composed_backward": "backward_from_chunked" in repairs,
        "dense_bias": isinstance(bias, DenseBias),
        "dense_mask": "dense" in kinds,
        "documents": "documents" in kinds,
        "few_queries": final.seqlen_q <= FEW,
        "function": not kinds.isdisjoint({"function", "any", "not"}) or isinstance(bias, FunctionBias),
        "key_padding": "key_padding" in kinds,
        "prefix": "prefix" in kinds,
        "dtensor": given.context.distributed == "dtensor",
        "ring": given.context.distributed == "ring",
        "sink": final.sink,
        "softcap": final.softcap > 0,
        "training": given.phase == "training",
        "unequal_head_dims": final.head_dim_qk != final.head_dim_v,
        "varlen": final.layout == "thd",
        "window": any(isinstance(n, WindowNode) and n.left is not None for n in final.mask),
    }
    return frozenset(name for name, holds in found.items() if holds)
