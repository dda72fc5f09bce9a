"""Force small tiles on `chunked`, so that small tests meet several blocks and chunks; watch its tensors."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnroute.executors.chunked import call as chunked_call
from attnroute.executors.chunked import plan as chunked_plan
from attnroute.executors.chunked.plan import Tiling


@contextmanager
def tiling(score_elements, key_align=8):
    """Set the score budget and the alignment of key ranges; yields the plans that were made."""
    plans = []

    def recorded(shape, limits, usual, block_q, by_batch_row):
        small = usual._replace(score_elements=score_elements)
        plan = chunked_plan.make_plan(shape, limits, small, block_q, by_batch_row=by_batch_row)
        plans.append(plan)
        return plans[-1]

    with (
        mock.patch.object(chunked_plan, "KEY_ALIGN", key_align),
        mock.patch.object(chunked_call, "planned", recorded),
    ):
        yield plans


def budget(score_elements):
    """Return a tiling with this many scores and blocks of up to 64 queries."""
    return Tiling(score_elements, 16, 64, worth_a_block=0)


class Largest(TorchDispatchMode):
    """Record the largest tensor that any operation returns, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result
