"""The backend `chunked`: exact attention from matmuls over query blocks, with memory linear in the length.

It takes every dtype, head_dim, mask and score feature on every device, so that no call needs attention
with a quadratic score matrix.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from attnroute.errors import argument_error
from attnroute.executors.chunked import autograd, operator
from attnroute.executors.chunked.plan import Limits
from attnroute.executors.chunked.tile import Extras, Spec
from attnroute.executors.chunked.whole import one_block
from attnroute.executors.protocol import Executor, Inputs, Output, Plan
from attnroute.masks.lowered.form import FULL, LoweredMask
from attnroute.masks.tracing import is_capturing, is_traced

_NAME: Final = "attnroute::chunked"


def run(inputs: Inputs, plan: Plan) -> Output:
    """Run the composite under a mark that shows in profiles and to dispatch modes."""
    if inputs.query.is_meta:
        # The result has a shape but no values, and no mask or score function changes a shape.
        inputs = replace(inputs, mask=FULL, score_mod=None)
    with _mark(_NAME):
        return attend(inputs, wants_lse=plan.return_lse)


def _mark(name: str) -> AbstractContextManager[Any]:
    """Mark what runs: torch's fast mark is for the profiler alone, and no operator that a mode would see."""
    if torch._C._len_torch_dispatch_stack():
        return torch.profiler.record_function(name)
    return torch._C._profiler._RecordFunctionFast(name)


