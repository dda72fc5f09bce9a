"""Backends of the CPU that refuse to launch when told to, in the way of the executors of other packages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import attnroute
from attnroute.errors import RerouteWarning
from attnroute.executors import launch

REFUSAL = partial(AssertionError, "head_dim must be a multiple of 32\nand more that nobody needs")
SAID = "AssertionError: head_dim must be a multiple of 32"


class Fakes:
    """Backends that refuse when told to, and how often each was asked to run."""

    def __init__(self, executor):
        self.asked = Counter()
        self._executor = executor
        self._errors = {}

    def __call__(self, backend, module):
        found = self._executor(backend, module)

        def counted(inputs, plan):
            self.asked[backend] += 1
            if backend not in self._errors:
                return found.run(inputs, plan)
            draws_on = inputs.query.device if inputs.dropout_p else None
            with launch.before_launch(backend, draws_on=draws_on):
                torch.rand(3)
                error = self._errors[backend]()
                raise error

        return replace(found, run=counted)

    def refuse(self, *backends, raising=REFUSAL):
        self._errors.update(dict.fromkeys(backends, raising))

    def recover(self):
        self._errors.clear()


def tensors(batch=2, seqlen=6, head_dim=8, dtype=torch.float32, *, training=False):
    return [torch.randn(batch, 4, seqlen, head_dim, dtype=dtype, requires_grad=training) for _ in range(3)]


def call(given=None, **rest):
    """Attention without flex, which would be compiled for seconds."""
    with attnroute.override(ban="flex"):
        return attnroute.attention(*(given or tensors()), **rest)


def explained(given=None, **rest):
    return attnroute.explain(*(given or tensors()), **rest)


def quietly(**rest):
    """Run one call that warns."""
    with pytest.warns(RerouteWarning) as told:
        call(**rest)
    return [str(w.message) for w in told]
