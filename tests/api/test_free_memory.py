"""A route that does not fit into the free memory of its device is not chosen, and is chosen again later."""

from __future__ import annotations

import pytest
import torch
from support.spy import decided_calls
from torch.utils.checkpoint import checkpoint

import attnroute
from attnroute.api import routes
from attnroute.errors import NoBackendError

pytestmark = pytest.mark.usefixtures("fresh")

SCORES = 2 * 4 * 32 * 32 * 4
"""Bytes of the score matrix that math allocates for these tensors."""


@pytest.fixture
def device(monkeypatch):
    """A device with so much free memory as its `free` says; `asked` counts how often that was read."""

    class Device:
        free, asked = 2**30, 0

        def memory(self, *_):
            self.asked += 1
            return self.free

    found = Device()
    monkeypatch.setattr(routes, "free_memory", found.memory)
    monkeypatch.setattr(routes, "MUCH_MEMORY", SCORES)
    return found


def tensors(length=32, **options):
    return [torch.randn(2, 4, length, 8, **options) for _ in range(3)]


def what_ran(run=attnroute.attention, **options):
    """Run a call and return the backend that it ran on."""
    seen = []
    execute = routes.execute

    def spy(route, problem):
        seen.append(route.choice.backend)
        return execute(route, problem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "execute", spy)
        run(*tensors(), prefer="math", **options)
    return seen[-1]


def test_what_fits_is_asked_about_once_and_remembered(device):
    assert [what_ran() for _ in range(3)] == ["math"] * 3
    assert device.asked == 1


def test_what_needs_little_is_not_asked_about(device):
    attnroute.attention(*tensors(31), prefer="math")
    attnroute.attention(*tensors())
    assert device.asked == 0


def test_what_does_not_fit_gives_way_until_there_is_room(device, monkeypatch):
    decided = decided_calls(monkeypatch)
    device.free = SCORES - 1
    assert [what_ran() for _ in range(3)] == ["flash"] * 3
    # Each call asks the device. What runs instead is decided once for as much room; math never is, as each
    # of its calls says its own bytes.
    assert (device.asked, len(decided)) == (3, 3 + 1)
    device.free = SCORES
    assert [what_ran() for _ in range(3)] == ["math"] * 3
    assert (device.asked, len(decided)) == (4, 3 + 1 + 1)


def test_a_required_backend_runs_whatever_is_free(device):
    device.free = 0
    attnroute.attention(*tensors(), backend="math")


def test_an_explanation_says_what_is_wanted_and_what_is_free(device):
    device.free = SCORES // 2
    decision = attnroute.explain(*tensors(), prefer="math")
    excluded = decision.verdict("math").excluded
    assert (decision.selected, decision.host.free_memory) == ("flash", SCORES // 2)
    assert (excluded.reason, excluded.needed_bytes, excluded.free_bytes) == ("memory", SCORES, SCORES // 2)
    assert (
        "math       eligible, 32 KiB of scores, kept out because it allocates 32 KiB and 16 KiB are free"
        in decision.text(verbose=True, width=120)
    )


def test_where_nothing_fits_the_error_says_so(device):
    device.free = 0
    with attnroute.override(allow="math"), pytest.raises(NoBackendError, match="32 KiB and 0 bytes are free"):
        attnroute.attention(*tensors())


def test_a_checkpoint_chooses_without_looking_at_memory(device):
    """Its recompute must choose what its forward chose, whatever is free by then."""
    device.free = 0
    inputs = tensors(requires_grad=True)

    def layer(*given):
        return attnroute.attention(*given, prefer="math")

    checkpoint(layer, *inputs, use_reentrant=False).sum().backward()
    assert device.asked == 0
    assert routes._ROUTES.values()[0].choice.backend == "math"
