"""A kernel's forward with the backward of chunked inside of a graph."""

from __future__ import annotations

import pytest
import torch
from support.cudnn_checks import PADDED, hold, inputs_of, sinks, trained
from support.pair_runs import FORWARD, pair, refuse, wanted, watched

from attnroute import masks
from attnroute.executors import launch
from attnroute.executors.protocol import Inputs
from attnroute.masks.lowered.form import LoweredMask
from attnroute.memory import reset


@pytest.fixture
def package():
    with watched() as made:
        yield made
    reset()


def check_compiled(function, backend, mask, inputs, *rest):
    """Compile a function that stands in the graph as the library's own calls do, and hold what it gives."""
    torch._dynamo.reset()
    inside = torch.compiler.allow_in_graph(function)

    def call(*tensors):
        out, lse = inside(*tensors)
        return out * 2, lse

    found = torch.compile(call, backend=backend, fullgraph=True)(*trained(inputs), *rest)
    want, want_lse = wanted(mask, inputs)
    hold(found, (want * 2, want_lse), trained(inputs))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("made", [(), ("sink_from_lse",)], ids=str)
@pytest.mark.parametrize("case", ["causal", "window from the bottom right", "everything"])
def test_inside_of_a_graph(package, case, made, backend):
    mask, *lengths = PADDED[case]
    inputs = inputs_of(mask, *lengths, sink=sinks())

    def run(query, key, value, sink):
        return pair(Inputs(query, key, value, inputs.mask, sink=sink), *made)

    check_compiled(run, backend, mask, inputs)
    assert package.names == FORWARD


def test_a_kernel_that_refuses_inside_of_a_graph_leaves_all_to_chunked(package, monkeypatch):
    told = []
    monkeypatch.setattr(launch, "_LISTENERS", [told.append])
    monkeypatch.setattr(package, "sdpa_fwd", refuse)
    mask, *lengths = PADDED["causal window from the bottom right"]
    inputs = inputs_of(mask, *lengths, sink=sinks())

    def run(query, key, value, sink):
        return pair(Inputs(query, key, value, inputs.mask, sink=sink), "sink_from_lse", may_reroute=True)

    check_compiled(run, "aot_eager", mask, inputs)
    assert package.names == []
    assert {(found.backend, found.instead) for found in told} == {("cudnn_fe", "chunked")}


def test_documents_inside_of_a_graph(package):
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2], dtype=torch.int32)[None]
    sums = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    inputs = inputs_of(None, 9, 9, sink=sinks())

    def run(query, key, value, sink, ids, sums):
        given_ids = {"document_ids_q": ids, "document_ids_kv": ids, "cu_seqlens": sums, "max_seqlen": 4}
        mask = LoweredMask(band_hi=0, **given_ids)
        return pair(Inputs(query, key, value, mask, sink=sink), "to_varlen", "sink_from_lse")

    mask = masks.Documents(lengths=[3, 4, 2]) & masks.Causal()
    check_compiled(run, "aot_eager", mask, inputs, ids, sums)
    assert package.names == FORWARD
