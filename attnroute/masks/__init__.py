"""The mask algebra: nodes, conjunction, recognition of dense masks, lowering."""

from __future__ import annotations

from attnroute.masks.nodes import All, Causal, Dense, Documents, KeyPadding, Mask, Window

__all__ = ["All", "Causal", "Dense", "Documents", "KeyPadding", "Mask", "Window"]
