"""The two public functions: `attention()` runs a call, `explain()` returns the decision about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from attnroute.api import dispatch, repeats, routes
from attnroute.api.alike import together
from attnroute.api.records import Given, Options
from attnroute.api.validate import with_names_of_torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn.attention.flex_attention import BlockMask

    from attnroute.biases import Bias
    from attnroute.engine.decision import Decision
    from attnroute.masks.objects.base import Mask

__all__ = ["attention", "explain"]

_OFF: Final = 0
"""The default of numbers. It is no float: dynamo makes those inputs of a graph with dynamic sizes, and fails
where several checkpoints of the graph read them."""


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | BlockMask | None = ...,
    *,
    return_lse: Literal[True],
    **rest: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | BlockMask | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **rest: Unpack[Options],
) -> Tensor: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | BlockMask | None = None,
    *,
    bias: Tensor | Bias | None = None,
    is_causal: bool = False,
    causal_alignment: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = _OFF,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = _OFF,
    layout: str = "bhsd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    prefer: str | Iterable[str] | None = None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by the fastest kernel that is known to be right for this call, here, with these versions.

    Computes ``softmax(softcap(scale * query @ key.T) + bias, over allowed keys) @ value``. The order is
    fixed: scale, softcap, bias (or ALiBi, or score function), mask, sink. A query that may attend no key
    gives zeros, on every backend. Under autocast, float inputs are cast as for scaled_dot_product_attention.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim_qk) in layout bhsd, (total_q, num_heads_q,
            head_dim_qk) in layout thd; any float dtype; CPU or CUDA, or "meta", where the result has the
            shape, dtype and strides that the CPU would give. A head_dim of 0 gives what stock gives. With
            `key` and `value` a DTensor sharded along batch or heads, or replicated: the result is one too.
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk), in layout thd (total_kv, num_heads_kv,
            head_dim_qk); num_heads_kv divides num_heads_q (GQA, MQA).
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v), in layout thd (total_kv, num_heads_kv,
            head_dim_v).
        mask: Who may attend: a mask object (`attnroute.masks`), a BlockMask of torch's FlexAttention or a
            bool tensor, True = attend, that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_kv) from 1,
            2 or 4 dimensions. A float tensor is taken as `bias`; torch's CausalBias is causal with its
            alignment. Not beside layout thd. What a tensor here, in a mask object or in `cu_seqlens_q` says
            is worked out once, and again after a change that torch counts or after ``mask.data = other``; of
            memory shared with numpy, a file or another process in each call. No other change can be seen:
            after a write through ``mask.data``, the storage, an exported DLPack capsule or CUDA array, say
            ``torch.autograd.graph.increment_version(mask)``.
        bias: Float tensor of any float dtype added to the scaled scores, broadcasting as `mask` does, or a
            bias object (`attnroute.biases`): Dense, ALiBi or Function (a score_mod), and Softcap. Tensors
            get a gradient when they require one.
        is_causal: Causal as well; holds together with `mask`. In layout thd it holds within each sequence.
        causal_alignment: "top_left" (as scaled_dot_product_attention) or "bottom_right" (as flash-attn).
            Must be stated for `is_causal` and `window` when seqlen_q != seqlen_kv, and in layout thd when
            `cu_seqlens_kv` is another tensor than `cu_seqlens_q`. Beside neither it is refused: mask objects
            have a corner of their own.
        window: (left, right) counts of keys beside the diagonal, both inclusive, None = open. A
            configuration that says ``sliding_window = W`` means ``(W - 1, 0)``. In layout thd it holds
            within each sequence.
        scale: Factor on query @ key.T; None = head_dim_qk ** -0.5.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0.0 = off.
        sink: (num_heads_q,) extra logit per head that takes weight and gives no value.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q): adds ``-slope * |i + seqlen_kv - seqlen_q -
            j|``. In layout thd only where queries and keys have the same lengths.
        dropout_p: Probability in [0, 1) of dropping a weight; applied whenever it is not 0.0.
        layout: "bhsd", "bshd" (batch, seqlen, num_heads, head_dim) or "thd" (sequences of different
            lengths, one behind the other, in one dimension of all tokens); the result has the same.
        cu_seqlens_q: Of layout thd alone, and required there: (sequences + 1,) int32 or int64, on the
            query's device or the CPU. Prefix sums of the lengths, from 0 to total_q; equal neighbours are a
            sequence of length 0. On the CPU wrong sums are refused; a device is not waited for.
        cu_seqlens_kv: The same of the keys; None = `cu_seqlens_q`.
        max_seqlen_q: Upper bound of the query lengths of layout thd, as a Python int. None = total_q where
            `cu_seqlens_q` lies on the device: kernels then launch (and some allocate) as for one sequence of
            that length, so state it where sequences are many. Sums on the CPU say it themselves. A bound
            that is too small is refused where the sums lie on the CPU, and gives wrong results elsewhere.
        max_seqlen_kv: The same of the keys.
        deterministic: Only deterministic algorithms; None = as torch.use_deterministic_algorithms says. Where
            gradients are asked for True needs that switch on: the backward of torch's kernels reads only it.
        return_lse: Also return the log-sum-exp.
        backend: The only backend that may run this call.
        prefer: One or more backends to try first; not beside `backend`.
        attn_mask: The name that scaled_dot_product_attention has for `mask`; not beside it.
        enable_gqa: As for scaled_dot_product_attention, so that calls of it need no other names: True says
            what holds anyway, False refuses key/value heads that are shared among query heads.

    Returns:
        (batch, num_heads_q, seqlen_q, head_dim_v) in the dtype of the query and the given layout; (total_q,
        num_heads_q, head_dim_v) in layout thd. With `return_lse` also the natural log-sum-exp, float32,
        (batch, num_heads_q, seqlen_q), in layout thd (num_heads_q, total_q), -inf for a query with no key;
        it carries no gradient except on backends "chunked" and "flex".

    Raises:
        ArgumentError: An argument means nothing; no kernel was launched.
        NoBackendError: Nothing may run the call as asked; the message holds every reason.
        KernelRefusedError: The backend's package refused the call before its kernel was launched (for flex:
            torch.compile did not compile it), and the backend was required or strict is on.
        OverrideError: `backend`, `prefer` or an environment variable names something unknown.

    Warns:
        RerouteWarning: A kernel was refused before its launch; another backend runs such calls from now on.
    """
    if attn_mask is not None or enable_gqa is not None:
        mask = with_names_of_torch(query, key, layout, mask, attn_mask, enable_gqa)
    is_traced, rest = is_dynamo_compiling(), None
    if (
        is_traced
        # False equals 0, and what is malformed may equal anything; most pass no number, or 0.0.
        or causal_alignment is not None
        or (softcap is not _OFF and (softcap.__class__ is not float or softcap != 0))
        or alibi_slopes is not None
        or (dropout_p is not _OFF and (dropout_p.__class__ is not float or dropout_p != 0))
        or layout != "bhsd"
        or cu_seqlens_q is not None
        or cu_seqlens_kv is not None
        or max_seqlen_q is not None
        or max_seqlen_kv is not None
        or deterministic is not None
        or return_lse is not False
        or backend is not None
        or prefer is not None
    ):
        rest = (
            causal_alignment,
            softcap,
            alibi_slopes,
            dropout_p,
            layout,
            cu_seqlens_q,
            cu_seqlens_kv,
            max_seqlen_q,
            max_seqlen_kv,
            deterministic,
            return_lse,
            backend,
            prefer,
        )
    if not is_traced:
        found = repeats.run(query, key, value, mask, bias, sink, is_causal, window, scale, rest)
        if found is not None:
            out, lse = found
            return out if lse is None else (out, lse)
    given = together(query, key, value, mask, bias, sink, is_causal, window, scale, rest)
    if torch.compiler.is_compiling():
        # It imports dynamo, which a call that compiles nothing does without.
        from attnroute.api import graph

        out, lse = graph.run(given)
    else:
        out, lse = dispatch.run(given)
    return out if lse is None else (out, lse)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | BlockMask | None = None,
    *,
    backend: str | None = None,
    prefer: str | Iterable[str] | None = None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool | None = None,
    arch: str | None = None,
    **arguments: Any,
) -> Decision:
    """Say what `attention()` would do with the same arguments, running nothing.

    Args:
        query: As for `attention`.
        key: As for `attention`.
        value: As for `attention`.
        mask: As for `attention`.
        backend: As for `attention`.
        prefer: As for `attention`.
        attn_mask: As for `attention`.
        enable_gqa: As for `attention`.
        arch: Another machine, by its architecture or card: "sm_90", "h100". It has the newest known torch
            and no package besides. None = this machine.
        **arguments: Every other argument of `attention`.

    Returns:
        The decision with every backend's verdict, hints, and what stock scaled_dot_product_attention would
        run; ``str()`` of it is the explanation. Inside of `distributed.context_parallel()` it is about the
        call that a kernel of this rank gets, and says by which way.

    Raises:
        ArgumentError: An argument means nothing.
        OverrideError: `backend`, `prefer` or an environment variable names something unknown.
    """
    unknown = arguments.keys() - Given._fields
    if unknown:
        msg = f"explain() got an unexpected keyword argument {min(unknown)!r}"
        raise TypeError(msg)
    mask = with_names_of_torch(query, key, arguments.get("layout"), mask, attn_mask, enable_gqa)
    given = Given(query, key, value, mask, backend=backend, prefer=prefer, **arguments)
    problem, policy = dispatch.question(given)
    if arch is not None:
        return routes.decision_on(arch, problem, policy)
    return routes.decision_of(problem, policy, advise=True)
