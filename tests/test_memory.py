"""Memories of the process: bounded, complete when they are shown, forgotten by one call."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from attnroute import memory
from attnroute.memory import Memory, forget_all, kept


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Memories that a test makes are no part of the process's own."""
    monkeypatch.setattr(memory, "_FORGETTERS", [])


def test_a_memory_keeps_what_was_put_there():
    found = Memory(4)
    assert found.get("a") is None
    found.put("a", 1)
    found.put("a", 2)
    assert (found.get("a"), len(found), found.values()) == (2, 1, [2])
    assert found.keep("a", lambda: 3) == 2
    assert found.keep("b", lambda: 3) == 3


@pytest.mark.parametrize("bound", [1, 2, 7, 64])
@pytest.mark.parametrize("add", ["put", "keep"])
def test_a_memory_stays_within_its_bound(bound, add):
    found = Memory(bound)
    for n in range(20 * bound):
        found.put(n, n) if add == "put" else found.keep(n, lambda n=n: n)
        assert len(found) <= bound
        assert found.get(n) == n


def test_what_is_used_outlives_what_is_not():
    found = Memory(64)
    found.put("hot", 0)
    for n in range(10_000):
        found.put(n, n)
        assert found.get("hot") == 0


def test_where_all_are_used_the_oldest_go():
    found = Memory(16)
    for n in range(16):
        found.keep(n, lambda n=n: n)
        found.get(n)
    found.put("new", 1)
    assert found.get("new") == 1
    assert found.get(0) is None
    assert found.get(15) == 15


def test_stale_entries_are_dropped():
    found = Memory(8)
    for n in range(6):
        found.put(n, n)
    assert found.drop(lambda n: n % 2 == 0) == [0, 2, 4]
    assert found.values() == [1, 3, 5]


def test_threads_that_make_the_same_thing_get_the_same_one():
    found, start = Memory(8), threading.Barrier(8)

    def make():
        start.wait()
        return object()

    with ThreadPoolExecutor(8) as pool:
        got = [job.result() for job in [pool.submit(found.keep, "a", make) for _ in range(8)]]
    assert len(set(map(id, got))) == 1


def test_what_could_not_be_made_leaves_nothing():
    found = Memory(8)
    with pytest.raises(KeyboardInterrupt):
        found.keep("a", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert len(found) == 0
    assert found.keep("a", lambda: 1) == 1


def test_threads_that_add_and_drop_at_once_never_break_it():
    found, errors = Memory(32), []

    def work(seed):
        try:
            for n in range(4000):
                found.keep((n * seed) % 97, lambda n=n: n)
                found.get(n % 97)
                if n % 50 == 0:
                    found.drop(lambda value: value % 3 == 0)
        except Exception as error:  # noqa: BLE001 - whatever it is, a thread must not die of it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(found) <= 32 + len(threads)


def test_one_call_forgets_everything():
    first, own, made = Memory(4), Memory(4, registered=False), []

    @kept(4)
    def length_of(text):
        made.append(text)
        return len(text)

    for found in (first, own):
        found.put("a", 1)
    assert [length_of("abc"), length_of("abc")] == [3, 3]
    forget_all()
    assert (len(first), len(own)) == (0, 1)
    assert length_of("abc") == 3
    assert made == ["abc", "abc"]
