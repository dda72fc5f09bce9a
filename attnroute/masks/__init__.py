"""The mask algebra: nodes that combine with `&`, `|` and `~`, recognition of dense masks, lowering."""

from __future__ import annotations

from attnroute.masks.arbitrary import Blocks, Dense, Function
from attnroute.masks.bands import Causal, PrefixLM, Window
from attnroute.masks.nodes import All, Either, Mask, Not
from attnroute.masks.tokens import Documents, KeyPadding

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
