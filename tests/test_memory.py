"""Memories of the process: bounded, complete when they are shown, forgotten by one call."""

from __future__ import annotations

import ast
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.memory import Memory, remembered


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


def test_reset_forgets_everything():
    attnroute.attention(*[torch.randn(1, 2, 8, 4)] * 3, masks.Causal(), prefer="chunked")
    kept = {memory.owner for memory in remembered() if memory.size()}
    assert {"api.routes._ROUTES", "api.choices._CLASSES", "tables.load._load", "settings.environment"} <= kept
    attnroute.reset()
    assert {memory.owner: memory.size() for memory in remembered() if memory.size()} == {}
    attnroute.attention(*[torch.randn(1, 2, 8, 4)] * 3, masks.Causal())


def test_reset_reads_the_environment_again(monkeypatch):
    query = torch.randn(1, 2, 8, 4)
    assert attnroute.explain(query, query, query).selected != "chunked"
    monkeypatch.setenv("ATTNROUTE_BACKEND", "chunked")
    attnroute.reset()
    assert attnroute.explain(query, query, query).selected == "chunked"
    monkeypatch.undo()
    attnroute.reset()


def test_reset_leaves_entered_overrides_in_force():
    query = torch.randn(1, 2, 8, 4)
    with attnroute.override(backend="chunked"):
        attnroute.reset()
        assert attnroute.explain(query, query, query).selected == "chunked"


def test_every_memory_states_its_owner_its_bound_and_when_it_is_stale():
    attnroute.attention(*[torch.randn(1, 2, 8, 4)] * 3, masks.Causal(), prefer="chunked")
    for memory in remembered():
        module, _, name = memory.owner.partition("._")
        assert memory.size() <= memory.bound, memory.owner
        assert memory.stale, memory.owner
        assert f"attnroute.{memory.owner.rsplit('.', 1)[0]}" in sys.modules, (module, name)


PACKAGE = Path(attnroute.__file__).parent
LISTENERS = {
    "audit/standins.py": {"_GIVEN"},
    "api/recorder.py": {"ACTIVE"},
    "api/routes.py": {"LISTENERS"},
    "executors/first_call.py": {"_LISTENERS"},
    "executors/launch.py": {"_LISTENERS"},
    "integrations/transformers/__init__.py": {"_REGISTERED"},
    "question/facts/registry.py": {"FACTS"},
}
"""Containers that are filled later and are no memory: who listens, names that a user registers, what
decorators collect while attnroute is imported, and what a process of the audit is given at its start."""


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix()
)
def test_what_a_module_remembers_is_registered(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    registered = set(re.findall(r"_[A-Z]+\b(?=\")", source)) if "register(" in source else set()
    filled_later = {name for node in tree.body for name in empty_containers(node)}
    allowed = LISTENERS.get(path.relative_to(PACKAGE).as_posix(), set())
    if path.name != "memory.py":
        assert filled_later - registered == allowed
        assert not re.search(r"\b(lru_cache|functools\.cache)\b", source), "use memory.cached"
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Memory":
            assert len(value.args) == 3, ast.unparse(node)


def empty_containers(node):
    """Return the names that a statement gives to an empty container, or to one of weak references."""
    value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    said = "" if value is None else ast.unparse(value)
    is_empty = said in (
        "{}",
        "[]",
        "set()",
        "dict()",
        "list()",
        "OrderedDict()",
        "threading.local()",
        "deque()",
    )
    return [ast.unparse(t) for t in targets if t is not None] if is_empty or "Weak" in said else []
