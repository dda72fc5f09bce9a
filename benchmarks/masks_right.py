"""Outputs and gradients against float64: every query of one key head and of the query heads that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import Run, progress, relative
from masks_common import DEVICE, Case, Sizes, Steps, draw, forwards, number, raised, stock_forward, wait
from torch import Tensor

from attnroute import explain

ROWS = 1024
"""Queries that are looked at together."""
KEY_HEAD = -1

Named = dict[str, Tensor]


def right(make: Callable[..., Case], sizes: Sizes) -> Steps:
    """Compare what is routed, FLASH and stock with float64, as inference and in training."""
    case = make(sizes, train=True)
    query, _, value = case.inputs
    cotangent = draw(*query.shape[:-1], value.shape[-1])
    want = reference(case, cotangent)
    runs: dict[str, Run | None] = {**forwards(case, ("flash",)), "stock": stock_forward(case)}
    found: dict[str, Any] = {"selected": explain(*case.inputs, **case.ours).selected}
    with torch.no_grad():
        found["selected_inference"] = explain(*case.inputs, **case.ours).selected
    for name, run in runs.items():
        found[name] = None if run is None else _compared(case, run, cotangent, want)
        progress(f"right {make.__name__} {name}: {_line(found[name])}")
    return found
    yield  # Nothing is timed.


def reference(case: Case, cotangent: Tensor) -> Named:
    """Return output and gradients in float64 of the last key head and of its query heads."""
    query, key, value = (t.detach() for t in case.inputs)
    group = query.shape[1] // key.shape[1]
    grad, query = cotangent[0, -group:].double(), query[0, -group:].double()
    key, value = key[0, KEY_HEAD].double(), value[0, KEY_HEAD].double()
    names = {"out": grad, "dq": query, "dk": key, "dv": value}
    found = {name: torch.zeros_like(like) for name, like in names.items()}
    sink = case.ours.get("sink")
    if sink is not None:
        found["dsink"] = torch.zeros(group, device=DEVICE, dtype=torch.float64)
    for head in range(group):
        extra = None if sink is None else sink.detach()[head - group].double()
        for start in range(0, query.shape[1], ROWS):
            _add_rows(found, head, slice(start, start + ROWS), (query, key, value, grad), case, extra)
    return found


def _add_rows(
    found: Named, head: int, rows: slice, tensors: tuple[Tensor, ...], case: Case, sink: Tensor | None
) -> None:
    """Add what some queries of one head give."""
    query, key, value, grad = tensors
    query, grad, scale = query[head, rows], grad[head, rows], query.shape[-1] ** -0.5
    places = torch.arange(key.shape[0], device=DEVICE)
    allowed = case.allowed(places[rows, None], places[None])
    scores = (query @ key.T * scale).masked_fill_(~allowed, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(len(scores), 1)], -1)
    weights = scores.softmax(-1)
    probs = weights[:, : key.shape[0]]
    out = probs @ value
    delta = (grad * out).sum(-1, keepdim=True)
    grad_scores = (grad @ value.T - delta) * probs * scale
    found["out"][head, rows], found["dq"][head, rows] = out, grad_scores @ key
    found["dk"] += grad_scores.T @ query
    found["dv"] += probs.T @ grad
    if sink is not None:
        found["dsink"][head] -= (weights[:, -1:] * delta).sum()


def _compared(case: Case, run: Run, cotangent: Tensor, want: Named) -> dict[str, Any]:
    """Return the errors of one run, or what it raised."""
    try:
        with torch.no_grad():
            inference = run()
        out = run()
        grads = torch.autograd.grad(out, case.trained, cotangent)
        wait()
    except Exception as error:  # noqa: BLE001 - no kind of failure is excepted
        return {"error": raised(error)}
    group = case.inputs[0].shape[1] // case.inputs[1].shape[1]
    got = {"out": out.detach()[0, -group:], "dq": grads[0][0, -group:]}
    got |= {"dk": grads[1][0, KEY_HEAD], "dv": grads[2][0, KEY_HEAD]}
    if len(grads) > 3:
        got["dsink"] = grads[3][-group:]
    errors = {"out_inference": _errors(inference[0, -group:], want["out"])}
    return errors | {name: _errors(got[name], want[name]) for name in got}


def _line(found: dict[str, Any] | None) -> str:
    """Return relative errors with those of the worst rows."""
    if found is None:
        return "cannot say it"
    if "error" in found:
        return str(found["error"])
    return "  ".join(f"{name} {error['relative']} ({error['worst_row']})" for name, error in found.items())


def _errors(got: Tensor, want: Tensor) -> dict[str, float | str]:
    """Return the relative error, and that of the worst row over the size of a usual row."""
    rows = (got.double() - want).reshape(-1, want.shape[-1]).norm(dim=-1)
    usual = want.reshape(-1, want.shape[-1]).norm(dim=-1).square().mean().sqrt()
    worst = (rows.max() / usual.clamp_min(1e-30)).item()
    return {"relative": number(relative(got, want)), "worst_row": number(worst)}
