"""Mask objects: who may attend whom, without a tensor of all pairs. They combine with `&`, `|` and `~`.

Importing this package loads no torch. Its parts import one way: `flat` and `recognition` (dense masks that
equal an object) -> `objects` -> `lowered` (what executors read, as tensors) -> `kept` (what was made from a
mask) -> questions about single tensors.
"""

from __future__ import annotations

from attnroute.masks.objects.arbitrary import Blocks, Dense, Function
from attnroute.masks.objects.bands import Causal, PrefixLM, Window
from attnroute.masks.objects.base import All, Either, Mask, Not
from attnroute.masks.objects.tokens import Documents, KeyPadding

__all__ = [
    "All",
    "Blocks",
    "Causal",
    "Dense",
    "Documents",
    "Either",
    "Function",
    "KeyPadding",
    "Mask",
    "Not",
    "PrefixLM",
    "Window",
]
