"""The short way of a call: gather the arguments, make the key under which its route is remembered."""

from __future__ import annotations

import torch
from torch import Tensor

from attnroute.api.forms import TORCH_MASKS, take_bias, take_mask
from attnroute.api.packed import pack, refuse_lengths
from attnroute.api.question import Arguments, device_of, places, widen
from attnroute.api.transforms import active_transform, has_dispatch_mode, may_be_transformed
from attnroute.api.validate import check_flags, instead
from attnroute.errors import ArgumentError, argument_error
from attnroute.masks import Dense, Mask
from attnroute.masks.checks import kind_of
from attnroute.masks.layout import tensor_key
from attnroute.masks.lowered.form import Extent
from attnroute.masks.recognition.summary import INSPECT_THRESHOLD, inspect_mask
from attnroute.masks.tracing import is_traced
from attnroute.question.fits import LARGEST
from attnroute.question.policy import Policy

DEVICES = ("cpu", "cuda")
_SWITCH = (type(None), bool)
_ALIGNMENT_BITS = 15


def collect(args: Arguments) -> Arguments:
    """Turn other forms of arguments into tensors and mask objects, and fill in what surrounds the call.

    Raises:
        ArgumentError: query, key or value is no tensor, or lies on a device that no backend knows; what is
            given in another form means nothing; determinism that no kernel would heed is asked for.
    """
    query, key, value = args.query, args.key, args.value
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        raise _not_a_tensor(query, key, value)
    # Asking for query.device.type takes four times as long, and every call waits for this.
    device_type = "cuda" if query.is_cuda else "cpu" if query.is_cpu else device_of(query)[0]
    if device_type not in DEVICES:
        to_do = "move query, key and value to one of them"
        raise argument_error("query", f"a device among {', '.join(DEVICES)}", query.device, to_do)
    if (
        args.causal_alignment is not None
        or args.is_causal.__class__ is not bool
        or args.return_lse.__class__ is not bool
        or args.deterministic.__class__ not in _SWITCH
    ):
        check_flags(args)
    if args.mask is not None and type(args.mask).__name__ in TORCH_MASKS:
        take_mask(args)
    if args.bias is not None and type(args.bias) is not Tensor:
        take_bias(args)
    if args.layout == "thd":
        pack(args)
    else:
        refuse_lengths(args)
    if torch.is_autocast_enabled(device_type):
        _autocast(args, torch.get_autocast_dtype(device_type))
    if not (query.is_nested or value.is_nested) and (0 in query.shape[-1:] or 0 in value.shape[-1:]):
        widen(args)
    args.training = torch.is_grad_enabled() and _requires_grad(args) and not torch.is_inference_mode_enabled()
    strictly = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if args.deterministic is None:
        args.deterministic = strictly
    elif args.deterministic and args.training and not strictly:
        raise _not_deterministic()
    args.transform = _transform(args) if may_be_transformed() else None
    args.traced = is_traced(query)
    # A tracer sees every operator through modes of its own.
    args.dispatch_mode = not args.traced and has_dispatch_mode()
    return args


def _requires_grad(args: Arguments) -> bool:
    if args.query.requires_grad or args.key.requires_grad or args.value.requires_grad:
        return True
    if args.mask is None and args.bias is None and args.sink is None and args.alibi_slopes is None:
        return any(tensor.requires_grad for tensor in args.captured)
    others = (args.mask, args.bias, args.sink, args.alibi_slopes, *args.captured)
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in others)


def _transform(args: Arguments) -> str | None:
    tensors = (args.query, args.key, args.value, args.mask, args.bias, args.sink, args.alibi_slopes)
    return active_transform(*tensors, *args.captured)


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
        args.dispatch_mode,
        None if args.mask is None else _mask_key(args, policy),
        None if args.bias is None else _bias_key(args.bias),
        args.is_causal,
        args.causal_alignment,
        args.window if args.window is None else (args.window, *map(type, args.window)),
        args.scale if args.scale is None else _scale_key(args.scale),
        args.softcap,
        type(args.softcap),
        args.dropout_p,
        type(args.dropout_p),
        None if args.sink is None else _bias_key(args.sink),
        None if args.alibi_slopes is None else _bias_key(args.alibi_slopes),
        None if args.score_mod is None else any(t.requires_grad for t in args.captured),
        args.layout,
        args.deterministic,
        args.return_lse,
        args.training and (query.requires_grad or key.requires_grad or value.requires_grad),
        policy.key,
    )


def _scale_key(scale: float) -> tuple[object, ...]:
    """Return what a decision and the checks depend on: numbers of two types may be equal."""
    kind = type(scale)
    return (kind, scale > 0, scale < 0, isinstance(scale, int | float) and abs(scale) <= LARGEST)


def _mask_key(args: Arguments, policy: Policy) -> object:
    mask = args.mask
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        return (*tensor_key(mask), _seen(mask, args, policy))
    if isinstance(mask, Mask):
        return tuple(_node_key(node, args, policy) for node in mask.nodes)
    return ("not a mask", id(mask))


def _node_key(node: Mask, args: Arguments, policy: Policy) -> object:
    if isinstance(node, Dense):
        return ("dense", *tensor_key(node.tensor), _seen(node.tensor, args, policy))
    return node.key()


def _bias_key(bias: object) -> object:
    return tensor_key(bias) if isinstance(bias, Tensor) else ("not a tensor", id(bias))


def _seen(mask: Tensor, args: Arguments, policy: Policy) -> object:
    """What a look found, once per tensor: routes of masks that say different things are different."""
    if not policy.recognize or mask.dtype != torch.bool or args.transform is not None:
        return None
    _, length_at = places(args.layout)
    if args.query.dim() <= length_at or args.key.dim() <= length_at:
        return None
    seqlen_q, seqlen_kv = args.query.shape[length_at], args.key.shape[length_at]
    if seqlen_q * seqlen_kv < INSPECT_THRESHOLD:
        return None
    return inspect_mask(mask, Extent(args.query.shape[0], 0, seqlen_q, seqlen_kv))


def _not_deterministic() -> ArgumentError:
    """The backward of torch's kernels reads torch's own switch and nothing else."""
    required = "torch.use_deterministic_algorithms(True) where gradients are asked for"
    return argument_error(
        "deterministic", required, "that switch off or warn_only", "switch it on, or pass None"
    )


def _not_a_tensor(query: object, key: object, value: object) -> ArgumentError:
    named = (("query", query), ("key", key), ("value", value))
    name, wrong = next((n, t) for n, t in named if not isinstance(t, Tensor))
    return argument_error(name, "a torch.Tensor", kind_of(wrong), instead(wrong))


def _autocast(args: Arguments, dtype: torch.dtype) -> None:
    """Cast as autocast does for scaled_dot_product_attention: every float tensor but float64."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    args.query, args.key, args.value = cast(args.query), cast(args.key), cast(args.value)
    if isinstance(args.mask, Tensor):
        args.mask = cast(args.mask)
    if isinstance(args.bias, Tensor):
        args.bias = cast(args.bias)
