"""The mask algebra: nodes that combine with `&`, `|` and `~`, recognition of dense masks, lowering."""

from __future__ import annotations

from attnroute.masks.objects.arbitrary import Blocks, Dense, Function
from attnroute.masks.objects.bands import Causal, PrefixLM, Window
from attnroute.masks.objects.nodes import All, Either, Mask, Not
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
