"""The backend `chunked`: exact attention from matmuls over query blocks, with memory linear in the length.

It takes every dtype, head_dim, mask and score feature on every device, so that no call needs attention
with a quadratic score matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnroute.errors import argument_error
from attnroute.executors.chunked.autograd import attend
from attnroute.executors.chunked.operator import attend_compiled
from attnroute.executors.chunked.plan import Limits
from attnroute.executors.chunked.tile import Extras, Spec
from attnroute.executors.chunked.whole import one_block
from attnroute.executors.protocol import Executor, Inputs, Output, Plan
from attnroute.masks.lowered.form import FULL, LoweredMask
from attnroute.masks.tracing import is_traced

if TYPE_CHECKING:
    from torch import Tensor

    from attnroute.executors.protocol import ScoreMod

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the composite under a mark that shows in profiles and to dispatch modes."""
    mask, score_mod = inputs.mask, inputs.score_mod
    if inputs.query.is_meta:
        # A tensor without values shows shapes, in which masks and score functions have no say.
        mask, score_mod = FULL, None
    with torch.profiler.record_function("attnroute::chunked"):
        out, lse = chunked_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            mask,
            bias=inputs.bias,
            scale=inputs.scale,
            softcap=inputs.softcap,
            sink=inputs.sink,
            alibi_slopes=inputs.alibi_slopes,
            dropout_p=inputs.dropout_p,
            score_mod=score_mod,
        )
    return out, lse if plan.return_lse else None


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: LoweredMask,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    score_mod: ScoreMod | None = None,
    block_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(scores) V and the log-sum-exp of the scores, exactly.

    Scores are ``s = scale * QK^T``, then ``softcap * tanh(s / softcap)`` if there is a softcap, then what
    `score_mod` makes of them, then plus bias and ALiBi, then masked. They and the softmax are float32
    (float64 for float64 inputs); matmul operands have the input's dtype on CUDA and are widened to float32
    where a device cannot accumulate in float32 otherwise. The backward pass makes the scores again block by
    block, but for small calls on the CPU, whose weights stay; a second derivative is refused.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim_qk), any strides, float16, bfloat16, float32 or
            float64.
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk); num_heads_q is a multiple of num_heads_kv, and
            shared key heads are not copied.
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
        mask: Who may attend. Rows that may attend to nothing give zeros and a log-sum-exp of -inf. Tensors
            that its functions read get no gradient.
        bias: Float tensor of any dtype that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv); -inf
            masks. Its gradient is summed to its own shape while the blocks are walked.
        scale: Any number, zero and negative ones too; None = head_dim_qk ** -0.5.
        softcap: 0.0 is off.
        sink: (num_heads_q,), one more logit per head in the softmax's denominator, without a value.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q); adds
            ``-slope * abs(i + seqlen_kv - seqlen_q - j)``, flash-attn's bottom-right convention.
        dropout_p: Probability of dropping a normalised probability; kept ones are divided by 1 - dropout_p.
            The masks follow torch.manual_seed, and depend on block_q. The log-sum-exp knows nothing of them.
        score_mod: ``(score, batch, head, query index, key index) -> score`` of 0-D tensors, as
            FlexAttention's; called through vmap with float32 (float64) scores, and reads elements of tensors
            in half precision as float32. Every tensor that it reads and that requires grad gets its gradient,
            which torch may sum in any order on the CPU unless torch.use_deterministic_algorithms is on.
        block_q: Queries per block; None chooses (see below).

    Returns:
        The output, (batch, num_heads_q, seqlen_q, head_dim_v) in the query's dtype, and the log-sum-exp
        (natural, sink included), (batch, num_heads_q, seqlen_q) in float32. Both are differentiable.

    Raises:
        ArgumentError: A shape, dtype or number is out of place.
        AttnRouteError: Under torch.compile, a mask or score function; or a second derivative is asked for.

    Memory beyond inputs, output and gradients is linear in the length. Most of it are the tiles of scores:
    with 16-bit inputs up to 384 MiB forward and 768 MiB backward, whatever the call (a sixteenth on the CPU).
    Weights that stay on the CPU are at most 2 Mi scores in three tensors (`_chunked_whole.WHOLE`).
    Where functions tell heads or batch rows apart, tiles are a quarter of that, since each tensor that a
    function makes may be as large as a tile. The rest are the float32 gradients of the key heads in work,
    and copies of one chunk's keys, values and query blocks where strides or shared key heads ask for them.

    Block sizes: a quarter of the queries, at least 256 and at most 1024 (64 and 256 on the CPU, where small
    calls are one block), against all keys that the mask leaves them, in several tiles where those would hold
    more than 64 Mi scores (4 Mi).
    On an H100 (bfloat16, causal, training, head_dim 320 and 512, 4096 to 16384 tokens) that beat blocks of
    256 and 512 queries, and tiles of 16 and 32 Mi, by 5 to 15 % of the device's time and by more of the
    host's; 32 Mi would save 0.4 GiB at 8192 tokens. Training takes 0.14 to 0.33 of the time of EFFICIENT
    with repeated keys and values (benchmarks/results/h100-torch2.11-chunked.json).
    """
    _check_tensors(query, key, value)
    _check_features(query, key, bias, sink, alibi_slopes)
    _check_numbers(query, softcap, dropout_p, block_q)
    # Drawn on the CPU: it follows torch.manual_seed and activation checkpointing, without a synchronisation.
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if dropout_p else None
    compiling = torch.compiler.is_compiling() or is_traced(query)
    limits, program = limits_of(mask), program_of(mask)
    if block_q is None and not compiling and program is None and score_mod is None:
        block_q = one_block(query, key, limits)
    spec = Spec(
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        seed=0 if seed is None or compiling else int(seed),
        limits=limits,
        block_q=block_q,
        program=program,
        score_mod=score_mod,
    )
    extras = Extras(
        bias=bias,
        slopes=alibi_slopes,
        sink=sink,
        key_keep=mask.key_keep,
        ids_q=mask.document_ids_q,
        ids_kv=mask.document_ids_kv,
        dense=mask.dense,
    )
    if compiling:
        return attend_compiled(query, key, value, extras, spec, seed)
    return attend(query, key, value, extras, spec)


def limits_of(mask: LoweredMask) -> Limits:
    """Return what lets blocks be skipped: a band around a diagonal of its own bounds no positions."""
    if mask.diagonal is not None:
        return Limits(bounds=mask.document_bounds)
    return Limits(mask.band_lo, mask.band_hi, mask.document_bounds)


def program_of(mask: LoweredMask) -> LoweredMask | None:
    """Return the part of a mask that is evaluated tile by tile, None where there is none."""
    if mask.diagonal is None and not mask.is_programmed:
        return None
    band = LoweredMask()
    if mask.diagonal is not None:
        band = LoweredMask(band_lo=mask.band_lo, band_hi=mask.band_hi, diagonal=mask.diagonal)
    return replace(
        band, either=mask.either, exclude=mask.exclude, functions=mask.functions, sparse=mask.sparse
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise argument_error(
                name, "four dimensions (batch, heads, length, head_dim)", f"{tensor.dim()}", "reshape it"
            )
        if tensor.dtype != query.dtype or tensor.dtype not in _DTYPES:
            got = f"{tensor.dtype} with a {query.dtype} query"
            raise argument_error(
                name, "float16, bfloat16, float32 or float64, as the query has", got, "cast it"
            )
        if tensor.device != query.device:
            raise argument_error(name, f"the query's device, {query.device}", tensor.device, "move it there")
    _check_shapes(tuple(query.shape), tuple(key.shape), tuple(value.shape))


def _check_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    batch, heads_q, _, head_dim = query
    if head_dim < 1:
        raise argument_error("query", "a head_dim of at least 1", head_dim, "give it features")
    if key[0] != batch or key[3] != head_dim:
        required = f"batch {batch} and head_dim {head_dim}, as the query has"
        raise argument_error("key", required, f"shape {key}", "make the two agree")
    if value[:3] != key[:3]:
        required = f"the key's batch, heads and length {key[:3]}"
        raise argument_error("value", required, f"shape {value}", "make the two agree")
    if key[1] < 1 or heads_q % key[1]:
        required = f"a number of heads that divides the query's {heads_q}"
        raise argument_error("key", required, key[1], "repeat or drop heads")


def _check_features(
    query: Tensor, key: Tensor, bias: Tensor | None, sink: Tensor | None, slopes: Tensor | None
) -> None:
    batch, heads, seqlen_q, _ = query.shape
    scores = (batch, heads, seqlen_q, key.shape[2])
    for name, tensor in (("bias", bias), ("sink", sink), ("alibi_slopes", slopes)):
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise argument_error(name, "a floating-point tensor", tensor.dtype, "cast it")
        if tensor is not None and tensor.device != query.device:
            raise argument_error(name, f"the query's device, {query.device}", tensor.device, "move it there")
    if bias is not None and not _broadcasts(tuple(bias.shape), scores):
        raise argument_error("bias", f"a shape that broadcasts to {scores}", tuple(bias.shape), "reshape it")
    if sink is not None and sink.shape != (heads,):
        raise argument_error("sink", f"shape ({heads},), one per query head", tuple(sink.shape), "reshape it")
    if slopes is not None and tuple(slopes.shape) not in ((heads,), (batch, heads)):
        required = f"shape ({heads},) or ({batch}, {heads})"
        raise argument_error("alibi_slopes", required, tuple(slopes.shape), "reshape it")


def _check_numbers(query: Tensor, softcap: float, dropout_p: float, block_q: int | None) -> None:
    if softcap < 0.0:
        raise argument_error("softcap", "a number of at least 0", softcap, "use 0.0 to turn it off")
    if not 0.0 <= dropout_p <= 1.0:
        raise argument_error("dropout_p", "a probability between 0 and 1", dropout_p, "correct it")
    if block_q is not None and block_q < 1:
        raise argument_error("block_q", "a count of at least 1", block_q, "leave it out to let it be chosen")
    if dropout_p and not torch.compiler.is_compiling() and _is_capturing(query):
        raise argument_error(
            "dropout_p",
            "0 while a CUDA graph is captured, since every replay would drop the same entries",
            dropout_p,
            "capture without dropout",
        )


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) <= len(full) and all(
        size in (1, whole) for size, whole in zip(shape[::-1], full[::-1], strict=False)
    )


executor = Executor(run)
