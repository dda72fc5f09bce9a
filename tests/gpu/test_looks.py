"""Looks into masks on a CUDA device: the same answers as on the CPU, one wait, none while a graph records."""

from __future__ import annotations

import warnings

import pytest
import torch

from attnroute.masks import Causal, Documents, KeyPadding, PrefixLM, Window
from attnroute.masks.lowered.form import Extent
from attnroute.masks.recognition import summary
from attnroute.masks.recognition.summary import inspect_mask

pytestmark = pytest.mark.gpu

SEQLEN = 1031
KINDS = {
    "causal": Causal(),
    "window": Window(100, 0),
    "padding": KeyPadding(lengths=[SEQLEN, 0]),
    "causal & padding": Causal() & KeyPadding(left=[0, 100]),
    "prefix": PrefixLM([100, 7]),
    "documents": Causal() & Documents(lengths=[500, 531]),
    "documents per row": Documents(ids=torch.arange(SEQLEN) // torch.tensor([[70], [90]])),
}


def dense(kind):
    return KINDS[kind].materialize(SEQLEN, SEQLEN, batch=2).cuda()


def extent_of(mask):
    return Extent(2, 3, *mask.shape[-2:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_recognised_as_on_the_cpu(kind):
    mask = dense(kind)
    assert inspect_mask(mask, extent_of(mask)) == inspect_mask(mask.cpu(), extent_of(mask))
    assert inspect_mask(mask, extent_of(mask)).recognized is not None


def test_a_mask_read_in_pieces_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(summary, "_CHUNK", SEQLEN * 100)
    mask = dense("causal")
    assert inspect_mask(mask, extent_of(mask)).recognized is not None
    mask[..., SEQLEN - 1, 500] = False
    assert inspect_mask(mask, extent_of(mask)).recognized is None


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_look_waits_once():
    mask = dense("documents per row")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            inspect_mask(mask, extent_of(mask))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in waits if "synchronizing" in str(w.message)]) == 1


def test_nothing_is_read_while_a_graph_records():
    mask = dense("causal")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = inspect_mask(mask, extent_of(mask))
        mask.logical_not()
    assert inside is None
    assert inspect_mask(mask, extent_of(mask)) is not None
