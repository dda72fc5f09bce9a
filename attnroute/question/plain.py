"""Base classes of `Call`, `Host` and `Policy`: validated where users make them, unchecked inside.

JSON, TOML and the constructors are the boundary: there pydantic validates every field. Records that
attnroute derives from validated ones are made without a check.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from attnroute.errors import ArgumentError, argument_error, did_you_mean
from attnroute.memory import cached

_SHOULD: Final = re.compile(r"^\w+ should (be|have) ")


class Record(BaseModel):
    """Frozen data without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """Return a record of fields that are known to be right; those left out have their defaults."""
        # What pydantic's `model_construct` does for a class without aliases, private fields and hooks.
        made = object.__new__(cls)
        object.__setattr__(made, "__dict__", {**_defaults(cls), **fields})
        object.__setattr__(made, "__pydantic_fields_set__", set(fields))
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields, which are known to be right."""
        return self.unchecked(**{**self.__dict__, **changes})


@cached(64)
def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of a record in their order, each with its default, which no record changes."""
    return {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}


class Plain(Record):
    """A record that users make, whose constructor raises the errors of attnroute.

    `model_validate` and `model_validate_json` raise pydantic's own error, as everywhere.
    """

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
    """Raise the first of pydantic's errors as one sentence.

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
