"""Trials that are really run on the CPU: right, wrong, refused, and some that end their process."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from attnroute.api import repeats
from attnroute.api.recording import TracedCall
from attnroute.conformance import kernels, pool, run, values
from attnroute.conformance.judge import wrong
from attnroute.conformance.pool import Job, Pool, Worker, run_job
from attnroute.conformance.trials import Outcome, Trial
from attnroute.tables.load import load
from attnroute.tuning import gate
from attnroute.tuning.remake import remake

SMALL = "fp32 b2 hq4 sq33 d16"


def trial(line=SMALL, backend="flash", **given):
    return Trial(line=line, device="cpu", backend=backend, **given)


@pytest.mark.parametrize("backend", ["flash", "chunked", "math"])
@pytest.mark.parametrize("kind", ["usual", "sharp", "low", "equal", "zeros", "garbage"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_backends_are_right_with_all_values(backend, kind, dtype):
    line = f"{dtype} b2 hq4 hkv2 sq33 d16 keys=20,33 train"
    outcome = run.run(trial(line, backend, values=kind))
    assert (outcome.status, outcome.ran) == ("right", backend), outcome


@pytest.mark.parametrize(
    "words", ["train compiled", "dispatch_mode", "train unpacked", "train kv_expanded", "alibi train", "lse"]
)
def test_calls_are_made_as_their_line_says(words):
    assert run.run(trial(f"{SMALL} {words}", "chunked")).status == "right"


def test_what_a_row_keeps_from_a_kernel_is_wrong_or_refused():
    lifted = trial(f"{SMALL} causal scale=zero", past=("cpu/flash/causal-nan-scale",))
    outcome = run.run(lifted)
    assert outcome.status == "wrong"
    assert "relative error of the output" in outcome.said
    dims = trial("fp32 b2 hq4 sq33 d16/32", past=("any/flash/head-dims-equal",))
    assert run.run(dims).status in ("refused", "wrong")


def test_a_call_that_may_not_run_is_not_tried():
    outcome = run.run(trial("fp32 b2 hq4 sq33 d16/32"))
    assert outcome.status == "untested"
    assert "any/flash/head-dims-equal" in outcome.said


def test_another_kernel_in_place_of_the_named_one_is_seen():
    tables = load()
    query = torch.randn(1, 2, 8, 4)
    _, seen = kernels.watched(
        lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query), "cpu"
    )
    assert kernels.stranger(seen, "flash", tables, ()) == ""
    assert kernels.stranger(seen, "chunked", tables, ()) == "flash ran"
    on_device = seen._replace(kernels=("void other_kernel",))
    assert "no kernel of its own" in kernels.stranger(on_device, "flash", tables, ())


def test_a_process_that_dies_costs_its_own_trial_alone():
    worker = Worker()
    dies = trial("fp32 b2 hq8 sq0 skv8 d64", past=("any/flash/query-not-empty",))
    outcome = worker.ask(dies, 300)
    assert outcome.status == "crashed"
    assert "signal" in outcome.said
    assert worker.ask(trial(), 300).status == "right"
    worker.end()


def test_one_that_hangs_is_ended():
    worker = Worker()
    assert worker.ask(trial(), 0.001).status == "hung"
    worker.end()


class Told(Worker):
    """A worker that answers without a process."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers
        self.asked, self.ended = [], 0

    def ask(self, trial, limit, *, look=True):
        self.asked.append(trial)
        return Outcome(status=self.answers[trial.values])

    def end(self):
        self.ended += 1


def test_a_job_ends_where_its_trials_tell_enough():
    trials = tuple(trial(values=v) for v in ("usual", "sharp", "low", "equal", "zeros"))
    answers = {"usual": "right", "sharp": "wrong", "low": "wrong", "equal": "wrong", "zeros": "right"}
    worker = Told(answers)
    assert len(run_job(worker, Job("", "", "outside", trials))) == 2
    assert worker.ended == 1
    assert len(run_job(worker, Job("", "", "inside", trials))) == 4
    worker = Told(dict.fromkeys(answers, "right"))
    assert len(run_job(worker, Job("", "", "inside", trials))) == 5
    assert worker.ended == 0


