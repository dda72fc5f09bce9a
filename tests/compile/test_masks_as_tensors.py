"""Masks that code in a graph hands on as tensors reach `attention()` as objects if nobody writes to them."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import attnroute
from attnroute.masks import Causal, KeyPadding, Window
from attnroute.masks.flat import as_tensor

LENGTH = 12
QUERY, KEY, VALUE = torch.randn(3, 2, 4, LENGTH, 16, generator=torch.Generator().manual_seed(0)).unbind()
KEEP = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3
KEEP[:, 0] = True
MASKS = {
    "window": Window(3, 0),
    "both sides": Window(2, 2),
    "padding": KeyPadding(keep=KEEP, finite=True),
    "causal with padding": Causal() & KeyPadding(keep=KEEP, finite=True),
}
CHANGES = {
    "written": lambda mask: mask[..., 5:7].fill_(True),
    "written in part": lambda mask: mask.__setitem__((..., 0), True),
    "written through data": lambda mask: mask.data.fill_(True),
    "or": lambda mask: mask | torch.eye(LENGTH, dtype=torch.bool),
    "flipped": lambda mask: mask.flip(-1),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sizes_in_graph(run):
    """Run compiled; return the output, and the last two sizes of each tensor in the graph."""
    sizes = []

    def look(graph, _):
        values = [node.meta.get("val") for node in graph.graph.nodes]
        sizes.extend(tuple(value.shape[-2:]) for value in values if isinstance(value, torch.Tensor))
        return make_boxed_func(graph)

    with torch.no_grad():
        return torch.compile(run, backend=aot_autograd(fw_compiler=look), fullgraph=True)(), sizes


@pytest.mark.parametrize("name", list(MASKS))
def test_the_object_reaches_the_kernel(name):
    mask = MASKS[name]

    def run():
        tensor = as_tensor(mask, (2, LENGTH, LENGTH), "cpu")
        return attnroute.attention(QUERY, KEY, VALUE, tensor, backend="chunked")

    found, sizes = sizes_in_graph(run)
    assert (LENGTH, LENGTH) not in sizes
    torch.testing.assert_close(found, attnroute.attention(QUERY, KEY, VALUE, mask, backend="chunked"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_what_somebody_made_of_the_tensor_counts(name, backend):
    def changed(tensor):
        found = CHANGES[name](tensor)
        return tensor if "written" in name else found

    def run():
        mask = changed(as_tensor(Window(3, 0), (2, LENGTH, LENGTH), "cpu"))
        return attnroute.attention(QUERY, KEY, VALUE, mask)

    dense = changed(Window(3, 0).materialize(LENGTH, LENGTH).expand(2, 1, LENGTH, LENGTH).clone())
    with torch.no_grad():
        found = torch.compile(run, backend=backend, fullgraph=True)()
    torch.testing.assert_close(found, attnroute.attention(QUERY, KEY, VALUE, dense))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_written_into_the_padding_later_changes_no_mask(backend):
    def run(keep):
        keep = keep.clone()
        mask = as_tensor(KeyPadding(keep=keep, finite=True), (2, LENGTH, LENGTH), "cpu")
        keep[:, 4:] = False
        return attnroute.attention(QUERY, KEY, VALUE, mask)

    with torch.no_grad():
        found = torch.compile(run, backend=backend, fullgraph=True)(KEEP)
    torch.testing.assert_close(found, attnroute.attention(QUERY, KEY, VALUE, KeyPadding(keep=KEEP)))


def test_a_tensor_beside_a_call_of_other_lengths_stays_a_tensor():
    def run():
        mask = as_tensor(Window(3, 0), (1, 1, LENGTH), "cpu")
        return attnroute.attention(QUERY, KEY, VALUE, mask)

    with torch.no_grad():
        found = torch.compile(run, backend="aot_eager", fullgraph=True)()
    dense = Window(3, 0).materialize(1, LENGTH)
    torch.testing.assert_close(found, attnroute.attention(QUERY, KEY, VALUE, dense))
