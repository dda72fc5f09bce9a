"""What every test shares: stable property tests, one thread per worker, GPU tests that never skip."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Workers of pytest-xdist already use every core. torch reads these when it is first imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[_name] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)

# A developer's own settings change decisions, so they would change what the tests see.
for _name in [name for name in os.environ if name.startswith("ATTNROUTE_")]:
    del os.environ[_name]

# So would what they measured with `attnroute tune`: the tests have a folder for data that nobody made.
os.environ["XDG_DATA_HOME"] = f"{tempfile.gettempdir()}/attnroute-tests-{os.getpid()}"

# No example is timed: a slow machine must not fail a property. In CI the examples are the same on every run.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables without costs: preferences alone make the order."""
    from attnroute.engine import classes, evaluate
    from attnroute.memory import reset

    reset()
    for module in (classes, evaluate):
        monkeypatch.setattr(module, "costs_of", lambda *_: None)
    yield
    reset()


LONGEST_FIRST = (
    "executors/test_flex_bounds.py",
    "executors/test_flex.py",
    "compile/test_contract.py",
    "engine/test_invariants.py",
    "integrations/transformers/test_compiled.py",
    "integrations/transformers/test_models.py",
    "executors/test_flex_blocks.py",
    "tables/test_lint.py",
    "api/test_numbers.py",
)
"""Files that take a minute or more: begun last, one of them would keep one worker busy and the rest idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(_place_of(item), len(ranks)))


def _place_of(item: pytest.Item) -> str:
    return "/".join(item.path.parts[-2:])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a GPU test on a machine without a CUDA device: a skip would look like a pass."""
    if item.get_closest_marker("gpu") is not None and not _has_cuda():
        pytest.fail(
            f"{item.nodeid} is marked gpu and needs a CUDA device; torch finds none here. "
            'Deselect such tests with -m "not gpu".',
            pytrace=False,
        )


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


@pytest.fixture
def environment(monkeypatch):
    """Set `ATTNROUTE_*` variables for the process, and read them anew before and after."""

    from attnroute import settings as ours

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"ATTNROUTE_{name}", value)
        ours.reload()

    yield put
    monkeypatch.undo()
    ours.reload()
