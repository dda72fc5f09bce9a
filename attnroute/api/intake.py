"""From the arguments of a call to the problem in bhsd: one mask, one bias, and what surrounds the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from attnroute.api import packed, validate
from attnroute.api.records import Problem
from attnroute.biases import ALiBi, Bias, Dense, Function, Softcap
from attnroute.errors import ArgumentError, argument_error
from attnroute.masks.checks import kind_of
from attnroute.masks.objects.arbitrary import from_torch
from attnroute.masks.objects.captures import captured_tensors
from attnroute.masks.tracing import innermost_transform, is_traced
from attnroute.vocabulary import HEAD_DIM_MULTIPLE

if TYPE_CHECKING:
    from attnroute.api.records import Given
    from attnroute.executors.protocol import ScoreMod

DEVICES: Final = ("cpu", "cuda")
TORCH_MASKS: Final = frozenset({"BlockMask", "CausalBias"})
"""Names of torch's mask classes, so that a call without one needs no import to know that."""
_SWITCH: Final = (type(None), bool)

_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_TransformType = torch._C._functorch.TransformType  # type: ignore[attr-defined]


def take(given: Given) -> Problem:
    """Return what a call computes; what only a call of a new kind must check is left to `validate.check`.

    Raises:
        ArgumentError: query, key or value is no tensor, or lies on a device that no backend knows; what is
            given in another form means nothing; determinism is requested that no kernel provides.
    """
    query, key, value = given.query, given.key, given.value
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        raise _not_a_tensor(query, key, value)
    # Reading query.device.type takes four times as long, and every call waits for this.
    device_type = "cuda" if query.is_cuda else "cpu" if query.is_cpu else _other_device(query)
    if (
        given.causal_alignment is not None
        or given.is_causal.__class__ is not bool
        or given.return_lse.__class__ is not bool
        or given.deterministic.__class__ not in _SWITCH
    ):
        validate.check_flags(given)
    if given.mask is not None and type(given.mask).__name__ in TORCH_MASKS:
        given = _with_own_mask(given)
    score_mod: ScoreMod | None = None
    if given.bias is not None and type(given.bias) is not Tensor:
        given, score_mod = _with_bias_parts(given)
    problem = Problem(
        given,
        query,
        key,
        value,
        given.mask,  # type: ignore[arg-type] # torch's own masks are gone.
        given.is_causal,
        given.window,
        given.bias if score_mod is None else None,  # type: ignore[arg-type] # So are bias objects.
        score_mod,
        () if score_mod is None else captured_tensors(score_mod),
        given.scale,
        query.is_meta if type(query) is Tensor else is_traced(query),
    )
    if given.layout == "thd":
        packed.pack(problem)
    elif (
        given.cu_seqlens_q is not None
        or given.cu_seqlens_kv is not None
        or given.max_seqlen_q is not None
        or given.max_seqlen_kv is not None
    ):
        raise packed.lengths_without_packing(given)
    elif given.layout == "bshd":
        _put_heads_first(problem)
    if torch.is_autocast_enabled(device_type):
        _autocast(problem, torch.get_autocast_dtype(device_type))
    if not (query.is_nested or value.is_nested) and (0 in query.shape[-1:] or 0 in value.shape[-1:]):
        _add_features(problem)
    _surround(problem)
    if isinstance(problem.mask, Tensor) and problem.mask.dtype != torch.bool:
        _make_one_bias(problem, problem.mask)
    return problem


