"""What is wrong with a word, as one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from attnroute.errors import ArgumentError
from attnroute.line.words import WORDS, name_of


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
        what = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
        raise ArgumentError(f'"{text}" requires a valid value; {where}: {what}.') from error
    except (ValueError, KeyError) as error:
        name = re.escape(name_of(text))
        forms = [form for form in WORDS if re.search(rf"(^|\s){name}[=(]", form)]
        form = forms[0] if forms else f"{name_of(text)} without a value"
        raise ArgumentError(f'a call line requires words like {form}; got "{text}".') from error
