"""The short way of a call: gather the arguments, make the key under which its route is remembered."""

from __future__ import annotations

import torch
from torch import Tensor

from attnroute.api.question import Arguments
from attnroute.api.transforms import active_transform
from attnroute.errors import ArgumentError, argument_error
from attnroute.masks.nodes import Dense, Extent, Mask
from attnroute.masks.tensors import LOOK_THRESHOLD, look_into, tensor_key
from attnroute.policy import Policy

DEVICES = ("cpu", "cuda")
_ALIGNMENT_BITS = 15


def collect(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Mask | None,
    bias: Tensor | None,
    is_causal: bool,
    causal_alignment: str | None,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    layout: str,
    deterministic: bool | None,
    return_lse: bool,
) -> Arguments:
    """Fill in what surrounds the call: autocast, gradients, determinism, transforms.

    Raises:
        ArgumentError: query, key or value is no tensor, or lies on a device that no backend knows.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        raise _not_a_tensor(query, key, value)
    if query.device.type not in DEVICES:
        to_do = "move query, key and value to one of them"
        raise argument_error("query", f"a device among {', '.join(DEVICES)}", query.device, to_do)
    if torch.is_autocast_enabled(query.device.type):
        query, key, value, mask, bias = _autocast(query, key, value, mask, bias)
    strictly = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    training = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or any(isinstance(t, Tensor) and t.requires_grad for t in (mask, bias, sink, alibi_slopes))
    )
    if deterministic is None:
        deterministic = strictly
    elif deterministic and training and not strictly:
        raise _not_deterministic()
    return Arguments(
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
        training,
        active_transform(query, key, value, mask, bias, sink, alibi_slopes),
    )


def route_key(args: Arguments, policy: Policy) -> tuple[object, ...]:
    """Return everything that a decision may depend on, as plain hashable values.

    Reading it costs a few microseconds; nothing here waits for the device unless a dense mask is new.
    """
    query, key, value = args.query, args.key, args.value
    memory: object = None
    if args.transform is None and not query.is_nested:
        misaligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & _ALIGNMENT_BITS
        memory = (query.stride(), key.stride(), value.stride(), misaligned)
    return (
        query.shape,
        key.shape,
        value.shape,
        memory,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        args.training,
        args.transform,
        None if args.mask is None else _mask_key(args, policy),
        None if args.bias is None else _bias_key(args.bias),
        args.is_causal,
        args.causal_alignment,
        args.window,
        args.scale if args.scale is None else (args.scale > 0, args.scale < 0, args.scale * 0 == 0),
        args.softcap,
        args.dropout_p,
        None if args.sink is None else _bias_key(args.sink),
        None if args.alibi_slopes is None else _bias_key(args.alibi_slopes),
        args.layout,
        args.deterministic,
        args.return_lse,
        args.training and (query.requires_grad or key.requires_grad or value.requires_grad),
        policy.key,
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


def _not_deterministic() -> ArgumentError:
    """The backward of torch's kernels reads torch's own switch and nothing else."""
    required = "torch.use_deterministic_algorithms(True) where gradients are asked for"
    return argument_error(
        "deterministic", required, "that switch off or warn_only", "switch it on, or pass None"
    )


def _not_a_tensor(query: object, key: object, value: object) -> ArgumentError:
    named = (("query", query), ("key", key), ("value", value))
    name, wrong = next((n, t) for n, t in named if not isinstance(t, Tensor))
    return argument_error(name, "a torch.Tensor", type(wrong).__name__, "convert it")


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
