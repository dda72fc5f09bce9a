"""Threads, tasks, forks, models that are freed, graphs of many lengths: each name runs one of them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

import attnroute
from attnroute import masks
from attnroute.api import routes

THREADS = 8


def wanted(query, mask):
    """Return the result in float64."""
    wide = query.double()
    allowed = mask.materialize(*query.shape[2:3] * 2, batch=query.shape[0], num_heads_q=query.shape[1])
    return torch.nn.functional.scaled_dot_product_attention(wide, wide, wide, allowed).nan_to_num(0.0)


def hold(got, want):
    """Compare with float64."""
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def mask_of(n, seqlen):
    """Return one of many masks, each of a structure of its own for flex."""
    kinds = (
        masks.Causal(),
        masks.Causal() & masks.KeyPadding(lengths=[seqlen // 2 + n % 7 + 1]),
        masks.Documents(ids=torch.arange(seqlen) // (n % 5 + 3)),
        masks.Window(n % 9 + 1) | masks.PrefixLM([n % seqlen]),
        ~(masks.KeyPadding(left=[n % 5]) & masks.Window(3, 3)),
    )
    return kinds[n % len(kinds)]


def threads():
    """Let threads meet ever new calls at the same time; most run at once, some compile first."""
    sys.setswitchinterval(1e-5)
    done = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for n in range(60):
            backend = "flex" if n < 5 else (None, "chunked", "math")[n % 3]
            seqlen = 64 if n < 5 else 8 + n
            mask, query, start = mask_of(n, seqlen), torch.randn(1, 2, seqlen, 8), threading.Barrier(THREADS)

            def work(mask=mask, query=query, start=start, backend=backend):
                start.wait()
                return attnroute.attention(query, query, query, mask, backend=backend)

            for job in [pool.submit(work) for _ in range(THREADS)]:
                hold(job.result(), wanted(query, mask))
                done += 1
    return {"racing calls": done, "structures compiled while racing": 5}


def tasks():
    """Let tasks and threads of one loop interleave, each under an override of its own, eager and compiled."""
    ran, execute = [], routes.execute

    def noting(route, args):
        ran.append(route.plan.backend)
        return execute(route, args)

    routes.execute = noting
    query = torch.randn(1, 2, 8, 4)
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(lambda q: attnroute.attention(q, q, q), backend="eager", fullgraph=True)

    async def one(n):
        backend = ("flash", "chunked", "math")[n % 3]
        with attnroute.override(backend=backend):
            for _ in range(4):
                await asyncio.sleep(0)
                ran.clear()
                attnroute.attention(query, query, query)
                assert ran == [backend], (n, list(ran))
                assert attnroute.explain(query, query, query).selected == backend
                ran.clear()
                compiled(query)
                assert set(ran) == {backend}, (n, list(ran))
                assert (await asyncio.to_thread(attnroute.explain, query, query, query)).selected == backend

    async def every():
        await asyncio.gather(*(one(n) for n in range(30)))

    asyncio.run(every())
    routes.execute = execute
    return {"tasks": 30, "calls": 30 * 4 * 4}


def fork():
    """Fork while other threads call, after everything was used; children use it again, and make it anew."""
    query, masks_ = torch.randn(1, 2, 64, 8), [mask_of(n, 64) for n in range(5)]
    compiled = [attnroute.attention(query, query, query, masks_[1], backend="flex")]
    hold(compiled[0], wanted(query, masks_[1]))
    stop, children, calls = threading.Event(), [], [0]

    def busy():
        n = 0
        while not stop.is_set():
            n += 1
            part = query[:, :, : 2 + n % 60]
            attnroute.attention(part, part, part, masks.Window(n % 50), backend=(None, "chunked")[n % 2])
            calls[0] = n

    thread = threading.Thread(target=busy)
    thread.start()
    # A fork while another thread imports leaves the child a lock of Python's own that nobody will release.
    while calls[0] < 50:
        time.sleep(0.01)
    for n in range(20):
        time.sleep(0.02)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for seqlen in (64, 20 + n):
                    part = query[:, :, :seqlen]
                    for mask in masks_ if seqlen == 64 else [masks.Causal(), masks.Window(n)]:
                        hold(attnroute.attention(part, part, part, mask), wanted(part, mask))
                hold(
                    attnroute.attention(query, query, query, masks_[1], backend="flex"),
                    wanted(query, masks_[1]),
                )
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    stop.set()
    thread.join()
    deadline = time.monotonic() + 120
    for child in children:
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                for each in children:
                    os.kill(each, signal.SIGKILL)
                raise AssertionError("a child hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
    return {"children": len(children), "calls of the other thread meanwhile": calls[0]}


class Model(torch.nn.Module):
    """Owns masks and a bias with functions of its own, and a large buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.arange(200_000))
        self.masks = [
            masks.Function(self.allow),
            ~masks.Function(self.allow),
            masks.Window(0) | masks.Function(self.allow),
            masks.Causal() & ~(masks.KeyPadding(lengths=[9]) & masks.Function(self.allow)),
        ]
        self.bias = attnroute.biases.Function(self.change)

    def allow(self, _b, _h, i, j):
        return j - i < self.limit[3]

    def change(self, score, _b, _h, _i, _j):
        return score * self.limit[2]


def freed():
    """Make models whose masks have functions of theirs, run, trained, explained: all of them are freed."""
    alive = []
    for n in range(100):
        model, query = Model(), torch.randn(1, 2, 10 + n % 30, 4, requires_grad=n % 2 == 0)
        for mask in model.masks:
            out = attnroute.attention(query, query, query, mask, bias=model.bias)
            if query.requires_grad:
                out.sum().backward()
            str(attnroute.explain(query, query, query, mask))
        alive.append(weakref.ref(model))
        del model, mask, out
    gc.collect()
    left = sum(model() is not None for model in alive)
    assert left == 0, f"{left} models are alive"
    return {"models": len(alive), "alive": left}


def compile_():
    """Run many lengths through graphs that were made for a few, where making another one is an error."""
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=counting, fullgraph=True, dynamic=True)
    def attend(query, key):
        return attnroute.attention(query, key, key, is_causal=True, causal_alignment="bottom_right")

    lengths = [*range(2, 300, 7), 128, 256, 512]
    for length in (5, 64, 128, 130):
        attend(torch.randn(1, 2, length, 16), torch.randn(1, 2, length + 3, 16))
    before = len(graphs)
    torch.compiler.set_stance("fail_on_recompile")
    for length in lengths:
        query, key = torch.randn(1, 2, length, 16), torch.randn(1, 2, length + 3, 16)
        band = masks.Causal("bottom_right").materialize(length, length + 3)
        want = torch.nn.functional.scaled_dot_product_attention(
            query.double(), key.double(), key.double(), band
        )
        hold(attend(query, key), want)
    assert len(graphs) == before
    return {"graphs": before, "lengths": len(lengths)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = {"threads": threads, "tasks": tasks, "fork": fork, "freed": freed, "compile": compile_}
    print(json.dumps(chosen[sys.argv[1]]()))
