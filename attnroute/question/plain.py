"""Plain data that users make themselves: what is wrong with it is said in one sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from attnroute.errors import ArgumentError, argument_error, did_you_mean

_SHOULD: Final = re.compile(r"^\w+ should (be|have) ")


class Plain(BaseModel):
    """Frozen data without unknown fields, whose constructor speaks as the rest of attnroute does.

    `model_validate` and `model_validate_json` raise pydantic's own error, as everywhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # A type checker reads the fields instead.

        def __init__(self, /, **fields: Any) -> None:
            """Check the fields.

            Raises:
                ArgumentError: A field is missing, unknown or wrong.
            """
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise_sentence(type(self), error)

        # So pydantic does not come back here for data that it checks itself.
        __init__.__pydantic_base_init__ = True


def raise_sentence(kind: type[BaseModel], error: ValidationError) -> NoReturn:
    """Raise what pydantic found first as one sentence.

    Raises:
        ArgumentError: Always.
    """
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ArgumentError):
        raise cause from None
    place = ".".join(map(str, first["loc"])) or "data"
    fields = ", ".join(kind.model_fields)
    if first["type"] == "missing":
        required, got, to_do = "a value", "none", f"pass {place}="
    elif first["type"] == "extra_forbidden":
        near = did_you_mean(str(first["loc"][-1]), kind.model_fields).removeprefix("; ").removesuffix("?")
        required, got, to_do = "a field that exists", repr(first["input"]), near or f"use one of {fields}"
    else:
        required = _SHOULD.sub("", first["msg"].removeprefix("Value error, ").rstrip("."))
        required = required.replace("String should match", "text that matches the")
        got, to_do = repr(first["input"]), f"see attnroute.{kind.__name__}"
    raise argument_error(f"{kind.__name__} {place}", required, got, to_do) from None
