"""Memories of the process: bounded, complete when they are shown, forgotten by one call."""

from __future__ import annotations

import ast
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.api import routes
from attnroute.executors import registry
from attnroute.memory import Memory, forget_all


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
    attnroute.attention(*[torch.randn(1, 2, 8, 4)] * 3, masks.Causal(), prefer="chunked")
    assert len(routes._ROUTES) > 0
    assert registry._imported.cache_info().currsize > 0
    forget_all()
    assert {name: len(found) for name, found in memories() if len(found)} == {}
    assert {
        name: found.cache_info().currsize for name, found in caches() if found.cache_info().currsize
    } == {}
    attnroute.attention(*[torch.randn(1, 2, 8, 4)] * 3, masks.Causal())


def things():
    for name, module in sorted(sys.modules.items()):
        if name.startswith("attnroute."):
            yield from ((f"{name}.{place}", thing) for place, thing in vars(module).items())


def memories():
    return ((name, thing) for name, thing in things() if isinstance(thing, Memory))


def caches():
    return ((name, thing) for name, thing in things() if hasattr(thing, "cache_info"))


PACKAGE = Path(attnroute.__file__).parent
OWNED = {
    "executors/first_call.py": {"_LISTENERS"},
    "executors/launch.py": {"_LISTENERS"},
    "integrations/transformers/__init__.py": {"_REGISTERED"},
    "masks/lowered/mods.py": {"_CONSTANTS"},
    "probes/packages.py": {"_MARKED"},
    "question/facts/registry.py": {"FACTS"},
}
"""Containers of modules that are filled later and are no `Memory`: listeners, names that a user registers,
eight numbers, one entry per known distribution, facts as their modules are imported. Each has its bound in
that."""
NAMES = {"backend", "dtype", "function", "name", "operator"}
"""Arguments that have a handful of values: a function of one of these may remember all of them."""


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix()
)
def test_what_a_module_remembers_has_a_bound(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    filled_later = {name for node in tree.body for name in empty_containers(node)}
    assert filled_later == OWNED.get(path.relative_to(PACKAGE).as_posix(), set())
    for function in ast.walk(tree):
        for decorator in getattr(function, "decorator_list", ()):
            said = ast.unparse(decorator)
            if said in ("cache", "functools.cache") or "maxsize=None" in said:
                arguments = {argument.arg for argument in function.args.args}
                assert len(arguments) <= 1, function.name
                assert arguments <= NAMES, function.name


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
