"""Other forms of what `attention()` takes: bias objects, and the mask objects that torch itself has."""

from __future__ import annotations

from torch import Tensor

from attnroute.api.question import Arguments, places
from attnroute.biases import ALiBi, Bias, Dense, Function, Softcap
from attnroute.errors import argument_error
from attnroute.masks.objects.arbitrary import from_torch
from attnroute.masks.objects.captures import captured_tensors

TORCH_MASKS = frozenset({"BlockMask", "CausalBias"})
"""Names of torch's mask classes, so that a call without one needs no import to know that."""


def take_mask(args: Arguments) -> None:
    """Replace torch's own mask object by the mask object that says the same.

    Raises:
        ArgumentError: A CausalBias was made for other lengths.
    """
    given = args.mask
    if not type(given).__module__.startswith("torch."):
        return
    taken = from_torch(given)
    args.mask = given if taken is None else taken
    if isinstance(given, Tensor):
        _check_lengths(given, args)


def _check_lengths(causal_bias: Tensor, args: Arguments) -> None:
    """A CausalBias holds the lengths that it was made for."""
    if args.layout not in ("bhsd", "bshd") or {args.query.dim(), args.key.dim()} != {4}:
        return
    _, length_at = places(args.layout)
    lengths = (args.query.shape[length_at], args.key.shape[length_at])
    made_for = (causal_bias.seq_len_q, causal_bias.seq_len_kv)  # type: ignore[attr-defined]
    if made_for != lengths:
        required = f"a CausalBias made for seqlen_q = {lengths[0]} and seqlen_kv = {lengths[1]}"
        raise argument_error("mask", required, made_for, "make one for these lengths, or pass masks.Causal")


def take_bias(args: Arguments) -> None:
    """Put the parts of a bias object into the arguments that mean the same.

    Raises:
        ArgumentError: A part and the argument that means the same are both given.
    """
    given: object = args.bias
    if type(given).__name__ in TORCH_MASKS:
        to_do = "pass it as mask"
        raise argument_error("bias", "a floating-point tensor or a bias object", type(given).__name__, to_do)
    if not isinstance(given, Bias):
        return
    args.bias = None
    for part in given.parts:
        if isinstance(part, Softcap):
            _take_softcap(args, part)
        elif args.alibi_slopes is not None:
            required = f"None beside the bias {part!r}"
            raise argument_error("alibi_slopes", required, "both", "pass one of them")
        elif isinstance(part, ALiBi):
            args.alibi_slopes = part.slopes
        elif isinstance(part, Dense):
            args.bias = part.tensor
        elif isinstance(part, Function):
            args.score_mod = part.score_mod
            args.captured = captured_tensors(part.score_mod)


def _take_softcap(args: Arguments, part: Softcap) -> None:
    if isinstance(args.softcap, Tensor) or args.softcap != 0.0:
        raise argument_error("softcap", f"0.0 beside the bias {part!r}", "both", "pass one of them")
    args.softcap = part.value
