"""The function that transformers' attention modules call: it passes their arguments to `attention()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnroute.api.attention import attention
from attnroute.errors import argument_error
from attnroute.integrations.transformers.call_mask import carried, unstated, with_cu_seqlens
from attnroute.integrations.transformers.carried_mask import CarriedMask
from attnroute.integrations.transformers.models import eager_only_refused, is_eager_only
from attnroute.masks import KeyPadding, Mask

if TYPE_CHECKING:
    from attnroute.integrations.transformers.pattern import Keys

AttentionFunction = Callable[..., tuple[Tensor, None]]
_DIMS = 4

HARMLESS = frozenset(
    {
        # Positions are in query, key and mask already.
        "position_ids",
        "position_embeddings",
        "cache_position",
        "token_type_ids",
        "mm_token_type_ids",
        # State, outputs and loss of the model around the attention.
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
        "shift_labels",
        "ignore_index",
        # Documents for recurrent layers; attention gets them by position_ids or cu_seq_lens_q.
        "seq_idx",
        # Upper bounds of lengths, beside cu_seq_lens_q.
        "max_length_q",
        "max_length_k",
        # Options of FlexAttention's kernels, which change no result.
        "kernel_options",
    }
)


_HONOURED = frozenset(
    {"softcap", "s_aux", "position_bias", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "deterministic"}
)


def attention_function(ignore: frozenset[str], *, eager_only: bool = False) -> AttentionFunction:
    """Return the function for transformers' registry.

    Args:
        ignore: Keyword arguments that count as harmless, beside those known to be.
        eager_only: Whether models that transformers runs with eager attention only are served.
    """
    known = HARMLESS | ignore | _HONOURED

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
        # Every layer waits for what is done here, so it is little.
        compiling = is_compiling()
        if not eager_only and is_eager_only(type(module).__module__):
            raise eager_only_refused(module)
        # A tracer cannot compare the names as sets.
        if compiling or not kwargs.keys() <= known:
            _refuse_unknown(kwargs, known)
        mask: Mask | Tensor | None = attention_mask
        keys: Keys = None
        if attention_mask is None:
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            mask = unstated(query.shape[2], key.shape[2], bool(is_causal), kwargs)
        elif isinstance(attention_mask, CarriedMask):
            mask, keys = carried(attention_mask, query, key, kwargs, compiling=compiling)
        if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("cu_seq_lens_k") is not None:
            mask = with_cu_seqlens(mask, attention_mask, query, key, kwargs, compiling=compiling)
        bias: Tensor | None = kwargs.get("position_bias")
        if keys is not None:
            start, stop = keys
            key, value = key[:, :, start:stop], value[:, :, start:stop]
            bias = bias[..., start:stop] if bias is not None and bias.shape[-1] > 1 else bias
        if query.shape[0] == 1 < key.shape[0]:
            # Learned queries are shared by the batch.
            query = query.expand(key.shape[0], -1, -1, -1)
        heads = query.shape[1]
        sink = kwargs.get("s_aux")
        folded = (
            mask is not None
            and query.shape[2] == 1
            and heads != key.shape[1]
            and not compiling
            and _is_one_row(mask)
            and bias is None
            and sink is None
        )
        if folded:
            # The query heads that share a key head become its rows, which see the same keys: kernels that
            # read masks then need not repeat key and value.
            query = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        out = attention(
            query,
            key,
            value,
            mask,
            bias=bias,
            scale=scaling,
            softcap=kwargs.get("softcap") or 0.0,
            sink=sink,
            dropout_p=dropout,
            deterministic=kwargs.get("deterministic") or None,
        )
        if folded:
            return out.reshape(out.shape[0], 1, heads, -1), None
        return out.transpose(1, 2).contiguous(), None

    return attnroute_attention_forward


def _is_one_row(mask: Mask | Tensor) -> bool:
    """Whether a mask of one query is the same for every head."""
    if isinstance(mask, Tensor):
        return mask.dim() == _DIMS and mask.shape[1] == 1
    return isinstance(mask, KeyPadding)


def _refuse_unknown(kwargs: Mapping[str, Any], known: frozenset[str]) -> None:
    if kwargs.get("output_attentions"):
        raise argument_error(
            "output_attentions",
            "attention weights, which no fused kernel makes",
            True,
            'load the model with attn_implementation="eager" to see them',
        )
    for name, value in kwargs.items():
        if name not in known and value is not None and value is not False:
            raise argument_error(
                f"keyword argument {name}",
                "a meaning that this integration knows, because it may change what attention computes",
                type(value).__name__,
                f'pass register(ignore=["{name}"]) if it changes nothing, else take "eager"',
            )
