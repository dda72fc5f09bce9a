"""Patterns: windows that modules state, and the mask objects that equal a pattern."""

from __future__ import annotations

import pytest
import torch

from attnroute.integrations.transformers.pattern import Pattern
from attnroute.masks import Window


@pytest.mark.parametrize(
    ("pattern", "window", "left"),
    [
        (Pattern(1, 6, 6, right=0), 3, 2),
        (Pattern(1, 6, 6, right=0), 6, None),
        (Pattern(1, 1, 9, 8, right=0), 9, None),
        (Pattern(1, 1, 9, 8, right=0), 8, 7),
        (Pattern(1, 6, 6, left=4, right=0), 3, 4),
    ],
)
def test_a_module_states_a_window(pattern, window, left):
    stated = pattern.with_window(window)
    assert stated.left == left
    assert stated is pattern.with_window(window)


def test_queries_before_every_key_have_no_object():
    pattern = Pattern(1, 2, 3, offset=-2, left=4, right=0)
    assert pattern.mask is None
    assert pattern.dense(None).any().item() is False


def test_windows_to_both_sides_of_shifted_queries():
    pattern = Pattern(1, 2, 8, offset=3, left=1, right=1)
    start, stop = pattern.keys
    assert (start, stop) == (2, 6)
    assert isinstance(pattern.mask, Window)
    assert torch.equal(pattern.mask.materialize(2, 4), pattern.dense(None)[..., start:stop])