def _surround(problem: Problem) -> None:
    """Fill in what torch's modes say: gradients, determinism, transforms.

    Raises:
        ArgumentError: Determinism is requested that the backward of torch's kernels would not provide.
    """
    given = problem.given
    problem.training = (
        torch.is_grad_enabled() and _requires_grad(problem) and not torch.is_inference_mode_enabled()
    )
    only_deterministic = (
        torch._C._get_deterministic_algorithms() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if given.deterministic and problem.training and not only_deterministic:
        raise _not_deterministic()
    problem.deterministic = only_deterministic if given.deterministic is None else given.deterministic
    if innermost_transform() is not None or forward_ad._current_level >= 0:
        problem.transform = _transform(problem)
    # A tracer sees every operator through modes of its own.
    problem.dispatch_mode = not problem.traced and _count_dispatch_modes() > 0


def _requires_grad(problem: Problem) -> bool:
    if problem.query.requires_grad or problem.key.requires_grad or problem.value.requires_grad:
        return True
    mask, bias, sink, slopes = problem.mask, problem.bias, problem.given.sink, problem.given.alibi_slopes
    if mask is None and bias is None and sink is None and slopes is None and not problem.captured:
        return False
    others = (mask, bias, sink, slopes, *problem.captured)
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in others)


def _transform(problem: Problem) -> str | None:
    """Return "vmap", "forward_ad", "double_backward" or None."""
    innermost = innermost_transform()
    if innermost is not None:
        kinds = {_TransformType.Vmap: "vmap", _TransformType.Jvp: "forward_ad"}
        # functorch's grad may be nested, and its inner level cannot be seen from the outside: only the
        # composite is differentiable at every level.
        return kinds.get(innermost.key(), "double_backward")
    given = problem.given
    tensors = (problem.query, problem.key, problem.value, problem.mask, problem.bias, given.sink)
    for tensor in (*tensors, given.alibi_slopes, *problem.captured):
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            return "forward_ad"
    return None


def _with_own_mask(given: Given) -> Given:
    """Replace torch's own mask object by the mask object that says the same.

    Raises:
        ArgumentError: A CausalBias was made for other lengths.
    """
    mask: Any = given.mask
    if not type(mask).__module__.startswith("torch."):
        return given
    if isinstance(mask, Tensor):
        _check_lengths(mask, given)
    own = from_torch(mask)
    return given if own is None else given._replace(mask=own)


def _check_lengths(causal_bias: Tensor, given: Given) -> None:
    """A CausalBias has the lengths that it was made for."""
    if given.layout not in ("bhsd", "bshd") or {given.query.dim(), given.key.dim()} != {4}:
        return
    length_at = 1 if given.layout == "bshd" else 2
    lengths = (given.query.shape[length_at], given.key.shape[length_at])
    made_for = (causal_bias.seq_len_q, causal_bias.seq_len_kv)  # type: ignore[attr-defined]
    if made_for != lengths:
        required = f"a CausalBias made for seqlen_q = {lengths[0]} and seqlen_kv = {lengths[1]}"
        raise argument_error("mask", required, made_for, "make one for these lengths, or pass masks.Causal")


def _with_bias_parts(given: Given) -> tuple[Given, ScoreMod | None]:
    """Put the parts of a bias object into the arguments that mean the same, and return its function.

    Raises:
        ArgumentError: A part and the argument that means the same are both given.
    """
    bias: object = given.bias
    if type(bias).__name__ in TORCH_MASKS:
        to_do = "pass it as mask"
        raise argument_error("bias", "a floating-point tensor or a bias object", type(bias).__name__, to_do)
    if not isinstance(bias, Bias):
        return given, None
    score_mod: ScoreMod | None = None
    given = given._replace(bias=None)
    for part in bias.parts:
        if isinstance(part, Softcap):
            if isinstance(given.softcap, Tensor) or given.softcap != 0.0:
                raise argument_error("softcap", f"0.0 beside the bias {part!r}", "both", "pass one of them")
            given = given._replace(softcap=part.value)
        elif given.alibi_slopes is not None:
            required = f"None beside the bias {part!r}"
            raise argument_error("alibi_slopes", required, "both", "pass one of them")
        elif isinstance(part, ALiBi):
            given = given._replace(alibi_slopes=part.slopes)
        elif isinstance(part, Dense):
            given = given._replace(bias=part.tensor)
        elif isinstance(part, Function):
            score_mod = part.score_mod
    return given, score_mod


