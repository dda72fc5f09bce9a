"""Threads that meet a new structure of FlexAttention at once: all of them run the same compiled function."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.executors.flex import compile as flex_compile
from attnroute.executors.flex.program import Part, Settings
from attnroute.memory import reset

THREADS = 8
SETTINGS = Settings(None, enable_gqa=False, return_lse=False, size=(128, 128), options=())


@pytest.fixture(autouse=True)
def fresh():
    reset()
    # Threads take turns as often as they can, so that what is shown too early is seen.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    reset()


def at_once(work):
    start = threading.Barrier(THREADS)

    def wait_and_work():
        start.wait()
        return work()

    with ThreadPoolExecutor(THREADS) as pool:
        return [job.result() for job in [pool.submit(wait_and_work) for _ in range(THREADS)]]


def test_a_structure_is_shown_when_its_function_is_there():
    for n in range(50):
        found = at_once(lambda n=n: flex_compile.entry(("key", n), Part(), Part(), SETTINGS))
        assert len(set(map(id, found))) == 1
        assert callable(found[0].call)


def test_what_could_not_be_made_is_made_by_the_next_call(monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", fail)
        with pytest.raises(KeyboardInterrupt):
            flex_compile.entry("key", Part(), Part(), SETTINGS)
    assert flex_compile.entries() == ()
    assert callable(flex_compile.entry("key", Part(), Part(), SETTINGS).call)


def test_structures_without_end_are_not_all_kept():
    for n in range(flex_compile.STRUCTURES_KEPT + 20):
        flex_compile._COMPILED.put(n, flex_compile.Compiled(str(n)))
    assert len(flex_compile.entries()) <= flex_compile.STRUCTURES_KEPT


def test_racing_first_calls_give_the_right_numbers():
    query = torch.randn(1, 2, 128, 16)
    mask = masks.Causal() & masks.KeyPadding(lengths=[100])
    want = torch.nn.functional.scaled_dot_product_attention(
        query, query, query, mask.materialize(128, 128, batch=1)
    )
    for out in at_once(lambda: attnroute.attention(query, query, query, mask, backend="flex")):
        torch.testing.assert_close(out, want)
