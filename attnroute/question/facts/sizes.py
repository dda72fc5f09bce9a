"""Facts about sizes: lengths, heads, head dims, and the products of them that kernels count elements by.

A length that may change at run time (`context.dynamic`) is a `Varies`: a rule about it must hold for every
value. The sizes may be those of a tracer (`attnroute.engine.dependence`), so nothing here converts them.
"""

from __future__ import annotations

from math import gcd
from typing import Final

from attnroute.question.call import Call
from attnroute.question.facts.registry import Varies, fact, field
from attnroute.question.nodes import DenseBias, DenseNode, nested
from attnroute.question.normalize import lengths_vary
from attnroute.vocabulary import DTYPES

_TILE: Final = 16
"""Elements: tensor cores take head dims in pieces of this size."""
_COLUMNS: Final = 32
"""The most columns that FlashAttention-4's backward on Blackwell stores at a time."""
_WIDE: Final = 128
"""Above it flash-attn has no kernels for single steps of 32 from 2.8 on."""
_HOPPER: Final = (64, 96, 128, 192, 256)
"""The head dims for which FlashAttention-3 has kernels."""
_QUERIES, _KEYS = 128, 64
"""The tile of FlashAttention-4's kernels for cards of sm_8x, and for wide heads on sm_12x."""

field("dtype", "dtype of query, key and value", words=DTYPES)


@fact("number")
def batch(call: Call) -> int | Varies:
    """Batch size."""
    return Varies() if "batch" in call.context.dynamic else call.batch


field("num_heads_q", "query heads", "number")
field("num_heads_kv", "key/value heads", "number")


@fact("number")
def batch_heads_q(call: Call) -> int | Varies:
    """Batch size times query heads."""
    return _product(batch(call), call.num_heads_q)


@fact("number")
def batch_heads_kv(call: Call) -> int | Varies:
    """Batch size times key/value heads."""
    return _product(batch(call), call.num_heads_kv)


@fact()
def is_gqa(call: Call) -> bool:
    """Key/value heads are fewer than query heads."""
    return call.num_heads_q != call.num_heads_kv


@fact("number", reads_length=True)
def seqlen_q(call: Call) -> int | Varies:
    """Query length."""
    return Varies() if "seqlen_q" in call.context.dynamic else call.seqlen_q


@fact("number", reads_length=True)
def seqlen_kv(call: Call) -> int | Varies:
    """Key length."""
    return Varies() if "seqlen_kv" in call.context.dynamic else call.seqlen_kv


@fact(reads_length=True)
def seqlens_equal(call: Call) -> bool | Varies:
    """Query length equals key length."""
    return Varies(0) if lengths_vary(call) else call.seqlen_q == call.seqlen_kv


@fact("number", reads_length=True)
def seqlen_q_mod_128(call: Call) -> int | Varies:
    """Query length modulo 128."""
    return Varies(0) if "seqlen_q" in call.context.dynamic else call.seqlen_q % 128


@fact("number", reads_length=True)
def group_queries(call: Call) -> int | Varies:
    """Queries of the heads that share one key/value head: seqlen_q * gqa_ratio."""
    return _product(seqlen_q(call), gqa_ratio(call))


@fact("number", reads_length=True)
def seqlen_kv_mod_128(call: Call) -> int | Varies:
    """Key length modulo 128."""
    return Varies(0) if "seqlen_kv" in call.context.dynamic else call.seqlen_kv % 128


@fact("number", reads_length=True)
def score_elements(call: Call) -> int | Varies:
    """Elements of the scores: batch * num_heads_q * seqlen_q * seqlen_kv."""
    if not call.context.dynamic:
        return call.batch * call.num_heads_q * call.seqlen_q * call.seqlen_kv
    return _product(batch(call), call.num_heads_q, seqlen_q(call), seqlen_kv(call))


