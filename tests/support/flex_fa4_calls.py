"""Calls for FlexAttention on FlashAttention-4's kernels, and what the compiler is asked for."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from support.cudnn_checks import inputs_of as trained_inputs_of

from attnroute.executors.flex import run as flex
from attnroute.executors.protocol import Plan
from attnroute.memory import reset

FLASH = (("BACKEND", "FLASH"),)
OPTIONS = {"flex": (), "flex_fa4": FLASH}
LENGTH = 6


@contextmanager
def uncompiled(monkeypatch):
    """Run dynamo's graphs as they are, which takes milliseconds instead of seconds, and collect them."""
    found = []
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda g, _: found.append(g) or g.forward)
    reset()
    yield found
    reset()


def inputs_of(mask, length=LENGTH):
    inputs = trained_inputs_of(mask, length, length, dtype=torch.float32)
    inputs.query, inputs.key, inputs.value = (t.detach() for t in (inputs.query, inputs.key, inputs.value))
    return inputs


def plan(backend="flex_fa4", device_type="cpu", **rest):
    given = {"training": False, "return_lse": False, "options": OPTIONS[backend]}
    return Plan(backend, (), device_type=device_type, **(given | rest))


def run(inputs, backend="flex_fa4", **rest):
    return flex.run(inputs, plan(backend, **rest))


def asked_of(graph):
    """Return the options that the traced call of FlexAttention has."""
    (node,) = (n for n in graph.graph.nodes if n.target is torch.ops.higher_order.flex_attention)
    return node.args[6]
