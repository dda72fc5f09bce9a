"""Arguments of `attention()` that mean nothing are refused here, before any decision or kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnroute.biases import Bias
from attnroute.errors import argument_error
from attnroute.masks import checks
from attnroute.masks.objects.base import Mask
from attnroute.question import fits
from attnroute.vocabulary import DTYPES

if TYPE_CHECKING:
    from attnroute.api.records import Given, Problem
    from attnroute.masks.lowered.form import Extent

LAYOUTS = ("bhsd", "bshd", "thd")
_SHAPES = {
    "bhsd": "4 dimensions (batch, num_heads, seqlen, head_dim)",
    "bshd": "4 dimensions (batch, seqlen, num_heads, head_dim)",
    "thd": "3 dimensions (total, num_heads, head_dim)",
}


def check(problem: Problem) -> None:
    """Check every argument that was not checked while it was taken in.

    Raises:
        ArgumentError: One is out of range, or of a type, shape, dtype or device that does not fit the others.
    """
    _check_tensors(problem)
    given, extent = problem.given, problem.extent
    for name in ("mask", "bias", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_kv"):
        if type(getattr(given, name)).__name__ == "DTensor":
            required = "a plain tensor beside plain query, key and value"
            raise argument_error(name, required, "DTensor", f"pass {name}.to_local()")
    _check_numbers(problem)
    _check_causal(problem, extent)
    _check_mask(problem, extent)
    if given.bias is not None:
        _check_bias("bias", given.bias, problem, extent)
    heads = extent.num_heads_q
    if given.sink is not None:
        _check_vector("sink", given.sink, problem, [(heads,)])
    if given.alibi_slopes is not None:
        _check_vector("alibi_slopes", given.alibi_slopes, problem, [(heads,), (extent.batch, heads)])
    _check_one_bias(problem)


def _check_tensors(problem: Problem) -> None:
    """Check query, key and value against each other."""
    layout = problem.given.layout
    if layout not in LAYOUTS:
        raise argument_error("layout", f"one of {', '.join(LAYOUTS)}", repr(layout), "pick one")
    query, key, value = problem.query, problem.key, problem.value
    for name in ("query", "key", "value"):
        # The message shows what the user passed.
        check_number_of_dims(name, getattr(problem.given, name), layout)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise argument_error(name, f"query's device ({query.device})", tensor.device, "move it there")
        if tensor.dtype != query.dtype:
            raise argument_error(name, f"query's dtype ({query.dtype})", tensor.dtype, "cast it")
    if str(query.dtype).removeprefix("torch.") not in DTYPES:
        raise argument_error(
            "query", f"a dtype among {', '.join(DTYPES)}", query.dtype, "cast query, key and value"
        )
    _check_shapes(tuple(query.shape), tuple(key.shape), tuple(value.shape))


def check_flags(given: Given) -> None:
    """Check what is True or False, and that a corner has a diagonal beside it.

    Raises:
        ArgumentError: Another value would be taken for one of them; a corner alone says nothing.
    """
    flags = (("is_causal", given.is_causal), ("return_lse", given.return_lse))
    for name, value in (
        *flags,
        ("deterministic", False if given.deterministic is None else given.deterministic),
    ):
        if not isinstance(value, bool):
            required = "True or False" + (", or None" if name == "deterministic" else "")
            raise argument_error(
                name, required, f"{value!r} ({checks.kind_of(value)})", "pass a bool, e.g. bool(value)"
            )
    if given.causal_alignment is not None and not given.is_causal and given.window is None:
        required = "is_causal=True or window= beside it, whose diagonal it is"
        got = f"{given.causal_alignment!r} and neither"
        to_do = "leave it out, or write it into the mask object: masks.Causal(alignment)"
        raise argument_error("causal_alignment", required, got, to_do)


def check_number_of_dims(name: str, tensor: object, layout: str) -> None:
    """Check that an argument is a dense tensor with the dimensions of a layout.

    Raises:
        ArgumentError: It is not.
    """
    if not isinstance(tensor, Tensor):
        raise argument_error(name, "a torch.Tensor", checks.kind_of(tensor), instead(tensor))
    if tensor.is_nested or tensor.layout != torch.strided:
        to_do = 'pack the sequences and pass layout="thd", or masks.Documents(cu_seqlens=...)'
        raise argument_error(name, "a dense strided tensor", "a nested or sparse one", to_do)
    required = _SHAPES[layout]
    if tensor.dim() != int(required[0]):
        to_do = "add the missing dimensions with unsqueeze"
        if layout == "thd":
            to_do = "flatten batch and length into one dimension"
        elif tensor.dim() == 3:
            to_do = f'add the batch, {name}.unsqueeze(0), or pass layout="thd" where sequences are packed'
        elif tensor.dim() > 4:
            to_do = f"make the leading dimensions one batch, {name}.flatten(0, -4)"
        raise argument_error(name, required, f"shape {tuple(tensor.shape)}", to_do)


def with_names_of_torch(
    query: Tensor, key: Tensor, layout: str | None, mask: Any, attn_mask: Tensor | None, enable_gqa: object
) -> Any:
    """Return the mask of a call that has arguments under the names of scaled_dot_product_attention.

    Raises:
        ArgumentError: A mask stands under both names; heads are shared and `enable_gqa` says that none are.
    """
    if enable_gqa is not None and not isinstance(enable_gqa, bool):
        got = f"{enable_gqa!r} ({checks.kind_of(enable_gqa)})"
        raise argument_error("enable_gqa", "True or False", got, "pass a bool, or leave it out")
    if enable_gqa is False and isinstance(query, Tensor) and isinstance(key, Tensor):
        heads_at = -3 if layout in (None, "bhsd") else -2
        if min(query.dim(), key.dim()) > 2 and query.shape[heads_at] != key.shape[heads_at]:
            got = f"False, {query.shape[heads_at]} query heads and {key.shape[heads_at]} key heads"
            raise argument_error("enable_gqa", "True where heads are shared", got, "leave it out")
    if attn_mask is None:
        return mask
    if mask is not None:
        raise argument_error("attn_mask", "no mask beside it, which is the same argument", "both", "pass one")
    return attn_mask


def _check_one_bias(problem: Problem) -> None:
    """A kernel adds one thing to the scores; a bias and a float mask are added up before."""
    given, mask = problem.given, problem.given.mask
    dense = given.bias is not None or (isinstance(mask, Tensor) and mask.dtype != torch.bool)
    if given.alibi_slopes is not None and (dense or problem.score_mod is not None):
        to_do = "add the ALiBi term to the bias yourself"
        raise argument_error("alibi_slopes", "no bias and no float mask beside it", "both", to_do)
    if problem.score_mod is not None and dense:
        to_do = "add the mask inside of the function"
        raise argument_error("bias Function", "no float mask beside it", "both", to_do)


def _check_shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    for name, shape in (("key", key), ("value", value)):
        if shape[0] != query[0]:
            raise argument_error(
                name, f"query's batch size ({query[0]})", shape[0], "expand it to the batch of the query"
            )
    if key[3] != query[3]:
        raise argument_error("key", f"query's head_dim ({query[3]})", key[3], "check the projection sizes")
    if value[2] != key[2]:
        raise argument_error("value", f"key's length ({key[2]})", value[2], "check that layout is right")
    if value[1] != key[1]:
        raise argument_error("value", f"as many heads as key ({key[1]})", value[1], "repeat heads first")
    fits.heads(query[1], key[1])


def _check_numbers(problem: Problem) -> None:
    given, scale = problem.given, problem.scale
    numbers = (("scale", scale), ("softcap", given.softcap), ("dropout_p", given.dropout_p))
    for name, value in numbers:
        if not (checks.is_plain_number(value) or (value is None and name == "scale")):
            to_do = "pass value.item() or a constant"
            raise argument_error(name, "a Python number", checks.kind_of(value), to_do)
    if scale is not None and not abs(scale) <= fits.LARGEST:
        is_finite = abs(scale) < math.inf
        required = f"a number of float32, at most {fits.LARGEST:.3g}" if is_finite else "a finite number"
        raise argument_error("scale", required, scale, "pass None for head_dim_qk ** -0.5")
    fits.probability(given.dropout_p)
    checks.softcap("softcap", given.softcap)


def _check_causal(problem: Problem, extent: Extent) -> None:
    check_alignment(problem.given.causal_alignment)
    if problem.window is not None:
        check_window(problem.window)
    uses_diagonal = problem.is_causal or problem.window is not None
    if uses_diagonal and problem.given.causal_alignment is None:
        fits.corner(extent)


def check_alignment(alignment: object) -> None:
    """Check `causal_alignment`.

    Raises:
        ArgumentError: It is no corner.
    """
    if alignment not in (None, "top_left", "bottom_right"):
        required, to_do = 'one of "top_left" and "bottom_right"', "state which corner the diagonal ends in"
        raise argument_error("causal_alignment", required, repr(alignment), to_do)


def check_window(window: object) -> None:
    """Check `window`.

    Raises:
        ArgumentError: It is no pair of counts.
    """
    sides = window if isinstance(window, tuple) and len(window) == 2 else (window,)
    if len(sides) != 2 or not all(side is None or checks.is_count(side) for side in sides):
        to_do = "pass (W - 1, 0) for a sliding window of W keys"
        raise argument_error(
            "window", "a tuple (left, right) of counts of at least 0 or None", repr(window), to_do
        )


def _check_mask(problem: Problem, extent: Extent) -> None:
    # A float mask has become a bias, and packed sequences a mask.
    mask: object = problem.mask if problem.given.mask is None else problem.given.mask
    if mask is None:
        return
    if isinstance(mask, Mask):
        mask.check(extent)
        _check_mask_devices(mask, problem)
        return
    if not isinstance(mask, Tensor):
        raise argument_error(
            "mask",
            "a bool tensor, a float tensor or a mask object",
            checks.kind_of(mask),
            "pass it as bias" if isinstance(mask, Bias) else instead(mask, "masks", Mask),
        )
    checks.strided("mask", mask)
    if mask.device != problem.query.device:
        raise argument_error("mask", f"query's device ({problem.query.device})", mask.device, "move it there")
    if mask.dtype == torch.bool:
        fits.broadcast("mask", tuple(mask.shape), extent, is_mask=True)
    else:
        _check_bias("mask", mask, problem, extent)


def _check_mask_devices(mask: Mask, problem: Problem) -> None:
    for node in mask.nodes:
        for part in getattr(node, "members", ()):
            _check_mask_devices(part, problem)
        blocks = getattr(node, "block_mask", None)
        tensor = getattr(node, "tensor", None) if blocks is None else blocks.kv_num_blocks
        if tensor is not None and tensor.device != problem.query.device:
            raise argument_error(
                "mask", f"query's device ({problem.query.device})", tensor.device, "move it there"
            )


def _check_bias(name: str, bias: object, problem: Problem, extent: Extent) -> None:
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else checks.kind_of(bias)
        if not isinstance(bias, Tensor):
            to_do = "pass it as mask" if isinstance(bias, Mask) else instead(bias, "biases", Bias)
            raise argument_error(name, "a floating-point tensor or a bias object", got, to_do)
        if name == "mask":
            raise argument_error(name, "a bool or floating-point tensor", got, "convert it, e.g. mask.bool()")
        raise argument_error(name, "a floating-point tensor", got, "convert it, e.g. bias.float()")
    checks.strided(name, bias)
    if bias.device != problem.query.device:
        raise argument_error(name, f"query's device ({problem.query.device})", bias.device, "move it there")
    fits.broadcast(name, tuple(bias.shape), extent, is_mask=False)


def _check_vector(name: str, tensor: Tensor, problem: Problem, shapes: list[tuple[int, ...]]) -> None:
    required = f"a floating-point tensor of shape {' or '.join(map(str, shapes))} on {problem.query.device}"
    fits = (
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tuple(tensor.shape) in shapes
        and tensor.device == problem.query.device
    )
    if not fits:
        got = (
            f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            if isinstance(tensor, Tensor)
            else type(tensor).__name__
        )
        raise argument_error(name, required, got, "pass one number per query head")
    checks.strided(name, tensor)


def instead(given: object, home: str = "", kind: type | None = None) -> str:
    """Return what to do with something that is no tensor, as an imperative clause.

    Args:
        given: What was given.
        home: "masks" or "biases" where objects of these modules are taken.
        kind: The base class of these objects.
    """
    see = f"see attnroute.{home}: " if home else ""
    if isinstance(given, type) and kind is not None and issubclass(given, kind):
        return f"{see}make one of it, {home}.{given.__name__}(...)"
    if type(given).__module__ == "numpy":
        return f"{see}convert it with torch.from_numpy"
    if isinstance(given, list | tuple):
        return f"{see}convert it with torch.tensor"
    if kind is not None and callable(given) and not isinstance(given, type):
        return f"{see}wrap it, {home}.Function(your_function)"
    return f"see attnroute.{home}" if home else "convert it"
