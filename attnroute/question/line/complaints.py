"""Write one sentence about a word of a call line that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from pydantic import ValidationError

from attnroute.errors import ArgumentError, did_you_mean, quoted, shortened
from attnroute.question.line.words import SIZES, WORDS, name_of
from attnroute.vocabulary import DTYPE_SHORT

_SIZE: Final = re.compile(r"(hkv|hq|skv|sq|b|d)[-+.\d].*", re.ASCII)
_DTYPE: Final = re.compile(r"(u?int|b?float|bf|fp|complex|[fiu])\d+\w*|half|double|float|u?int", re.ASCII)
_FORMS: Final = {"d": "d128", **{name: f"{name}16" for name in SIZES}}


@contextmanager
def reading(text: str) -> Iterator[None]:
    """Turn whatever is wrong with a word into one sentence that names it."""
    try:
        yield
    except ArgumentError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), ArgumentError):
            raise cause from error
        where = ".".join(map(str, first["loc"])) or "the call"
        what = shortened(str(first["msg"]).removeprefix("Value error, ").rstrip("."))
        raise ArgumentError(f"{quoted(text)} requires a valid value; {where}: {what}.") from error
    except (ValueError, KeyError) as error:
        if _SIZE.fullmatch(text):
            raise unknown_word(text, ()) from error
        name = re.escape(name_of(text))
        forms = [form for form in WORDS if re.search(rf"(^|\s){name}[=(]", form)]
        form = forms[0] if forms else f"{shortened(name_of(text))} without a value"
        raise ArgumentError(f"a call line requires words like {form}; got {quoted(text)}.") from error


def unknown_word(word: str, known: Iterable[str]) -> ArgumentError:
    """Return the error about a word that no call line has; what it resembles decides what is suggested.

    Args:
        word: The word.
        known: What words begin with, sizes and dtypes aside.
    """
    got = quoted(word)
    if size := _SIZE.fullmatch(word):
        required = f"a whole number behind it, like {_FORMS[size[1]]}"
        return ArgumentError(f"{size[1]} requires {required}; got {got}.")
    dtype = word.lower().removeprefix("torch.")
    if _DTYPE.fullmatch(dtype):
        short = next((s for s, long in DTYPE_SHORT.items() if dtype in (long, s)), None)
        near = f'; did you mean "{short}"?' if short else "."
        return ArgumentError(f"dtype requires one of {', '.join(DTYPE_SHORT)}; got {got}{near}")
    near = did_you_mean(name_of(word), known) or "; `attnroute explain --help` lists them."
    return ArgumentError(f"a call line requires words that it knows; got {got}{near}")
