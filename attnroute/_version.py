"""The version of the package, written once; pyproject.toml and the wheel read it from here."""

from __future__ import annotations

__version__ = "0.1.0"
