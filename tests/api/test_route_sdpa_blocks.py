"""Blocks of `route_sdpa()`: nested, per thread and task, and nothing left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from support.routed import TOKENS, is_routed, multi_head
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.overrides import TorchFunctionMode

import attnroute
from attnroute.errors import OverrideError, OverrideWarning


def test_nothing_is_left_behind():
    assert not is_routed()

    @attnroute.route_sdpa()
    def failing():
        assert is_routed()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        failing()
    assert not is_routed()
    assert torch._C._len_torch_function_stack() == 0
    assert F.scaled_dot_product_attention is imported_before


def test_blocks_nest():
    block = attnroute.route_sdpa()
    with block:
        with block, attnroute.route_sdpa():
            assert is_routed()
        assert is_routed()
    assert not is_routed()


def test_other_modes_see_what_they_saw():
    class Names(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Names() as outer, attnroute.route_sdpa(), Names() as inner, torch.device("cpu"):
        assert is_routed()
        assert multi_head()[1]().shape == TOKENS.shape
    assert "scaled_dot_product_attention" in inner.seen
    assert "linear" in outer.seen


def test_a_decorator_routes_functions_and_coroutines():
    @attnroute.route_sdpa()
    def function():
        return is_routed()

    @attnroute.route_sdpa()
    async def coroutine():
        await asyncio.sleep(0)
        return is_routed()

    assert function()
    assert asyncio.run(coroutine())
    assert not is_routed()

    def generator():
        yield

    block = attnroute.route_sdpa()
    with pytest.raises(OverrideError, match=r"@route_sdpa\(\) requires .* got a generator function"):
        block(generator)


def test_threads_have_their_own_blocks():
    found = []
    with attnroute.route_sdpa():
        thread = threading.Thread(target=lambda: found.append(is_routed()))
        thread.start()
        thread.join()
    assert found == [False]


def test_tasks_have_their_own_blocks_though_they_share_a_thread():
    async def inside(begin, end):
        await asyncio.sleep(begin)
        with attnroute.route_sdpa():
            await asyncio.sleep(end)
            return is_routed()

    async def outside():
        found = []
        for _ in range(6):
            await asyncio.sleep(0.005)
            found.append(is_routed())
        return found

    async def together():
        return await asyncio.gather(inside(0, 0.02), outside(), inside(0.005, 0.03))

    assert asyncio.run(together()) == [True, [False] * 6, True]
    assert torch._C._len_torch_function_stack() == 0


def test_a_block_that_is_left_elsewhere_is_refused():
    block = attnroute.route_sdpa()
    with pytest.raises(OverrideError, match=r"route_sdpa\(\) requires a block to be left in the thread"):
        block.__exit__(None, None, None)
    with block:
        assert is_routed()


def test_a_block_that_is_dropped_unused_warns():
    with pytest.warns(OverrideWarning, match=r"route_sdpa\(\) has no effect on its own"):
        attnroute.route_sdpa()
