"""`attention()` and `explain()`: tensors to a decision, and to the kernel that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from attnroute.api import routes
from attnroute.api.arguments import collect, route_key
from attnroute.api.options import Options
from attnroute.api.validate import refuse_layout_arguments
from attnroute.policy import merge
from attnroute.settings import current, policy_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnroute.engine.decision import Decision
    from attnroute.masks.nodes import Mask
    from attnroute.policy import Policy

__all__ = ["attention", "explain"]

_THD = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None = ...,
    *,
    return_lse: Literal[True],
    **rest: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **rest: Unpack[Options],
) -> Tensor: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None = None,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    layout: str = "bhsd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    prefer: str | Iterable[str] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by the fastest kernel that is known to be right for this call, here, with these versions.

    Computes ``softmax(softcap(scale * query @ key.T) + bias, over allowed keys) @ value``. A query that may
    attend no key gives zeros, on every backend. Under autocast, float inputs are cast as for
    scaled_dot_product_attention.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim_qk) in layout bhsd; any float dtype; CPU or CUDA.
        key: (batch, num_heads_kv, seqlen_kv, head_dim_qk); num_heads_kv divides num_heads_q (GQA, MQA).
        value: (batch, num_heads_kv, seqlen_kv, head_dim_v).
        mask: Who may attend: a mask object (`attnroute.masks`) or a bool tensor, True = attend, that
            broadcasts to
            (batch, num_heads_q, seqlen_q, seqlen_kv) from 1, 2 or 4 dimensions. A float tensor is taken as
            `bias`.
        bias: Float tensor of any float dtype added to the scaled scores, broadcasting as `mask` does. Gets a
            gradient when it requires one.
        is_causal: Causal as well; holds together with `mask`.
        causal_alignment: "top_left" (as scaled_dot_product_attention) or "bottom_right" (as flash-attn).
            Must be stated for `is_causal` and `window` when seqlen_q != seqlen_kv.
        window: (left, right) counts of keys beside the diagonal, both inclusive, None = open. A
            configuration that says ``sliding_window = W`` means ``(W - 1, 0)``.
        scale: Factor on query @ key.T; None = head_dim_qk ** -0.5.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0.0 = off.
        sink: (num_heads_q,) extra logit per head that takes weight and gives no value.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q): adds ``-slope * |i + seqlen_kv - seqlen_q -
            j|``.
        dropout_p: Probability in [0, 1) of dropping a weight; applied whenever it is not 0.0.
        layout: "bhsd" or "bshd" (batch, seqlen, num_heads, head_dim); the result has the same.
        cu_seqlens_q: Refused: pass `masks.Documents`.
        cu_seqlens_kv: Refused: pass `masks.Documents`.
        max_seqlen_q: Refused: pass `masks.Documents`.
        max_seqlen_kv: Refused: pass `masks.Documents`.
        deterministic: Only deterministic algorithms; None = as torch.use_deterministic_algorithms says. Where
            gradients are asked for True needs that switch on: the backward of torch's kernels reads only it.
        return_lse: Also return the log-sum-exp.
        backend: The only backend that may run this call.
        prefer: One or more backends to try first.

    Returns:
        (batch, num_heads_q, seqlen_q, head_dim_v) in the dtype of the query and the given layout. With
        `return_lse`
        also the natural log-sum-exp, float32, (batch, num_heads_q, seqlen_q), -inf for a query with no key;
        it carries no gradient except on backend "chunked".

    Raises:
        ArgumentError: An argument means nothing; no kernel was launched.
        NoBackendError: Nothing may run the call as asked; the message holds every reason.
        OverrideError: `backend`, `prefer` or an environment variable names something unknown.
    """
    refuse_layout_arguments(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
    )
    # The decision cannot be traced yet: under torch.compile the call stands outside of the graph.
    attend = _attend_untraced if torch.compiler.is_compiling() else _attend
    return attend(
        query,
        key,
        value,
        mask,
        bias,
        is_causal,
        causal_alignment,
        window,
        scale,
        softcap,
        sink,
        alibi_slopes,
        dropout_p,
        layout,
        deterministic,
        return_lse,
        backend,
        prefer,
    )


def _attend(*given: Any) -> Tensor | tuple[Tensor, Tensor]:
    *arguments, backend, prefer = given
    args = collect(*arguments)
    policy = current() if backend is None and prefer is None else _call_policy(backend, prefer)
    try:
        where = route_key(args, policy)
        route = routes.lookup(where)
    except (AttributeError, RuntimeError, TypeError) as error:
        # What no key can be made of is malformed, and the checks say which argument and how.
        routes.decision_of(args, policy)
        raise error from None
    if route is None:
        route = routes.make(args, policy, where)
    out, lse = routes.execute(route, args)
    if not args.return_lse:
        return out
    return out, lse.float()  # type: ignore[union-attr]


_attend_untraced = torch.compiler.disable(_attend)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None = None,
    *,
    backend: str | None = None,
    prefer: str | Iterable[str] | None = None,
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
        **arguments: Every other argument of `attention`.

    Returns:
        The decision with every backend's verdict, hints, and what stock scaled_dot_product_attention would
        run; ``str()`` of it is the explanation.

    Raises:
        ArgumentError: An argument means nothing.
        OverrideError: `backend`, `prefer` or an environment variable names something unknown.
    """
    unknown = sorted(set(arguments) - set(_DEFAULTS) - set(_THD) - {"bias", "deterministic"})
    if unknown:
        msg = f"explain() got an unexpected keyword argument {unknown[0]!r}"
        raise TypeError(msg)
    refuse_layout_arguments(**{name: arguments.pop(name, None) for name in _THD})
    filled = {"bias": None, "deterministic": None, **_DEFAULTS, **arguments}
    args = collect(query, key, value, mask, **filled)
    policy = current() if backend is None and prefer is None else _call_policy(backend, prefer)
    return routes.decision_of(args, policy, advise=True)


_DEFAULTS: dict[str, Any] = {
    "is_causal": False,
    "causal_alignment": None,
    "window": None,
    "scale": None,
    "softcap": 0.0,
    "sink": None,
    "alibi_slopes": None,
    "dropout_p": 0.0,
    "layout": "bhsd",
    "return_lse": False,
}


def _call_policy(backend: str | None, prefer: str | Iterable[str] | None) -> Policy:
    return merge(current(), policy_of("attention()", backend=backend, prefer=prefer))
