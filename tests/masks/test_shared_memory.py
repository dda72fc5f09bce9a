"""Memory that somebody outside of torch can write into is read anew in each call."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support.reference import attend, error

import attnroute
from attnroute import masks

N = 300
TOKENS = torch.arange(N)


def from_numpy(tensor):
    array = tensor.numpy().copy()
    return torch.from_numpy(array), lambda new: np.copyto(array, new.numpy())


def to_numpy(tensor):
    mask = tensor.clone()
    return mask, lambda new: np.copyto(mask.numpy(), new.numpy())


def from_dlpack(tensor):
    array = tensor.numpy().copy()
    return torch.from_dlpack(array), lambda new: np.copyto(array, new.numpy())


def from_buffer(tensor):
    buffer = bytearray(tensor.numpy().tobytes())

    def write(new):
        buffer[:] = new.numpy().tobytes()

    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape), write


def of_processes(tensor):
    mask = tensor.clone().share_memory_()
    return mask, lambda new: ctypes.memmove(mask.data_ptr(), new.data_ptr(), mask.nbytes)


def other_data(tensor):
    mask = tensor.clone()

    def write(new):
        mask.data = new.clone()

    return mask, write


def other_data_of_a_view(tensor):
    mask = torch.cat([tensor, tensor])[: tensor.shape[0]]

    def write(new):
        mask.data = torch.cat([new, new])[: new.shape[0]]

    return mask, write


def announced(tensor):
    """What torch cannot see is said with `increment_version`."""
    mask = tensor.clone()

    def write(new):
        mask.data.copy_(new)
        torch.autograd.graph.increment_version(mask)

    return mask, write


WAYS = (
    from_numpy,
    to_numpy,
    from_dlpack,
    from_buffer,
    of_processes,
    other_data,
    other_data_of_a_view,
    announced,
)

CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
WINDOW = CAUSAL.triu(-20)
FORMS = {
    "dense": (lambda t: t, CAUSAL, WINDOW),
    "an object": (masks.Dense, CAUSAL, WINDOW),
    "inside of others": (lambda t: ~masks.Dense(t) | masks.Window(0), ~CAUSAL, ~WINDOW),
    "key rows": (lambda t: t[None, None, None], TOKENS < 200, TOKENS < 100),
    "lengths": (lambda t: masks.KeyPadding(lengths=t), torch.tensor([200]), torch.tensor([100])),
    "left": (lambda t: masks.KeyPadding(left=t), torch.tensor([200]), torch.tensor([100])),
    "keep": (lambda t: masks.KeyPadding(keep=t), (TOKENS < 200)[None], (TOKENS < 100)[None]),
    "ids": (lambda t: masks.Documents(ids=t), TOKENS // 100, TOKENS // 50),
    "sums": (lambda t: masks.Documents(cu_seqlens=t), torch.tensor([0, 50, N]), torch.tensor([0, 150, N])),
    "positions": (lambda t: masks.Documents(position_ids=t), TOKENS % 100, TOKENS % 50),
    "prefix": (masks.PrefixLM, torch.tensor([200]), torch.tensor([100])),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("make", "first", "second"), FORMS.values(), ids=FORMS)
def test_a_write_from_outside_is_seen_in_the_next_call(way, make, first, second):
    tensor, write = way(first)
    mask = make(tensor)
    inputs = [torch.randn(1, 2, N, 8) for _ in range(3)]
    for now in (first, second, first):
        write(now)
        # A view that was made before other data came keeps the old memory, as in all of torch.
        mask = make(tensor) if isinstance(mask, torch.Tensor) else mask
        out = attnroute.attention(*inputs, mask)
        fresh = make(now.clone())
        full = fresh if isinstance(fresh, torch.Tensor) else fresh.materialize(N, N)
        assert error(out, attend(*inputs, allowed=full)[0]) < 1e-5


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_prefix_sums_of_packed_sequences(way):
    sums, write = way(torch.tensor([0, 100, N]))
    inputs = [torch.randn(N, 2, 8) for _ in range(3)]
    for now in ([0, 100, N], [0, 250, N], [0, 30, N]):
        write(torch.tensor(now))
        out = attnroute.attention(*inputs, layout="thd", cu_seqlens_q=sums, is_causal=True)
        want = attnroute.attention(*inputs, layout="thd", cu_seqlens_q=torch.tensor(now), is_causal=True)
        torch.testing.assert_close(out, want)
    write(torch.tensor([0, 400, 200]))
    with pytest.raises(attnroute.ArgumentError, match="cu_seqlens_q requires prefix sums that rise"):
        attnroute.attention(*inputs, layout="thd", cu_seqlens_q=sums, is_causal=True)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_function_that_reads_it(way):
    limit, write = way(torch.tensor([200]))

    def mod(b, h, i, j):
        return j < limit[0]

    mask = masks.Function(mod)
    inputs = [torch.randn(1, 2, N, 8) for _ in range(3)]
    for now in (200, 100):
        write(torch.tensor([now]))
        out = attnroute.attention(*inputs, mask, backend="chunked")
        assert error(out, attend(*inputs, allowed=(now > TOKENS).expand(N, N))[0]) < 1e-5