def _put_heads_first(problem: Problem) -> None:
    """Make layout bshd bhsd, as views.

    Raises:
        ArgumentError: A tensor has less than three dimensions; other wrong numbers are refused by `validate`.
    """
    query, key, value = problem.query, problem.key, problem.value
    try:
        problem.query, problem.key = query.transpose(1, 2), key.transpose(1, 2)
        problem.value = value.transpose(1, 2)
    except IndexError:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            validate.check_number_of_dims(name, tensor, "bshd")
        raise


def _autocast(problem: Problem, dtype: torch.dtype) -> None:
    """Cast as autocast does for scaled_dot_product_attention: every float tensor but float64."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    problem.query, problem.key, problem.value = cast(problem.query), cast(problem.key), cast(problem.value)
    if isinstance(problem.mask, Tensor):
        problem.mask = cast(problem.mask)
    if isinstance(problem.bias, Tensor):
        problem.bias = cast(problem.bias)


def _add_features(problem: Problem) -> None:
    """Give heads without features a few that are zero, which no kernel and no row needs to know of.

    Without features every score is 0, and with zeros it is 0 too; an output without features is cut again.
    """
    query, key, value = problem.query, problem.key, problem.value
    if key.shape[-1:] != query.shape[-1:] or not value.dim():
        # The checks say so.
        return
    narrow, narrow_v = int(query.shape[-1]), int(value.shape[-1])
    width = max(narrow, narrow_v) or HEAD_DIM_MULTIPLE
    if problem.scale is None:
        problem.scale = narrow**-0.5 if narrow else 1.0
    problem.no_values = narrow_v == 0
    problem.query, problem.key = pad(query, (0, width - narrow)), pad(key, (0, width - narrow))
    problem.value = pad(value, (0, width - narrow_v))


def _make_one_bias(problem: Problem, mask: Tensor) -> None:
    """Take a float mask as a bias; beside a bias both add up.

    Raises:
        ArgumentError: One of the two does not fit the call, which their sum would hide.
    """
    if problem.bias is None:
        problem.mask, problem.bias = None, mask
        return
    validate.check(problem)
    problem.mask, problem.bias = None, _sum(mask, problem.bias, problem.query.dtype)


def _sum(mask: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Add two biases in the widest of their dtypes and the query's, and never in fewer than 32 bits.

    A sum of 16-bit ones goes back to the query's 16 bits with one rounding. What is finite stays finite, as
    -inf would leave out a key that large negative numbers only move away.
    """
    wide = torch.float32
    for other in (mask.dtype, bias.dtype, dtype):
        # torch promotes no 8-bit float.
        wide = wide if other.itemsize == 1 else torch.promote_types(wide, other)
    total = mask.to(wide) + bias.to(wide)
    if max(mask.dtype.itemsize, bias.dtype.itemsize, dtype.itemsize) > 2 or dtype.itemsize == 1:
        return total
    bound = torch.finfo(dtype).max
    return torch.where(total.isinf(), total, total.clamp(-bound, bound)).to(dtype)


def _other_device(query: Tensor) -> str:
    """Return the type of the device whose kernels a call on another one than CPU and CUDA is about.

    Raises:
        ArgumentError: No backend knows the device.
    """
    if query.device.type != "meta":
        to_do = "move query, key and value to one of them"
        raise argument_error("query", f"a device among {', '.join(DEVICES)}", query.device, to_do)
    return "cpu"


def _not_deterministic() -> ArgumentError:
    """The backward of torch's kernels reads torch's own switch and nothing else."""
    required = "torch.use_deterministic_algorithms(True) where gradients are asked for"
    return argument_error(
        "deterministic", required, "that switch off or warn_only", "switch it on, or pass None"
    )


def _not_a_tensor(query: object, key: object, value: object) -> ArgumentError:
    named = (("query", query), ("key", key), ("value", value))
    name, wrong = next((n, t) for n, t in named if not isinstance(t, Tensor))
    return argument_error(name, "a torch.Tensor", kind_of(wrong), validate.instead(wrong))
