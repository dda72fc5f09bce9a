"""What a graph for a CUDA device would hold for, found without one: lengths stay open in every executor."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import attnroute
from attnroute import masks
from attnroute.api import routes
from attnroute.memory import reset
from attnroute.probes import imports
from attnroute.question.host import Host

VERSIONS = {
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": "9.19.0",
    "triton": "3.6.0",
    "flash-attn": "2.8.3",
    "flash-attn-4": "4.0.0b36",
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "xformers": "0.0.34",
}
BACKENDS = ("flash", "cudnn", "efficient", "chunked", "fa2", "fa3", "fa4", "cudnn_fe")
WITH_BANDS = ("flash", "chunked", "fa2", "fa3", "fa4", "cudnn_fe")


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    """A tracer's tensors may lie on a device that is not there; what they are asked is the same."""
    reset()
    monkeypatch.setattr(routes, "host_of", lambda *_: Host(arch="sm_90", versions=VERSIONS))
    monkeypatch.setattr(imports, "mark_if_broken", lambda *_: None)
    yield
    reset()


def traced(length=240, *, head_dim=64, **given):
    """Run one call on a tracer's tensors with one open length, and return its environment of shapes."""
    shapes = ShapeEnv()
    source = LocalSource("length")
    symbol = shapes.create_symbol(length, source, dynamic_dim=DimDynamic.DYNAMIC)
    size = shapes.create_symintnode(symbol, hint=length, source=source)
    with FakeTensorMode(shape_env=shapes):
        sizes = ((2, 4, size, head_dim), (2, 2, size, head_dim), (2, 2, size, head_dim))
        inputs = [torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in sizes]
        found = attnroute.attention(*inputs, **given)
        out = found[0] if isinstance(found, tuple) else found
        assert out.shape[2] == size
    return shapes


def asked(shapes):
    """Return the conditions of the graph; a length that became a constant is one of them."""
    return [str(guard.expr) for guard in shapes.guards]


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_length_stays_open(backend, given):
    shapes = traced(backend=backend, **given)
    assert not shapes.replacements, asked(shapes)
    assert len(asked(shapes)) <= 2, asked(shapes)


@pytest.mark.parametrize("backend", WITH_BANDS)
def test_a_length_stays_open_beside_a_window(backend):
    shapes = traced(backend=backend, mask=masks.Causal() & masks.Window(20, 3))
    assert not shapes.replacements, asked(shapes)
    assert len(asked(shapes)) <= 2, asked(shapes)


ASKED = [(d, given) for d in (64, 128, 256) for given in ({}, {"is_causal": True}, {"window": (20, 0)})]
ASKED += [(512, {}), (512, {"is_causal": True})]


@pytest.mark.parametrize(("head_dim", "given"), ASKED, ids=str)
@pytest.mark.parametrize("length", [240, 4096])
def test_what_is_chosen_asks_little(length, head_dim, given):
    shapes = traced(length, head_dim=head_dim, **given)
    assert not shapes.replacements, asked(shapes)
    assert len(asked(shapes)) <= 4, asked(shapes)


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_returned_sums_keep_it_open(backend):
    shapes = traced(backend=backend, is_causal=True, return_lse=True)
    assert not shapes.replacements, asked(shapes)


def test_open_sizes_vary(monkeypatch):
    """A plan for each shape is then shared by the calls of a step."""
    chosen = []
    decided = routes.choices.decided
    monkeypatch.setattr(
        routes.choices, "decided", lambda call, *rest: chosen.append(call) or decided(call, *rest)
    )
    traced()
    assert [call.context.shapes_vary for call in chosen] == [True]
    with FakeTensorMode():
        attnroute.attention(*[torch.empty(2, 4, 240, 64, device="cuda") for _ in range(3)])
    assert [call.context.shapes_vary for call in chosen] == [True, False]
