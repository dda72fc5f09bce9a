"""The short way of a call: gather the arguments, make the key under which its route is remembered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnroute.api.question import Arguments
from attnroute.api.transforms import active_transform
from attnroute.errors import argument_error
from attnroute.masks.nodes import Dense, Extent, Mask
from attnroute.masks.tensors import LOOK_THRESHOLD, look_into, tensor_key
from attnroute.policy import Policy

_ALIGNMENT_BITS = 15


def collect(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | Mask | None,
    bias: Tensor | None,
    deterministic: bool | None,
    **rest: Any,
) -> Arguments:
    """Fill in what surrounds the call: autocast, gradients, determinism, transforms.

    Raises:
        ArgumentError: query, key or value is no tensor.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise argument_error(name, "a torch.Tensor", type(tensor).__name__, "convert it")
    if torch.is_autocast_enabled(query.device.type):
        query, key, value, mask, bias = _autocast(query, key, value, mask, bias)
    if deterministic is None:
        deterministic = (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
    training = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or _any_requires_grad(mask, bias, rest)
    )
    return Arguments(
        query=query,
        key=key,
        value=value,
        mask=mask,
        bias=bias,
        deterministic=deterministic,
        training=training,
        transform=active_transform(query, key, value),
        **rest,
    )


def route_key(args: Arguments, policy: Policy) -> tuple[object, ...]:
    """Return everything that a decision may depend on, as plain hashable values.

    Reading it costs a few microseconds; nothing here waits for the device unless a dense mask is new.
    """
    query, key, value = args.query, args.key, args.value
    misaligned = 0
    if args.transform is None and not query.is_nested:
        misaligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & _ALIGNMENT_BITS
        strides: object = (query.stride(), key.stride(), value.stride())
    else:
        strides = None
    return (
        query.shape,
        key.shape,
        value.shape,
        strides,
        misaligned,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        args.training,
        args.transform,
        _mask_key(args, policy),
        None if args.bias is None else _bias_key(args.bias),
        args.is_causal,
        args.causal_alignment,
        args.window,
        args.scale if args.scale is None else (args.scale > 0, args.scale < 0, args.scale * 0 == 0),
        args.softcap,
        args.dropout_p,
        None if args.sink is None else tensor_key(args.sink),
        None if args.alibi_slopes is None else tensor_key(args.alibi_slopes),
        args.layout,
        args.deterministic,
        args.return_lse,
        query.requires_grad or key.requires_grad or value.requires_grad,
        policy,
    )


def _mask_key(args: Arguments, policy: Policy) -> object:
    mask = args.mask
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        return (*_tensor_key(mask), _seen(mask, args, policy))
    if isinstance(mask, Mask):
        return tuple(_node_key(node, args, policy) for node in mask.nodes)
    return ("not a mask", id(mask))


def _node_key(node: Mask, args: Arguments, policy: Policy) -> object:
    if isinstance(node, Dense):
        return ("dense", *_tensor_key(node.tensor), _seen(node.tensor, args, policy))
    return node.key()


def _tensor_key(tensor: Tensor) -> tuple[object, ...]:
    return (*tensor_key(tensor), tensor.device)


def _bias_key(bias: object) -> object:
    return _tensor_key(bias) if isinstance(bias, Tensor) else ("not a tensor", id(bias))


def _seen(mask: Tensor, args: Arguments, policy: Policy) -> object:
    """What a look found, once per tensor: routes of masks that say different things are different."""
    if not policy.recognize or mask.dtype != torch.bool or args.transform is not None:
        return None
    length_at = 2 if args.layout == "bhsd" else 1
    if args.query.dim() <= length_at or args.key.dim() <= length_at:
        return None
    seqlen_q, seqlen_kv = args.query.shape[length_at], args.key.shape[length_at]
    if seqlen_q * seqlen_kv < LOOK_THRESHOLD:
        return None
    return look_into(mask, Extent(0, 0, seqlen_q, seqlen_kv, mask.device))


def _any_requires_grad(mask: object, bias: object, rest: dict[str, Any]) -> bool:
    others = (mask, bias, rest.get("sink"), rest.get("alibi_slopes"))
    return any(isinstance(t, Tensor) and t.requires_grad for t in others)


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Mask | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | Mask | None, Tensor | None]:
    """Cast as autocast does for scaled_dot_product_attention: every float tensor but float64."""
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    return (
        cast(query),
        cast(key),
        cast(value),
        cast(mask) if isinstance(mask, Tensor) else mask,
        cast(bias) if isinstance(bias, Tensor) else bias,
    )
