"""Force small tiles on `chunked`, so that small tests meet several blocks and chunks."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

from attnroute.executors import _chunked_call, _chunked_plan


@contextmanager
def tiling(score_elements, key_align=8):
    """Set the score budget and the alignment of key ranges; yields the plans that were made."""
    plans = []

    def recorded(*args):
        plans.append(_chunked_plan.make_plan(*args))
        return plans[-1]

    with (
        mock.patch.object(_chunked_plan, "SCORE_ELEMENTS", score_elements),
        mock.patch.object(_chunked_plan, "KEY_ALIGN", key_align),
        mock.patch.object(_chunked_call, "make_plan", recorded),
    ):
        yield plans
