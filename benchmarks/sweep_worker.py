"""One process of the sweep: it prepares calls (compiles, first runs) and times them, as it is commanded.

Commands come as lines of JSON on stdin, answers leave as such lines on stdout; everything else that is
printed goes to stderr. `{"at": name}` comes before a backend is run: should the process die or hang then,
`sweep.py` knows where it was.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sweep_calls import SweepCall, read
from sweep_inputs import Problem, build
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnroute
from attnroute.tuning.timing import Step, Timing, clock_of, first

MATH_SCORES = 2**27
"""The most scores that backends which hold them all are measured with."""
FEW_KEYS = 64
"""Up to so many keys the terms of dQ, dK and a bias's gradient may cancel: those are not compared."""
ROUNDS = 2
FULL = "out of memory"
"""The status of what did not fit; beside others it is tried again alone."""
_SDP = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
Say = Callable[[dict[str, Any]], None]


class Server:
    """Answers commands about calls on one device."""

    def __init__(self, device: str, backends: tuple[str, ...], share: float, say: Say) -> None:
        """Begin with nothing compiled."""
        self._device = device
        self._share = share
        self._backends = backends
        self._say = say
        self._clock = clock_of(device)
        self._compiled: set[SweepCall] = set()

    def answer(self, do: str, call: SweepCall, backends: dict[str, Any]) -> dict[str, Any]:
        """Prepare or time a call; where its tensors cannot be made, say so of the whole call."""
        run = self.prepare if do == "prepare" else self.time
        if self._device == "cuda":
            # Beside others nobody may take their memory; alone a process may take nearly all of it.
            torch.cuda.set_per_process_memory_fraction(self._share if do == "prepare" else 0.8)
        outcome, found = self._guarded(lambda: ({}, run(call, backends)))
        self._free()
        return {"backends": backends} | outcome | (found or {})

    def prepare(self, call: SweepCall, skip: dict[str, Any]) -> dict[str, Any]:
        """Run every candidate once and return what the first runs gave."""
        problem = build(call, self._device)
        decision = attnroute.explain(*problem.tensors, **problem.ours)
        structure = call._replace(batch=0, seqlen_q=0, seqlen_kv=0)
        found: dict[str, Any] = {
            "line": attnroute_line(decision.call),
            "selected": decision.selected,
            "order": list(decision.order),
            "stock_takes": _stock_takes(call, problem),
            "fresh": structure not in self._compiled,
        }
        self._compiled.add(structure)
        results: dict[str, Any] = dict(skip)
        truth: tuple[Tensor, ...] | None = None
        for name in self._candidates(decision.order, problem):
            if name in results:
                continue
            if name == "math" and call.score_count > MATH_SCORES:
                results[name] = {"status": "not measured", "text": f"more than {MATH_SCORES} scores"}
                continue
            self._say({"at": name})
            results[name], given = self._guarded(partial(self._first, call, problem, name, truth))
            truth = given if truth is None else truth
            del given
        found["backends"] = results
        return found

    def time(self, call: SweepCall, results: dict[str, Any]) -> dict[str, Any]:
        """Time every candidate whose first run went well, in turns."""
        problem = build(call, self._device)
        timings: dict[str, Timing] = {}
        for name in [n for n, r in results.items() if r.get("status", FULL) == FULL]:
            self._say({"at": name})
            results[name] = {n: v for n, v in results[name].items() if n not in ("status", "text")}
            timing = Timing(step_of(call, problem, name), self._clock)
            outcome, extra = self._guarded(lambda t=timing: ({}, t.warm_up()))
            results[name] |= outcome | (extra or {})
            if "status" not in results[name]:
                timings[name] = timing
        for _ in range(ROUNDS):
            for name, timing in list(timings.items()):
                self._say({"at": name})
                outcome, _ = self._guarded(lambda t=timing: ({}, t.turn()))
                if outcome:
                    results[name] |= outcome
                    del timings[name]
        for name, timing in timings.items():
            results[name] |= timing.samples.summary()
        return {"backends": results}

    def _candidates(self, order: tuple[str, ...], problem: Problem) -> list[str]:
        names = [name for name in order if not self._backends or name in self._backends]
        return [*names, *([] if problem.stock is None else ["stock"]), "auto"]

    def _first(
        self, call: SweepCall, problem: Problem, name: str, truth: tuple[Tensor, ...] | None
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        seconds, given = first(step_of(call, problem, name), self._clock)
        pairs = list(zip(given, given if truth is None else truth, strict=True))
        if call.seqlen_kv <= FEW_KEYS and len(pairs) > 1:
            pairs = [pairs[0], pairs[3]]
        apart = deviation(pairs)
        return {"first_call_s": round(seconds, 4), "deviation": apart}, given

    def _guarded(self, run: Callable[[], tuple[dict[str, Any], Any]]) -> tuple[dict[str, Any], Any]:
        """Return what a run gives; where it raises, the status and text of that."""
        try:
            return run()
        except torch.OutOfMemoryError as error:
            outcome = {"status": FULL, "text": str(error)[:200]}
        except Exception as error:  # noqa: BLE001 - a backend that raises is a result
            outcome = {"status": "raised", "text": f"{type(error).__name__}: {str(error)[:400]}"}
        # An error of the device stays until the process ends: this raises it again, and ends the process.
        self._clock.wait()
        self._free()
        return outcome, None

    def _free(self) -> None:
        if self._device == "cuda":
            torch.cuda.empty_cache()


def attnroute_line(call: attnroute.Call) -> str:
    """Return a call as the line that `attnroute explain` reads."""
    from attnroute.question.line import render

    return render(call)


def step_of(call: SweepCall, problem: Problem, name: str) -> Step:
    """Return what is timed: a backend by name, "auto" for `attention()`'s own choice, "stock"."""
    query, key, value = problem.tensors
    if name == "stock":
        arguments = problem.stock
        assert arguments is not None
        is_gqa = call.heads[0] != call.heads[1]
        return Step(
            lambda: sdpa(query, key, value, enable_gqa=is_gqa, **arguments()), problem.leaves, problem.grad
        )
    backend = None if name == "auto" else name

    def forward() -> Tensor:
        return attnroute.attention(query, key, value, backend=backend, **problem.ours)

    return Step(forward, problem.leaves, problem.grad)


def deviation(pairs: list[tuple[Tensor, Tensor]]) -> float | str:
    """Return the largest relative difference of tensors from others."""
    worst = 0.0
    for got, want in pairs:
        apart = (got - want).float().norm() / want.float().norm().clamp_min(1e-12)
        worst = max(worst, apart.item()) if torch.isfinite(apart) else float("inf")
    return round(worst, 5) if worst < float("inf") else "not finite"


def _stock_takes(call: SweepCall, problem: Problem) -> str | None:
    """Return the backend that stock attention chooses, asked from torch itself."""
    if problem.stock is None:
        return None
    options = problem.stock()
    try:
        choice = torch._fused_sdp_choice(  # noqa: SLF001 - torch has no public question
            *problem.tensors,
            attn_mask=options.get("attn_mask"),
            is_causal=options.get("is_causal", False),
            enable_gqa=call.heads[0] != call.heads[1],
        )
    except RuntimeError as error:
        return f"raised: {str(error)[:100]}"
    return _SDP.get(choice, str(choice))


def main() -> None:
    """Answer commands until stdin ends."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    device, names, share = sys.argv[1:]
    server = Server(device, tuple(name for name in names.split(",") if name), float(share), say)
    say({"ready": True})
    for text in sys.stdin:
        command = json.loads(text)
        call = read(command["key"])
        say({"done": server.answer(command["do"], call, command["backends"])})


if __name__ == "__main__":
    main()
