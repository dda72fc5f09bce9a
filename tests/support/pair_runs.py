"""One kernel's forward with the backward of chunked, watched: which operators and gradients are asked for."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.cudnn_checks import allowed_of, hold, plan_of, trained
from support.cudnn_operators import Operators
from support.reference import attend

from attnroute.executors.chunked import from_lse
from attnroute.executors.packages import cudnn_fe
from attnroute.executors.prepare.apply import run_repaired
from attnroute.executors.protocol import Pair

FORWARD = ["sdpa_fwd"]
NAMES = ("query", "key", "value", "sink")
PAIR = "backward_from_chunked"


class Watched(Operators):
    """The package's operators, and which gradients chunked was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self._gradients = from_lse.gradients

    @property
    def names(self):
        return [name for name, _ in self.calls]

    def gradients(self, *arguments):
        self.asked.append(arguments[-1])
        return self._gradients(*arguments)


@contextmanager
def watched():
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        made = Watched()
        patch.setattr(cudnn_fe, "_operators", lambda: made)
        cudnn_fe._bound.cache_clear()
        patch.setattr(from_lse, "gradients", made.gradients)
        yield made
        cudnn_fe._bound.cache_clear()


def pair(inputs, *repairs, executor=cudnn_fe.executor, **settings):
    return run_repaired(executor, replace(inputs), plan_of("cudnn_fe", PAIR, *repairs, **settings))


def with_forward(forward):
    """Return the executor with another forward and no backward."""
    return replace(cudnn_fe.executor, pair=Pair(forward, None))


def wanted(mask, inputs):
    """Return output and log-sum-exp by definition."""
    tensors = (inputs.query, inputs.key, inputs.value)
    return attend(*tensors, allowed=allowed_of(mask, inputs), scale=inputs.scale, sink=inputs.sink)


def check(package, mask, inputs, *repairs):
    """Hold one call against the definition, forward by the package and backward by chunked, each once."""
    hold(pair(inputs, *repairs), wanted(mask, inputs), trained(inputs))
    assert package.names == FORWARD
    assert package.asked == [(True, True, True, inputs.sink is not None)]


def refuse(*_, **__):
    raise ValueError("head_dim 512 is not supported")
