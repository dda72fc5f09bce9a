"""`attention()` under torch.export: torch's own kernels stand in the program, for every length it allows."""

from __future__ import annotations

import io

import pytest
import torch
from support.compile_cases import problem
from torch.export import Dim, export

import attnroute
from attnroute import masks

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Layer(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return attnroute.attention(query, key, value, **self.options)


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("strict", [False, True])
def test_the_kernel_itself_is_exported(strict):
    layer = Layer(is_causal=True)
    program = export(layer, tuple(problem(80)), strict=strict)
    assert FLASH in targets(program)
    tensors = problem(80)
    torch.testing.assert_close(program.module()(*tensors), layer(*tensors))


@pytest.mark.parametrize("options", [{"is_causal": True}, {}, {"mask": masks.Causal() & masks.Window(9)}])
def test_one_program_for_all_lengths(options):
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=4096)
    sizes = {0: batch, 2: length}
    layer = Layer(**options)
    shapes = {"query": sizes, "key": sizes, "value": sizes}
    program = export(layer, tuple(problem(80)), dynamic_shapes=shapes)
    for size in (2, 64, 100, 128, 192, 333):
        tensors = problem(size)
        torch.testing.assert_close(program.module()(*tensors), layer(*tensors))


def test_a_saved_program_runs():
    layer = Layer(is_causal=True)
    file = io.BytesIO()
    torch.export.save(export(layer, tuple(problem(80))), file)
    file.seek(0)
    tensors = problem(80)
    torch.testing.assert_close(torch.export.load(file).module()(*tensors), layer(*tensors))


def dense(dims, *, of=None, turned=False):
    """Return a function of batch and length that makes a mask, or a bias where `of` is randn."""

    def make(batch, length):
        shape = {1: (length,), 2: (length, length), 4: (batch, 1, length, length)}[dims]
        made = torch.randn(shape) if of is torch.randn else torch.rand(shape) > 0.3
        return made.mT.contiguous().mT if turned else made

    return make


class WithTensor(torch.nn.Module):
    def __init__(self, name, **options):
        super().__init__()
        self.name, self.options = name, options

    def forward(self, query, key, value, tensor):
        return attnroute.attention(query, key, value, **{self.name: tensor}, **self.options)


@pytest.mark.parametrize("backend", [None, "flash", "chunked", "math"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("mask", dense(1)),
        ("mask", dense(2)),
        ("mask", dense(4)),
        ("mask", dense(4, turned=True)),
        ("bias", dense(1, of=torch.randn)),
        ("bias", dense(2, of=torch.randn)),
        ("bias", dense(4, of=torch.randn, turned=True)),
    ],
)
def test_masks_and_biases_of_open_lengths(name, make, backend):
    """No length is bound by how the rows of a mask or a bias would best lie in memory."""
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=4096)
    sizes = {0: batch, 2: length}
    example = make(2, 80)
    open_sizes = {n: batch if size == 2 else length for n, size in enumerate(example.shape) if size > 1}
    layer = WithTensor(name, backend=backend)
    shapes = {"query": sizes, "key": sizes, "value": sizes, "tensor": open_sizes}
    program = export(layer, (*problem(80), example), dynamic_shapes=shapes)
    for size in (3, 64, 100, 333):
        tensors = (*problem(size), make(2, size))
        torch.testing.assert_close(program.module()(*tensors), layer(*tensors))
