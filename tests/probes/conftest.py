"""A machine on which nothing is installed but what a test installs."""

from __future__ import annotations

import sys

import pytest
from support.fake_site import Site, path_of

from attnroute.memory import reset

NAMES = ("flash_attn", "flash_attn_2_cuda", "flash_attn_3", "xformers", "cudnn", "transformer_engine")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return the only folder with distributions on the path; nothing found or imported from it stays."""
    monkeypatch.setattr(sys, "path", path_of(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in NAMES}
    _forget_modules()
    reset()
    yield Site(tmp_path)
    _forget_modules()
    sys.modules.update(kept)
    monkeypatch.undo()
    reset()


def _forget_modules():
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]