def attend(
    inputs: Inputs, *, block_q: int | None = None, wants_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(scores) V and the log-sum-exp of the scores, exactly.

    Scores are ``s = scale * QK^T``, then ``softcap * tanh(s / softcap)`` if there is a softcap, then what
    `score_mod` makes of them, then plus bias and ALiBi, then masked. They and the softmax are float32
    (float64 for float64 inputs); matmul operands have the input's dtype on CUDA and are widened to float32
    where a device cannot accumulate in float32 otherwise. The backward pass makes the scores again block by
    block, but for small calls on the CPU, whose weights stay; a second derivative is refused.

    Beyond what `Inputs` documents:

    * Tensors may have any strides. Key heads that query heads share are not copied.
    * Rows that may attend to nothing give zeros and a log-sum-exp of -inf. Tensors that the functions of a
      mask read get no gradient.
    * The gradient of the bias is summed to its own shape while the blocks are walked; -inf in it masks.
    * ALiBi adds ``-slope * abs(i + seqlen_kv - seqlen_q - j)``, flash-attn's bottom-right convention.
    * Dropout drops normalised probabilities; its masks follow torch.manual_seed, and depend on `block_q`. The
      log-sum-exp knows nothing of them.
    * `score_mod` is called through vmap with float32 (float64) scores, and reads elements of tensors in half
      precision as float32. Every tensor that it reads and that requires grad gets its gradient, which torch
      may sum in any order on the CPU unless torch.use_deterministic_algorithms is on.

    Args:
        inputs: The call.
        block_q: Queries per block; None chooses (see below).
        wants_lse: Whether the log-sum-exp is read.

    Returns:
        The output, (batch, num_heads_q, seqlen_q, head_dim_v) in the query's dtype, and the log-sum-exp
        (natural, sink included), (batch, num_heads_q, seqlen_q) in float32, or None where it is not read.
        Both are differentiable.

    Raises:
        ArgumentError: Dropout while a CUDA graph is captured.
        AttnRouteError: Under torch.compile, a mask or score function; or a second derivative is wanted.

    Memory beyond inputs, output and gradients is linear in the length. Most of it are the tiles of scores:
    with 16-bit inputs up to 384 MiB forward and 768 MiB backward, whatever the call (a sixteenth on the CPU).
    Weights that stay on the CPU are at most 2 Mi scores in three tensors (`whole.WHOLE`).
    Where functions differ between heads or batch rows, tiles are a quarter of that, since each tensor that a
    function makes may be as large as a tile. The rest are the float32 gradients of the key heads in work
    where there is more than one block, and copies of one chunk's keys, values and query blocks where strides
    or shared key heads need them.

    Block sizes: all queries where no band or documents mask any and a tile holds them; else a quarter of the
    queries, more in calls of less than 32 Mi scores, at least 256 and at most 1024 (64 and 256 on the CPU,
    where small calls are one block). They are computed against all keys that the mask leaves them, in several
    tiles where those would hold more than 64 Mi scores (4 Mi). What bounds each direction: docs/backends.md.
    On an H100 (bfloat16, causal, training, head_dim 320 and 512, 4096 to 16384 tokens) that beat blocks of
    256 and 512 queries, and tiles of 16 and 32 Mi, by 5 to 15 % of the device's time and by more of the
    host's; 32 Mi would save 0.4 GiB at 8192 tokens. Training takes 0.14 to 0.33 of the time of EFFICIENT
    with repeated keys and values (benchmarks/results/h100-torch2.11-chunked.json).
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    compiling = torch.compiler.is_compiling() or is_traced(query)
    seed = _drawn_seed(inputs, compiling=compiling) if inputs.dropout_p else None
    extras, spec = described(inputs, seed=0 if seed is None or compiling else int(seed))
    if block_q is None and not compiling and spec.program is None and spec.score_mod is None:
        block_q = one_block(query, key, spec.limits)
    if block_q is not None:
        spec = spec._replace(block_q=block_q)
    if compiling:
        out, lse = operator.attend(query, key, value, extras, spec, seed)
        return out, lse if wants_lse else None
    return autograd.attend(query, key, value, extras, spec, wants_lse=wants_lse)


def described(inputs: Inputs, *, seed: int = 0) -> tuple[Extras, Spec]:
    """Return a call's tensors beside query, key and value, and its plain values."""
    mask = inputs.mask
    spec = Spec(
        scale=inputs.query.shape[3] ** -0.5 if inputs.scale is None else float(inputs.scale),
        softcap=float(inputs.softcap),
        dropout_p=float(inputs.dropout_p),
        seed=seed,
        limits=_limits(mask),
        block_q=None,
        program=_program(mask),
        score_mod=inputs.score_mod,
    )
    extras = Extras(
        bias=inputs.bias,
        slopes=inputs.alibi_slopes,
        sink=inputs.sink,
        key_keep=mask.key_keep,
        ids_q=mask.document_ids_q,
        ids_kv=mask.document_ids_kv,
        dense=mask.dense,
    )
    return extras, spec


def _limits(mask: LoweredMask) -> Limits:
    """Return what lets blocks be skipped: a band around a diagonal of its own bounds no positions."""
    if mask.diagonal is not None:
        return Limits(bounds=mask.document_bounds)
    return Limits(mask.band_lo, mask.band_hi, mask.document_bounds)


def _program(mask: LoweredMask) -> LoweredMask | None:
    """Return the part of a mask that is evaluated tile by tile, None where there is none."""
    if mask.diagonal is None and not mask.is_programmed:
        return None
    band = LoweredMask()
    if mask.diagonal is not None:
        band = LoweredMask(band_lo=mask.band_lo, band_hi=mask.band_hi, diagonal=mask.diagonal)
    return replace(
        band, either=mask.either, exclude=mask.exclude, functions=mask.functions, sparse=mask.sparse
    )


def _drawn_seed(inputs: Inputs, *, compiling: bool) -> Tensor:
    """Draw a seed on the CPU: it follows torch.manual_seed and checkpoints, and waits for no device.

    Nothing could draw it again in the replays of a CUDA graph. This is no row of a table, because a
    route that was chosen before the capture runs inside of it.
    """
    if not compiling and is_capturing(inputs.query):
        raise argument_error(
            "dropout_p",
            "0 while a CUDA graph is captured, since every replay would drop the same entries",
            inputs.dropout_p,
            "capture without dropout",
        )
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


executor = Executor(run)
