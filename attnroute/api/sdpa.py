"""torch's scaled_dot_product_attention, with its own arguments and their meaning, run by `attention()`.

What `attention()` does not know, or torch's function refuses or means otherwise, goes to that function as
it is: it computes, or raises its own error.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnroute import scopes
from attnroute.api import dispatch
from attnroute.api.attention import attention
from attnroute.api.intake import DEVICES
from attnroute.api.records import Given
from attnroute.errors import ArgumentError
from attnroute.masks.tracing import innermost_transform
from attnroute.question.fits import LARGEST

stock: Final = torch.nn.functional.scaled_dot_product_attention
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BATCHED: Final = 4
"""Dimensions of what `attention()` takes."""
# Under torch.compile(dynamic=True) a float that is a default is an open number, which dynamo cannot compare
# inside of a checkpoint. So the defaults below are ints, as those of `attention()`.


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run a call of torch's function as `attention()` would, with the same result.

    Args:
        query: (..., num_heads_q, seqlen_q, head_dim_qk), with any number of leading dimensions.
        key: (..., num_heads_kv, seqlen_kv, head_dim_qk).
        value: (..., num_heads_kv, seqlen_kv, head_dim_v).
        attn_mask: A bool tensor, True = attend, or a float tensor that is added; not beside `is_causal`.
        dropout_p: Probability of dropping a weight.
        is_causal: Causal from the top left corner.
        scale: Factor on the scores; None = head_dim_qk ** -0.5.
        enable_gqa: Query heads share key/value heads.

    Raises:
        ArgumentError: Inside of `distributed.context_parallel()` the call would be torch's own.
    """
    given = given_of(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if given is None or not _may_be_routed():
        if scopes.on_many_ranks:
            raise _left_to_torch()
        return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    out = attention(
        given.query,
        given.key,
        given.value,
        given.mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        causal_alignment=given.causal_alignment,
        scale=scale,
    )
    if query.dim() == _BATCHED:
        return out
    return out[0] if query.dim() < _BATCHED else out.unflatten(0, query.shape[:-3])


def _left_to_torch() -> ArgumentError:
    required = (
        "scaled_dot_product_attention inside of context_parallel() requires a call that attention() takes"
    )
    got = "one that torch would run, on this rank's tokens alone (shapes that broadcast, or MATH alone)"
    return ArgumentError(f"{required}; got {got}; make it outside of the block.")


def given_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Given | None:
    """Return a call of torch's function as one of `attention()`; None where that does not mean the same."""
    numbers = (dropout_p, is_causal, scale, enable_gqa)
    if left_to_torch(query, key, value, attn_mask, *numbers):
        return None
    given = Given(
        _batched(query),
        _batched(key),
        _batched(value),
        None if attn_mask is None else _batched_mask(attn_mask, query),
        dropout_p=dropout_p,
        is_causal=is_causal,
        causal_alignment="top_left" if is_causal else None,
        scale=scale,
    )
    return given if dispatch.is_local(given) else None


def left_to_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str:
    """Return what makes a call of torch's function none of `attention()`; empty for one that is."""
    if not _are_known(query, key, value):
        return (
            "its tensors are nested, sparse or unlike each other, or have a device or dtype without kernels"
        )
    if not _fit(query, key, value, enable_gqa=enable_gqa):
        return "its sizes are empty, broadcast, or fit in no way"
    if attn_mask is not None and (is_causal or not _is_mask(attn_mask, query, key)):
        return "its mask stands beside is_causal, or has a dtype or shape that torch refuses"
    if not 0.0 <= dropout_p < 1.0:
        return "its dropout_p is not in [0, 1)"
    return "" if scale is None or -LARGEST <= scale <= LARGEST else "its scale is no finite number"


def _may_be_routed() -> bool:
    """Return whether nothing around the call asks for torch's composite function.

    Only that one is differentiable at every level of torch.func, and `sdpa_kernel(SDPBackend.MATH)` is how
    code asks for it. Other switches order torch's kernels among each other, and the tables do that here.
    """
    if torch.compiler.is_compiling():
        return True
    fused = torch._C._get_flash_sdp_enabled() or torch._C._get_mem_efficient_sdp_enabled()
    only_math = not (fused or torch._C._get_cudnn_sdp_enabled())
    return not only_math and innermost_transform() is None and forward_ad._current_level < 0


def _are_known(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether these are tensors of a kind that `attention()` takes."""
    if query.is_nested or key.is_nested or value.is_nested:
        return False
    device = query.device
    same = query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled(device.type)
    return (
        device.type in DEVICES
        and device == key.device == value.device
        and query.layout == key.layout == value.layout == torch.strided
        and same
        and query.dtype in _DTYPES
        and key.dtype in _DTYPES
        and value.dtype in _DTYPES
    )


def _fit(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Return whether the sizes fit without the broadcasting that torch's function has besides."""
    if query.dim() < _BATCHED - 1 or not query.dim() == key.dim() == value.dim():
        return False
    heads, heads_kv = query.shape[-3], key.shape[-3]
    shared = enable_gqa and heads_kv > 0 and heads % heads_kv == 0
    return (
        (heads == heads_kv or shared)
        and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
        and key.shape[-3:-1] == value.shape[-3:-1]
        and query.shape[-1] == key.shape[-1]
        # What is empty costs nothing, and torch has its own mind about it.
        and query.numel() > 0
        and value.numel() > 0
    )


def _is_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Return whether torch's function takes the mask."""
    if mask.is_nested or mask.layout != torch.strided or mask.device != query.device:
        return False
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    if not 2 <= mask.dim() <= query.dim():
        return False
    shape = (*query.shape[:-1], key.shape[-2])[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))


def _batched(tensor: Tensor) -> Tensor:
    """Return a tensor with one dimension for the batch."""
    if tensor.dim() == _BATCHED:
        return tensor
    return tensor.unsqueeze(0) if tensor.dim() < _BATCHED else tensor.flatten(0, -4)


def _batched_mask(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask that broadcasts to the scores of batched tensors as it did to those of these."""
    if mask.dim() == 2:
        return mask
    if mask.dim() == 3:
        return mask.unsqueeze(0)
    if query.dim() == _BATCHED:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
