"""FlexAttention as custom operators, for graphs: opaque to the tracer, and never uncompiled.

In a graph FlexAttention is a higher-order operator that compilers without a kernel for it run on all scores
at once. So a graph has an operator instead, which runs the compiled function of the structure, as an eager
call does. Its backward runs the forward again, because a compiled function keeps for itself what it needs.
"""

from __future__ import annotations

from ast import literal_eval
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attnroute.executors.flex import compile as compiling
from attnroute.executors.flex.program import Blocked, Part, Settings, key_of
from attnroute.executors.operators import Side, no_gradient, register, spread

if TYPE_CHECKING:
    from collections.abc import Callable

    _Operator = Callable[..., Any]

_ARGUMENTS: Final = (
    "Tensor query, Tensor key, Tensor value, Tensor[] score_tensors, Tensor?[] blocks, Tensor[] mask_tensors,"
    " str mask, str score, SymInt block_q, SymInt block_kv, float? scale, bool return_lse,"
    " str options"
)
_QKV: Final = 3


def attend(
    backend: str, query: Tensor, key: Tensor, value: Tensor, mask: Blocked, score: Part, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a call without functions, both of which carry gradients.

    The log-sum-exp is empty where the settings have `return_lse=False`.

    Args:
        backend: "flex" or "flex_fa4": whose operator the graph gets.
        query: (batch, num_heads_q, seqlen_q, head_dim_qk).
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk).
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
        mask: The mask's expression and blocks.
        score: The expression of the scores.
        settings: What is fixed in the code.
    """
    found: tuple[Tensor, Tensor] = _OPERATORS[backend](
        query,
        key,
        value,
        list(score.tensors),
        list(mask.blocks),
        list(mask.part.tensors),
        mask.part.text or "",
        score.text or "",
        *mask.size,
        settings.scale,
        settings.return_lse,
        repr(settings.options),
    )
    return found


def with_own_memory(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Without gradients, and each with memory of its own: inductor's C++ template names them by it."""
    query, key, value = (t.detach() for t in qkv)
    if key.data_ptr() == query.data_ptr():
        key = key.clone()
    if value.data_ptr() in (query.data_ptr(), key.data_ptr()):
        value = value.clone()
    return query, key, value


def _ordinary_state() -> tuple[Any, Any]:
    """Return the dispatcher's state of a new thread, which is that outside of every operator."""
    with ThreadPoolExecutor(1) as pool:
        include = pool.submit(torch._C._dispatch_tls_local_include_set)
        exclude = pool.submit(torch._C._dispatch_tls_local_exclude_set)
        return include.result(), exclude.result()


_ORDINARY: Final = _ordinary_state()


def _outside() -> AbstractContextManager[None]:
    """Leave the operator: inside of it there is neither autograd nor vmap, and torch.compile uses both."""
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(*_ORDINARY)  # type: ignore[attr-defined]
    return guard


def _run(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Run the compiled function on an operator's arguments."""
    query, key, value, scores, blocks, masks, mask_text, score_text, *rest = arguments
    block_q, block_kv, scale, return_lse, options = rest
    mask = Blocked(Part(mask_text or None, tuple(masks)), tuple(blocks), (block_q, block_kv))
    score = Part(score_text or None, tuple(scores))
    settings = Settings(
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=return_lse,
        size=mask.size,
        options=literal_eval(options),
    )
    qkv = (query, key, value)
    if query.device.type == "cpu":
        qkv = with_own_memory(qkv)
    entry = compiling.entry(key_of(qkv, mask, score, settings), mask.part, score, settings)
    out, lse = compiling.run(entry, qkv, mask, score)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    with _outside(), torch.no_grad():
        out, lse = _run(arguments)
    return out.contiguous(), lse.contiguous()


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, value = arguments[0], arguments[2]
    rows, has_lse = query.shape[:3], arguments[-2]
    lse = query.new_empty(rows if has_lse else 0, dtype=torch.float32)
    return query.new_empty(*rows, value.shape[3]), lse


def _backward(grad_out: Tensor, grad_lse: Tensor, *arguments: Any) -> list[Tensor]:
    *rest, wanted = arguments
    count = _QKV + len(rest[_QKV])
    tensors = [t.detach() for t in (*rest[:_QKV], *rest[_QKV])]
    for tensor, wants in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(wants)
    with _outside(), torch.enable_grad():
        ran = _run((*tensors[:_QKV], tensors[_QKV:count], *rest[_QKV + 1 :]))
        followed = [t for t in tensors if t.requires_grad]
        has_lse = ran[1].numel() > 0
        outputs, given = (ran, (grad_out, grad_lse)) if has_lse else (ran[:1], (grad_out,))
        grads = torch.autograd.grad(outputs, followed, given)
    return [g.contiguous() for g in grads]


def _fake_backward(_: Tensor, __: Tensor, *arguments: Any) -> list[Tensor]:
    *rest, wanted = arguments
    tensors = (*rest[:_QKV], *rest[_QKV])
    return [t.new_empty(t.shape) for t, wants in zip(tensors, wanted, strict=True) if wants]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    scores, blocks, masks, *ctx.rest = inputs[_QKV:]
    ctx.sizes = (len(scores), [b is not None for b in blocks])
    ctx.save_for_backward(*inputs[:_QKV], *scores, *(b for b in blocks if b is not None), *masks)


def _gradients(backward: _Operator, ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    n, present = ctx.sizes
    tensors = list(ctx.saved_tensors)
    qkv, scores, rest = tensors[:_QKV], tensors[_QKV : _QKV + n], tensors[_QKV + n :]
    given = iter(rest)
    blocks = [next(given) if is_there else None for is_there in present]
    masks = list(given)
    # A list of tensors has one answer for all of them.
    wanted = [*ctx.needs_input_grad[:_QKV], *(ctx.needs_input_grad[_QKV] or [False] * n)]
    found = backward(grad_out, grad_lse, *qkv, scores, blocks, masks, *ctx.rest, wanted)
    grads = spread(found, wanted)
    rest_of = (no_gradient(value) for value in (blocks, masks, *ctx.rest))
    return *grads[:_QKV], grads[_QKV:], *rest_of


_FORWARD: Final = Side(f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _forward, _fake_forward)
_BACKWARD: Final = Side(
    f"(Tensor grad_out, Tensor grad_lse, {_ARGUMENTS}, bool[] wanted) -> Tensor[]", _backward, _fake_backward
)
_OPERATORS: Final = {
    backend: register(backend, _FORWARD, _BACKWARD, save=_save, gradients=_gradients)[0]
    for backend in ("flex", "flex_fa4")
}
