"""A graph runs under the override that it was made under and under no other, in every thread and task."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from support.compile_cases import problem
from support.spy import profiled
from torch._dynamo.utils import counters

import attnroute
from attnroute.api import routes

BACKENDS = ("chunked", "math", "flash")


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Graphs:
    """A compiled function that tells which backend its graph was made for.

    Each backend is given another scale of the result by its place in `BACKENDS`, so that what a call returns
    says whose graph ran.
    """

    def __init__(self, monkeypatch):
        execute = routes.execute

        def scaled(route, args):
            out, lse = execute(route, args)
            return out * (BACKENDS.index(route.plan.backend) + 2), lse

        monkeypatch.setattr(routes, "execute", scaled)
        self.query = torch.ones(1, 1, 8, 8)
        self.compiles = 0
        self.run = torch.compile(self._call, backend=self._compile, fullgraph=True)

    def _call(self, query):
        return attnroute.attention(query, query, query, is_causal=True)

    def _compile(self, graph, _):
        self.compiles += 1
        # What was traced runs as it is: the graph would ask anew.
        made = graph(self.query)[0]
        return lambda *_: (made,)

    def ran(self):
        return BACKENDS[round(self.run(self.query)[0, 0, 0, 0].item()) - 2]


@pytest.fixture
def graphs(monkeypatch):
    return Graphs(monkeypatch)


def steered(backend):
    return nullcontext() if backend is None else attnroute.override(backend=backend)


WISHES = ("chunked", "math", None, "chunked")


def wanted(backend):
    return backend or "flash"


def test_tasks_that_take_turns_and_their_threads(graphs):
    async def task(backend):
        seen = set()
        with steered(backend):
            for _ in range(10):
                seen.add(graphs.ran())
                await asyncio.sleep(0)
                seen.add(await asyncio.to_thread(graphs.ran))
        return seen

    async def all_tasks():
        return await asyncio.gather(*map(task, WISHES))

    for _ in range(2):
        assert asyncio.run(all_tasks()) == [{wanted(backend)} for backend in WISHES]
    assert graphs.compiles <= 2 * len(set(WISHES)), (
        "equal overrides share graphs; two threads may race for one"
    )


def test_a_graph_that_another_thread_made_under_an_override_does_not_run_outside(graphs):
    async def first():
        with attnroute.override(backend="math"):
            return await asyncio.to_thread(graphs.ran)

    assert asyncio.run(first()) == "math"
    assert graphs.ran() == "flash"
    with attnroute.override(backend="math"):
        assert graphs.ran() == "math"
    assert graphs.compiles == 2


def test_threads(graphs):
    turns = threading.Barrier(len(WISHES))

    def work(backend):
        with steered(backend):
            turns.wait()
            return {graphs.ran() for _ in range(20)}

    with ThreadPoolExecutor(len(WISHES)) as pool:
        assert list(pool.map(work, WISHES)) == [{wanted(backend)} for backend in WISHES]


def test_generators_that_end_in_another_order(graphs):
    def steer(backend):
        with attnroute.override(backend=backend):
            yield

    first, second = steer("math"), steer("chunked")
    next(first), next(second)
    assert graphs.ran() == "chunked"
    first.close()
    assert graphs.ran() == "chunked"
    second.close()
    assert graphs.ran() == "flash"


def test_equal_overrides_share_a_graph(graphs):
    for _ in range(3):
        with attnroute.override(backend="math"):
            assert graphs.ran() == "math"
        with attnroute.override(ban="math"), attnroute.override(backend="chunked"):
            assert graphs.ran() == "chunked"
        assert graphs.ran() == "flash"
    assert graphs.compiles == 3


def test_an_override_inside_of_a_compiled_function_steers_its_calls():
    def call(query, key, value):
        with attnroute.override(backend="chunked"):
            return attnroute.attention(query, key, value)

    run, tensors = torch.compile(call, backend="aot_eager"), problem(64)
    for _ in range(2):
        with profiled("chunked"):
            run(*tensors)
    with profiled("flash"):
        attnroute.attention(*tensors)
