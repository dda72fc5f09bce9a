"""Mask functions of transformers are read for what they mean, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils as hf

from attnroute.integrations.transformers import mask_functions
from attnroute.integrations.transformers.mask_functions import read


def test_a_builder_that_changed_its_meaning_is_not_read(monkeypatch):
    def inclusive(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    monkeypatch.setattr(hf, "sliding_window_overlay", inclusive)
    mask_functions._known.cache_clear()
    try:
        assert read(inclusive(3)) is None
        assert read(hf.causal_mask_function).right == 0
    finally:
        mask_functions._known.cache_clear()


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_functions_are_read_alike_under_a_mode(mode):
    mask_functions._known.cache_clear()
    with mode():
        assert read(hf.causal_mask_function).right == 0
        assert read(hf.sliding_window_causal_mask_function(3)).left == 2