def test_all_jobs_run_and_none_is_begun_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(pool, "Worker", lambda: Told({"usual": "right"}))
    jobs = [Job(str(n), "ab"[n % 2], "inside", (trial(),)) for n in range(20)]
    found = []
    Pool(3).run(jobs, lambda job, _: found.append(job.key))
    assert sorted(found, key=int) == [job.key for job in jobs]
    found.clear()
    Pool(3, until=0.0).run(jobs, lambda job, _: found.append(job.key))
    assert found == []


def test_a_drawn_call_that_the_end_of_the_time_cuts_off_is_untested_and_the_last():
    class Slow(Told):
        """Takes whatever it is given."""

        def ask(self, trial, limit, *, look=True):
            self.limits = [*getattr(self, "limits", ()), limit]
            return Outcome(status="hung", said=f"nothing came of it in {limit:g} s")

    worker, job = Slow({}), Job("", "", "drawn", (trial(), trial(values="sharp")))
    ((_, outcome),) = run_job(worker, job, time.monotonic() - 1)
    assert (outcome.status, outcome.said) == ("untested", "the time was over while it ran")
    assert worker.limits == [pytest.approx(10, abs=0.5)]
    assert [outcome.status for _, outcome in run_job(Slow({}), job)] == ["hung", "hung"]


def test_values_are_what_they_are_called():
    for kind in ("sharp", "low", "equal", "zeros"):
        problem = remake(TracedCall(line="bf16 b2 hq4 hkv4 sq64 d64 kv_expanded", device="cpu", backend=""))
        values.fill(problem, kind)
        query, key = problem.given.query.float(), problem.given.key.float()
        scores = query @ key.mT / 8
        assert {
            "sharp": scores.std() > 10,
            "low": scores.max() < -60,
            "equal": bool((key == key[:, :, :1]).all()),
            "zeros": bool((query[:, :, ::3] == 0).all() and (key[:, :, 1::3] != 0).any()),
        }[kind]


def test_a_gradient_with_one_wrong_row_is_found_beside_roundings():
    traced = TracedCall(line="bf16 b1 hq2 sq64 skv1 d32 train", device="cpu", backend="")
    problem, call = remake(traced), traced.call
    want = gate.truth(problem, call)
    got = gate.run(problem, "flash")
    assert wrong(problem, call, got, want) == ""
    got["value"][0, 0, 0] *= 1.5
    assert "gradient of value" in wrong(problem, call, got, want)


def test_large_calls_run_together_as_far_as_they_have_room():
    queues, room = {}, pool._TOGETHER
    jobs = [Job(f"{n}", "flash", "inside", (trial(),), size=size) for n, size in enumerate((room, 9, 5, 0))]
    for job in jobs:
        pool._put(job, queues)
    assert [job.size for job in queues["large"]] == [5, 9, room]
    assert pool._next(queues, Counter(), 0) == "large"
    assert pool._next(queues, Counter(), room - 5) == "large"
    assert pool._next(queues, Counter(), room - 4) == "flash"


def test_a_call_that_repeats_an_earlier_one_is_held_too(monkeypatch):
    honest = repeats.run

    def wrong(*arguments):
        found = honest(*arguments)
        return found and (found[0] * 1.5, found[1])

    monkeypatch.setattr(repeats, "run", wrong)
    outcome = run.run(trial())
    assert outcome.status == "wrong"
    assert outcome.said.startswith("the first call is right, the third is not")


def test_deterministic_calls_are_alike_to_the_last_bit(monkeypatch):
    honest = run._kernel
    monkeypatch.setattr(
        run, "_kernel", lambda *given: {n: t + 1e-6 * torch.rand_like(t) for n, t in honest(*given).items()}
    )
    assert run.run(trial(f"{SMALL} train")).status == "right"
    outcome = run.run(trial(f"{SMALL} train deterministic"))
    assert outcome.status == "wrong"
    assert "to the last bit" in outcome.said


def test_a_failure_behind_other_calls_is_tried_again_in_a_new_process(monkeypatch):
    class Told(Worker):
        is_new = False

        def ask(self, trial, limit, *, look=True):
            status = "right" if self.is_new else "wrong"
            return Outcome(status=status, said="" if self.is_new else "by a half", ran="flash")

        def end(self):
            self.is_new = True

    ((_, outcome),) = run_job(Told(), Job("flash", "flash", "inside", (trial(),)))
    assert outcome.status == "right"
    assert outcome.said == "right in a new process; behind other calls wrong: by a half"
