"""The function that transformers' attention modules call: it passes their arguments to `attention()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnroute.api.attention import attention
from attnroute.errors import argument_error
from attnroute.integrations.transformers.call_mask import call_mask
from attnroute.integrations.transformers.models import refuse_eager_only

AttentionFunction = Callable[..., tuple[Tensor, None]]

HARMLESS = frozenset(
    {
        # Positions are in query, key and mask already.
        "position_ids",
        "position_embeddings",
        "cache_position",
        "token_type_ids",
        "mm_token_type_ids",
        # State and outputs of the model around the attention.
        "cache",
        "past_key_value",
        "past_key_values",
        "shared_kv_states",
        "use_cache",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
        # Documents for recurrent layers; attention gets them by position_ids or cu_seq_lens_q.
        "seq_idx",
        # Upper bounds of lengths, beside cu_seq_lens_q.
        "max_length_q",
        "max_length_k",
        # Options of FlexAttention's kernels, which change no result.
        "kernel_options",
    }
)


def attention_function(ignore: frozenset[str], *, eager_only: bool = False) -> AttentionFunction:
    """Return the function for transformers' registry.

    Args:
        ignore: Keyword arguments that count as harmless, beside those known to be.
        eager_only: Whether models that transformers runs with eager attention only are served.
    """
    harmless = HARMLESS | ignore

    def attnroute_attention_forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if not eager_only:
            refuse_eager_only(module)
        _refuse_unknown(kwargs, harmless)
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        out = _attend(query, key, value, attention_mask, is_causal, kwargs, scale=scaling, dropout_p=dropout)
        return out.transpose(1, 2).contiguous(), None

    return attnroute_attention_forward


_HONOURED = frozenset(
    {"softcap", "s_aux", "position_bias", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "deterministic"}
)


def _refuse_unknown(kwargs: Mapping[str, Any], harmless: frozenset[str]) -> None:
    if kwargs.get("output_attentions"):
        raise argument_error(
            "output_attentions",
            "attention weights, which no fused kernel makes",
            True,
            'load the model with attn_implementation="eager" to see them',
        )
    for name, value in kwargs.items():
        if name not in harmless and name not in _HONOURED and value is not None and value is not False:
            raise argument_error(
                f"keyword argument {name}",
                "a meaning that this integration knows, because it may change what attention computes",
                type(value).__name__,
                f'pass register(ignore=["{name}"]) if it changes nothing, else take "eager"',
            )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Tensor | None,
    is_causal: bool,
    kwargs: Mapping[str, Any],
    *,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    bias: Tensor | None = kwargs.get("position_bias")
    mask, (start, stop) = call_mask(query, key, given, is_causal, kwargs)
    if (start, stop) != (0, key.shape[2]):
        key, value = key[:, :, start:stop], value[:, :, start:stop]
        bias = bias[..., start:stop] if bias is not None and bias.shape[-1] > 1 else bias
    if query.shape[0] == 1 < key.shape[0]:
        # Learned queries are shared by the batch.
        query = query.expand(key.shape[0], -1, -1, -1)
    return attention(
        query,
        key,
        value,
        mask,
        bias=bias,
        scale=scale,
        softcap=kwargs.get("softcap") or 0.0,
        sink=kwargs.get("s_aux"),
        dropout_p=dropout_p,
        deterministic=kwargs.get("deterministic") or None,
    )
