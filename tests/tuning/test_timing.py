"""Steps are timed by direction."""

from __future__ import annotations

import torch

from attnroute.tuning import timing


def test_forward_and_backward_are_timed_apart():
    leaf = torch.ones(4, requires_grad=True)
    step = timing.Step(lambda: leaf * 2, (leaf,), torch.ones(4))
    timed = timing.Timing(step, timing.CpuClock())
    timed.warm_up()
    timed.turn()
    found = timed.samples.summary()
    assert found["repetitions"] >= timing.REPETITIONS[0]
    assert min(found["fwd_ms"], found["bwd_ms"], found["fwd_host_us"], found["bwd_host_us"]) > 0


def test_totals_are_of_both_directions():
    samples = timing.Samples(([1.0, 2.0, 9.0], [3.0]), ([100.0, 200.0, 900.0], [300.0]))
    assert samples.totals == (5.0, 0.5)
    samples = timing.Samples(([1.0, 2.0, 9.0], []), ([100.0, 200.0, 900.0], []))
    assert samples.totals == (2.0, 0.2)
