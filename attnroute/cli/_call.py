"""Read the call that a command is about, from words of the call line, flags, or both."""

from __future__ import annotations

import argparse
import re
from typing import Final

from attnroute.cli._parser import Parser
from attnroute.cli._terminal import columns
from attnroute.errors import ArgumentError, quoted
from attnroute.question.call import Call
from attnroute.question.line import WORDS, parse, split
from attnroute.report.layout import Line, laid_out
from attnroute.vocabulary import DTYPE_SHORT

_SWITCHES: Final = {
    "train": "training",
    "sink": "a sink per head",
    "lse": "the log-sum-exp is returned",
    "deterministic": "only deterministic kernels",
}
_VALUED: Final = {
    "softcap": "cap on the scores",
    "dropout": "dropout probability",
    "scale": "sign of the factor on QK^T: negative or zero",
    "bias": "bias tensor: DTYPE:SHAPE, like bf16:1x1x64x64",
}
_SHORT: Final = {long: short for short, long in DTYPE_SHORT.items()}
_CONTINUES: Final = re.compile(r"\d+(:\w+)*|open|top_left|bottom_right")
_FORM: Final = 30
"""Columns of the words in the help; longer ones have a line of their own."""
_Q: Final = ("b", "hq", "sq", "d")
_KV: Final = ("hkv", "skv", "/")


def add_call(parser: Parser) -> None:
    """Add the call's words and the flags that stand for some of them."""
    parser.add_argument("call", nargs="*", metavar="CALL", help="words of the call line, see below")
    group = parser.add_argument_group("call", "flags instead of words, or beside them")
    group.add_argument("--q", metavar="B,HQ,SQ,D", help="batch, query heads, query length, head dim")
    group.add_argument("--kv", metavar="HKV,SKV[,DV]", help="the same for key and value, where it differs")
    group.add_argument("--dtype", help="bfloat16 or bf16, ...")
    group.add_argument("--mask", help="mask words joined by commas, like causal,any(window=4096|prefix=3)")
    for name, does in _VALUED.items():
        group.add_argument(f"--{name}", help=does)
    for name, does in _SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", help=does)


def call_of(args: argparse.Namespace) -> Call:
    """Return the call.

    Raises:
        ArgumentError: A word or flag is wrong, or sizes are missing.
    """
    words = [word for text in args.call for word in text.split()]
    words += [_SHORT.get(args.dtype, args.dtype)] if args.dtype else []
    words += _sizes(args.q, args.kv)
    words += _mask_words(args.mask) if args.mask else []
    words += [f"{name}={value}" for name in _VALUED if (value := getattr(args, name)) is not None]
    words += [name for name in _SWITCHES if getattr(args, name)]
    return parse(" ".join(words))


def words_help() -> str:
    """Return the list of the call line's words, as wide as the terminal."""
    lines = [Line("words of a call line:")]
    for form, does in WORDS.items():
        if len(form) > _FORM:
            lines.append(Line(form, "  ", wraps=False))
        first = f"{'' if len(form) > _FORM else form:<{_FORM}}"
        lines.append(Line(does, f"  {first}  ", " " * (_FORM + 4)))
    return laid_out(lines, columns())


def _sizes(query: str | None, keys: str | None) -> list[str]:
    words = [] if query is None else [n + v for n, v in zip(_Q, _numbers("--q", query, _Q), strict=True)]
    if keys is None:
        return words
    found = _numbers("--kv", keys, _KV, least=2)
    words += [name + value for name, value in zip(_KV[:2], found, strict=False)]
    if len(found) == len(_KV) and words:
        words = [f"{word}/{found[2]}" if re.fullmatch(r"d\d+", word) else word for word in words]
    return words


def _numbers(flag: str, text: str, names: tuple[str, ...], least: int | None = None) -> list[str]:
    found = text.split(",")
    if not (least or len(names)) <= len(found) <= len(names) or not all(n.isdecimal() for n in found):
        shape = "HKV,SKV or HKV,SKV,DV" if flag == "--kv" else "B,HQ,SQ,D"
        raise ArgumentError(f"{flag} requires counts {shape}; got {quoted(text)}.")
    return found


def _mask_words(text: str) -> list[str]:
    """Split at commas, but for those inside parentheses or between numbers of one word: causal,window=4095,0.

    Raises:
        ArgumentError: A parenthesis stands alone.
    """
    try:
        pieces = split(text, ",")
    except ValueError as error:
        raise ArgumentError(f"--mask requires every parenthesis in pairs; got {quoted(text)}.") from error
    words: list[str] = []
    for piece in pieces:
        if words and _CONTINUES.fullmatch(piece):
            words[-1] += f",{piece}"
        else:
            words.append(piece)
    return words
