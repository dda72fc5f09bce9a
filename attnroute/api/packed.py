"""Layout thd: sequences of different lengths, one behind the other, become one sequence of documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from attnroute.api.validate import check_alignment, check_number_of_dims, check_window
from attnroute.errors import argument_error
from attnroute.masks.checks import is_number, sequence_sums, strided
from attnroute.masks.kept import remember
from attnroute.masks.objects.ragged import Ragged
from attnroute.masks.tracing import is_traced, is_wrapped
from attnroute.question import fits

if TYPE_CHECKING:
    from attnroute.api.records import Given, Problem
    from attnroute.errors import ArgumentError
    from attnroute.vocabulary import Alignment

_NAMES = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")


def lengths_without_packing(given: Given) -> ArgumentError:
    """Return the error of a call of another layout that was given an argument of layout thd."""
    name = next(name for name in _NAMES if getattr(given, name) is not None)
    to_do = 'pass layout="thd" with packed tensors, or masks.Documents and masks.KeyPadding with padded ones'
    return argument_error(name, 'layout="thd"', f"layout={given.layout!r}", to_do)


def pack(problem: Problem) -> None:
    """Turn a call of layout thd into a batch of one whose mask has the sequences, causal and window.

    Query, key and value become views (1, num_heads, total, head_dim).

    Raises:
        ArgumentError: An argument of layout thd is missing or means nothing, or another one has no meaning
            for packed sequences.
    """
    given = problem.given
    for name in ("query", "key", "value"):
        check_number_of_dims(name, getattr(given, name), "thd")
    is_cross = given.cu_seqlens_kv is not None and given.cu_seqlens_kv is not given.cu_seqlens_q
    _check_sums(given, is_cross=is_cross)
    _check_scores(problem, is_cross=is_cross)
    _check_band(given, is_cross=is_cross)
    problem.mask = _ragged(given, is_cross=is_cross)
    problem.is_causal, problem.window = False, None
    problem.query, problem.key, problem.value = (
        t.unsqueeze(0).transpose(1, 2) for t in (given.query, given.key, given.value)
    )


def _ragged(given: Given, *, is_cross: bool) -> Ragged:
    sums = cast("Tensor", given.cu_seqlens_q)
    left, right = given.window or (None, None)
    if given.is_causal:
        right = 0
    longest_q = _longest("q", sums, given.max_seqlen_q, given.query.shape[0])
    if not is_cross:
        if given.max_seqlen_kv is not None:
            longest_q = min(longest_q, _longest("kv", sums, given.max_seqlen_kv, given.key.shape[0]))
        return Ragged(sums, None, longest_q, None, left, right)
    other = cast("Tensor", given.cu_seqlens_kv)
    longest_kv = _longest("kv", other, given.max_seqlen_kv, given.key.shape[0])
    alignment = cast("Alignment", given.causal_alignment or "top_left")
    return Ragged(sums, other, longest_q, longest_kv, left, right, alignment)


def _check_sums(given: Given, *, is_cross: bool) -> None:
    _check_sum("cu_seqlens_q", given.cu_seqlens_q, given)
    total_q, total_kv = given.query.shape[0], given.key.shape[0]
    if not is_cross:
        if total_q != total_kv:
            required = f"query's total length ({total_q}) where cu_seqlens_kv is not given"
            raise argument_error("key", required, total_kv, "pass cu_seqlens_kv")
        return
    _check_sum("cu_seqlens_kv", given.cu_seqlens_kv, given)


def _check_sum(name: str, sums: object, given: Given) -> None:
    required = "a 1-D int32 or int64 tensor of at least two prefix sums"
    to_do = "pass [0, end of the first sequence, ..., end of the last]"
    if not isinstance(sums, Tensor):
        raise argument_error(name, required, "None" if sums is None else type(sums).__name__, to_do)
    strided(name, sums)
    if sums.dtype not in (torch.int32, torch.int64) or sums.dim() != 1 or sums.shape[0] < 2:
        raise argument_error(name, required, f"{sums.dtype} of shape {tuple(sums.shape)}", to_do)
    if sums.device.type != "cpu" and sums.device != given.query.device:
        required = f"query's device ({given.query.device}) or the CPU"
        raise argument_error(name, required, sums.device, "move it there")


def _longest(side: str, sums: Any, bound: Any, total: int) -> int:
    """Return an upper bound of the lengths; sums on the CPU are checked, as no device waits for them."""
    name = f"max_seqlen_{side}"
    if bound is not None and (not is_number(bound) or isinstance(bound, bool) or bound < 0):
        got = type(bound).__name__ if isinstance(bound, Tensor) else repr(bound)
        raise argument_error(name, "a Python int of at least 0, or None", got, "pass None for no bound")
    if sums.device.type != "cpu" or is_wrapped(sums) or is_traced(sums):
        return total if bound is None else min(bound, total)
    longest = remember(sums, ("longest", side, total), lambda: _read(f"cu_seqlens_{side}", sums, total))
    if bound is not None and bound < longest:
        required = f"at least the longest sequence ({longest})"
        to_do = f"correct it, or leave it out and let cu_seqlens_{side} say it"
        raise argument_error(name, required, bound, to_do)
    return longest


def _read(name: str, sums: Tensor, total: int) -> int:
    sequence_sums(name, sums, total)
    return int(sums.diff().max())


def _check_scores(problem: Problem, *, is_cross: bool) -> None:
    """What a matrix of positions would be needed for has no meaning, as packed sequences have none."""
    in_each = "pass is_causal or window, which hold in each sequence"
    padded = "pad the batch and pass masks.KeyPadding, or use alibi_slopes"
    by_place = "pad the batch, so that indices are those of one sequence"
    refused = (
        ("mask", problem.mask, "no mask beside layout thd", in_each),
        ("bias", problem.bias, "no dense bias beside layout thd", padded),
        ("bias", problem.score_mod, "no score function beside layout thd", by_place),
    )
    for name, value, required, to_do in refused:
        if value is not None:
            raise argument_error(name, required, type(value).__name__, to_do)
    if problem.given.alibi_slopes is not None and is_cross:
        to_do = "pad the batch and pass masks.KeyPadding"
        required = "queries and keys of the same sequences beside layout thd"
        raise argument_error("alibi_slopes", required, "a cu_seqlens_kv of its own", to_do)


def _check_band(given: Given, *, is_cross: bool) -> None:
    check_alignment(given.causal_alignment)
    if given.window is not None:
        check_window(given.window)
    if is_cross and given.causal_alignment is None and (given.is_causal or given.window is not None):
        raise fits.corner_of_each()
