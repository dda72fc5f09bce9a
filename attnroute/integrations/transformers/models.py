"""Refuse models that cannot be routed: whose attention modules do not ask transformers for their function."""

from __future__ import annotations

import sys
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from attnroute.errors import argument_error
from attnroute.memory import INSTALLED, cached

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

_FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")


def ask_before_models_are_built(names: Container[str]) -> None:
    """Make transformers check, for each model with one of these implementations, that it can be routed.

    transformers takes a name that is registered for every model, also where the model's modules know their
    own ways to compute attention alone: such a model would read a mask that is meant for attnroute as if it
    were another one, or end in a KeyError.
    """
    original = PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, "asks_attnroute"):
        return

    @wraps(original)
    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        requested = args[0] if args else kwargs.get("requested_attention")
        if isinstance(requested, str) and requested in names:
            _refuse_what_nothing_routes(type(self), requested)
        return str(original(self, *args, **kwargs))

    get_correct_attn_implementation.asks_attnroute = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def eager_only_refused(module: torch.nn.Module) -> Exception:
    """Return the error for an attention module of a model that only eager attention is known to run."""
    return argument_error(
        "attn_implementation",
        "a model that transformers runs with another implementation than eager, too",
        f"one with {type(module).__name__}, which may compute with its masks as if they were float tensors",
        'take "eager", or pass register(eager_only=True) after comparing results',
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_eager_only(place: str) -> bool:
    """Return whether every model in the module `place`, which defines an attention class, is eager only."""
    return _all_eager(place)


@cached(512, INSTALLED)
def _all_eager(place: str) -> bool:
    models = [m for m in _defined(place) if issubclass(m, PreTrainedModel)]
    return bool(models) and not any(getattr(m, flag, False) for m in models for flag in _FLAGS)


def _refuse_what_nothing_routes(kind: type[PreTrainedModel], name: str) -> None:
    places = [base.__module__ for base in kind.__mro__ if issubclass(base, PreTrainedModel)]
    for place in places:
        _refuse_in_tables(place, name)
    if not any(getattr(kind, flag, False) for flag in _FLAGS) and any(map(_computes_itself, places)):
        raise _not_routed(kind.__name__, name)


def _refuse_in_tables(place: str, name: str) -> None:
    """Answer for a name that a table of attention classes does not have, once a module is made with it."""
    for table in vars(sys.modules[place]).values():
        if isinstance(table, dict) and isinstance(known := table.get("eager"), type):
            table.setdefault(name, partial(_refuse_class, known.__name__, name))


def _refuse_class(known: str, name: str, *_: Any, **__: Any) -> None:
    raise _not_routed(known, name)


@cached(512, INSTALLED)
def _computes_itself(place: str) -> bool:
    """Whether a module defines attention classes and never asks for an attention function."""
    home = vars(sys.modules[place]).values()
    if any(value is AttentionInterface or isinstance(value, AttentionInterface) for value in home):
        return False
    return any("Attention" in found.__name__ for found in _defined(place))


def _defined(place: str) -> Iterator[type[torch.nn.Module]]:
    for value in vars(sys.modules[place]).values():
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ == place:
            yield value


def _not_routed(kind: str, name: str) -> Exception:
    return argument_error(
        "attn_implementation",
        "a model whose attention modules ask transformers for the function to call",
        f'"{name}" for {kind}, which computes attention by itself',
        'take "eager" or "sdpa" for it; a dict such as {"text_config": "'
        + name
        + '"} names other parts of a model',
    )