@fact("number", reads_length=True)
def mask_elements(call: Call) -> int | Varies:
    """Elements of one full mask: seqlen_q * seqlen_kv."""
    if not call.context.dynamic:
        return call.seqlen_q * call.seqlen_kv
    return _product(seqlen_q(call), seqlen_kv(call))


@fact("number", reads_length=True)
def dq_accumulator_elements(call: Call) -> int | Varies:
    """Elements of dQ where it is accumulated.

    batch * num_heads_q * seqlen_q * head_dim_qk, the last two rounded up to multiples of 128 and 32; a
    head_dim above 192 becomes 256.
    """
    width = _up(call.head_dim_qk, 32)
    return _product(batch(call), _rows(call), width if call.head_dim_qk <= 192 else max(256, width))


@fact("number", reads_length=True)
def dq_accumulator_elements_wide(call: Call) -> int | Varies:
    """The same as dq_accumulator_elements, a head_dim_qk above 128 up to a multiple of 64."""
    return _product(batch(call), _rows(call), _up(call.head_dim_qk, 64 if call.head_dim_qk > _WIDE else 32))


@fact("number", reads_length=True)
def dq_accumulator_row_elements(call: Call) -> int | Varies:
    """Elements of dQ of one batch row where it is accumulated.

    num_heads_q * seqlen_q * head_dim_qk, the last two up to a multiple of 128 and to the next of 64, 96, 128,
    192 and 256.
    """
    # FlashAttention-3 has no kernel for what is wider.
    widths = [width for width in _HOPPER if call.head_dim_qk <= width]
    return _product(_rows(call), widths[0] if widths else _up(call.head_dim_qk, 64))


# How far a kernel counts elements inside of a tensor: what rows about indices of 32 bits ask. A call says of
# its strides only whether query, key and value are packed, so these are upper bounds: of packed tensors the
# heads may lie between two tokens, and of others all that stands beside them may, as in one tensor of query,
# key and value whose tokens are outermost.


@fact("number", reads_length=True)
def query_reach(call: Call) -> int:
    """Elements between the first and the last token of a head of query or output, at most.

    Those of all heads, and where query, key and value are not packed those of all three in the whole batch;
    here and in the next four, lengths that vary count as they are stated.
    """
    return call.seqlen_q * (_token(call, call.num_heads_q) if call.strides.packed else _whole_token(call))


@fact("number", reads_length=True)
def key_reach(call: Call) -> int:
    """The same as query_reach, of key and value."""
    return call.seqlen_kv * (_token(call, call.num_heads_kv) if call.strides.packed else _whole_token(call))


@fact("number", reads_length=True)
def query_elements(call: Call) -> int:
    """As many elements as query or output spread over: query_reach of all heads of all batches."""
    token = call.batch * _token(call, call.num_heads_q)
    return call.seqlen_q * (token if call.strides.packed else _whole_token(call))


@fact("number", reads_length=True)
def key_elements(call: Call) -> int:
    """The same as query_elements, of key and value."""
    token = call.batch * _token(call, call.num_heads_kv)
    return call.seqlen_kv * (token if call.strides.packed else _whole_token(call))


@fact("number", reads_length=True)
def mask_tensor_elements(call: Call) -> int:
    """Elements of the largest mask or bias tensor, at most.

    Those inside a disjunction or a negation count too; 0 without one.
    """
    shapes = [node.shape for node in nested(call.mask) if isinstance(node, DenseNode)] if call.mask else []
    if isinstance(call.bias, DenseBias):
        shapes.append(call.bias.shape)
    if not shapes:
        return 0
    elements = 1
    for place, size in enumerate((call.seqlen_kv, call.seqlen_q, call.num_heads_q, call.batch)):
        if any(len(shape) > place and shape[-1 - place] > 1 for shape in shapes):
            elements *= size
    return elements


field("head_dim_qk", "last dimension of query and key", "number")
field("head_dim_v", "last dimension of value", "number")


@fact("number")
def head_dim_max(call: Call) -> int:
    """The larger of head_dim_qk and head_dim_v."""
    return max(call.head_dim_qk, call.head_dim_v)


@fact()
def head_dims_equal(call: Call) -> bool:
    """Whether head_dim_qk equals head_dim_v."""
    return call.head_dim_qk == call.head_dim_v


@fact("number")
def head_dims_ratio(call: Call) -> float:
    """How many times wider values are than keys: head_dim_v / head_dim_qk, both up to multiples of 16."""
    return _up(call.head_dim_v, _TILE) / _up(call.head_dim_qk, _TILE) if call.head_dim_qk else 0.0


@fact()
def head_dims_power_of_two(call: Call) -> bool:
    """Whether head_dim_qk and head_dim_v are powers of two."""
    return _is_power_of_two(call.head_dim_qk) and _is_power_of_two(call.head_dim_v)


@fact()
def head_dims_multiple_of_16(call: Call) -> bool:
    """Whether head_dim_qk and head_dim_v are multiples of 16."""
    return call.head_dim_qk % _TILE == 0 and call.head_dim_v % _TILE == 0


@fact("number")
def head_dim_qk_tile_mod_32(call: Call) -> int:
    """What is left of head_dim_qk, rounded up to a multiple of 16, modulo 32."""
    return _up(call.head_dim_qk, _TILE) % 32


@fact()
def dv_store_fits_16(call: Call) -> bool:
    """Whether dV is stored in whole pieces when the pieces are chosen for dK.

    Half of head_dim_v is a multiple of gcd(32, half of head_dim_qk), both rounded up to multiples of 16.
    """
    return _store_fits(call, 16)


@fact()
def dv_store_fits_32(call: Call) -> bool:
    """The same as dv_store_fits_16, both rounded up to multiples of 32."""
    return _store_fits(call, 32)


@fact("number")
def fa4_tile_bytes(call: Call) -> int:
    """Bytes of 128 queries and 64 keys in shared memory.

    2 * (192 * head_dim_qk + 64 * head_dim_v), both rounded up to multiples of 16.
    """
    return 2 * ((_QUERIES + _KEYS) * _up(call.head_dim_qk, _TILE) + _KEYS * _up(call.head_dim_v, _TILE))


@fact("number")
def gqa_ratio(call: Call) -> int:
    """Query heads that share one key/value head: num_heads_q / num_heads_kv."""
    return call.num_heads_q // max(1, call.num_heads_kv)


@fact()
def gqa_ratio_power_of_two(call: Call) -> bool:
    """Whether num_heads_q / num_heads_kv is a power of two."""
    return _is_power_of_two(gqa_ratio(call))


def _product(*values: int | Varies) -> int | Varies:
    result, varies = 1, False
    for value in values:
        if isinstance(value, Varies):
            varies, value = True, value.low  # noqa: PLW2901
        result *= value
    return Varies(result) if varies else result


def _rows(call: Call) -> int | Varies:
    """Return the rows of dQ of one batch row, the queries of a head rounded up to whole tiles of 128."""
    queries = seqlen_q(call)
    return _product(call.num_heads_q, queries if isinstance(queries, Varies) else _up(queries, 128))


def _token(call: Call, num_heads: int) -> int:
    return num_heads * max(call.head_dim_qk, call.head_dim_v)


def _whole_token(call: Call) -> int:
    """Return the elements of query, key and value of one token in every batch row."""
    heads = call.num_heads_q + 2 * call.num_heads_kv
    return call.batch * heads * max(call.head_dim_qk, call.head_dim_v)


def _store_fits(call: Call, multiple: int) -> bool:
    """FlashAttention-4's backward on Blackwell stores half of a row at a time.

    It does so in pieces of as many columns as divide both 32 and half a row of dK. Rows are padded to a
    multiple that differs by release.
    """
    columns = gcd(_COLUMNS, _up(call.head_dim_qk, multiple) // 2)
    return _up(call.head_dim_v, multiple) // 2 % columns == 0


def _up(value: int, multiple: int) -> int:
    """Round a number up to a multiple of another."""
    return -(-value // multiple) * multiple


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
