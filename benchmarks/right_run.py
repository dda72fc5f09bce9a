"""One case against float64, and the loop of one process over many."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from common import kernels_of
from right_cases import FACTORS, SMALL, STRUCTURE, Case, Coverage, fixed_cases
from right_inputs import DTYPES, Problem, build, cotangent, inward, outward
from torch import Tensor

import attnroute

TOLERANCE = {"bf16": 0.012, "f16": 0.003, "f32": 3e-4}
"""Relative error that needs no second look; beyond it attention with roundings of the dtype is asked."""
SLACK = 4.0
"""How many times its error, eager or with the roundings of a kernel, is still right."""
JITTED = ("flex", "flex_fa4", "fa4", "auto")


def scored(
    tensors: tuple[Tensor, ...],
    *,
    dtype: torch.dtype,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Return all scores, -inf where nobody may attend, in float32 or wider; products are in a dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    query, key = (t.to(dtype) for t in tensors[:2])
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query @ key.mT).to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(wide)
    if alibi_slopes is not None:
        seqlen_q, seqlen_kv = scores.shape[-2:]
        rows = torch.arange(seqlen_q, device=query.device)[:, None] + seqlen_kv - seqlen_q
        distance = (rows - torch.arange(seqlen_kv, device=query.device)).abs()
        scores = scores - alibi_slopes.to(wide)[:, None, None] * distance
    return scores if allowed is None else scores.masked_fill(~allowed, -math.inf)


def as_kernels_round(case: Case, problem: Problem) -> dict[str, Tensor]:
    """Return gradients with the roundings that every fused kernel of the dtype has, and no other error.

    A kernel makes the gradient of the scores as P * (dP - sum(dO * O)) from an output that was rounded to the
    dtype, and rounds P and that gradient before it multiplies them. Where dP and the sum nearly cancel, as
    with one key, with sinks or with sharp weights, this rounding is most of what is left. Eager attention
    rounds none of it.
    """
    dtype, truth = DTYPES[case.dtype], dict(problem.truth)
    sink = truth.pop("sink", None)
    bias = truth.get("bias")
    leaves = [t.float().detach().requires_grad_() for t in problem.clean]
    if bias is not None:
        truth["bias"] = bias.detach().float().requires_grad_()
    group = leaves[0].shape[1] // leaves[2].shape[1]
    value = leaves[2].detach().repeat_interleave(group, 1)
    scores = scored(tuple(leaves), dtype=torch.float32, **truth)
    tops = scores.detach()
    if sink is not None:
        tops = torch.cat([tops, sink.detach().float().reshape(1, -1, 1, 1).expand(*tops.shape[:3], 1)], -1)
    lse = torch.logsumexp(tops, -1, keepdim=True)
    weights = torch.exp(scores.detach() - torch.where(lse == -math.inf, math.inf, lse))
    out = (weights.to(dtype).float() @ value).to(dtype)
    torch.manual_seed(case.seed + 1)
    grad = cotangent(case, out).float()
    delta = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = (weights * (grad @ value.mT - delta)).to(dtype).float()
    asked = [leaves[0], leaves[1], *([truth["bias"]] if bias is not None else [])]
    grads = torch.autograd.grad(scores, asked, grad_scores)
    found = dict(zip(("dq", "dk", "dbias"), grads, strict=False))
    found["dv"] = (weights.to(dtype).float().mT @ grad).unflatten(1, (-1, group)).sum(2)
    if sink is not None:
        share = torch.exp(sink.detach().float().reshape(-1, 1, 1) - lse)
        found["dsink"] = -(share * delta).sum((0, 2, 3))
    return {name: t.detach().to(dtype) if name != "dsink" else t for name, t in found.items()}


def attend(
    tensors: tuple[Tensor, ...],
    *,
    dtype: torch.dtype,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, products in a dtype: float64 is the truth, others eager attention."""
    value = tensors[2].to(dtype).repeat_interleave(tensors[0].shape[1] // tensors[2].shape[1], 1)
    changed = {"bias": bias, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes}
    scores = scored(tensors, dtype=dtype, allowed=allowed, **changed)
    wide = scores.dtype
    if sink is not None:
        scores = torch.cat([scores, sink.to(wide).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    lse = torch.where(total > 0, total.log() + top, -math.inf).squeeze(-1)
    weights = weights / torch.where(total > 0, total, 1.0)
    if sink is not None:
        weights = weights[..., :-1]
    return weights.to(dtype) @ value, lse


def difference(got: Tensor, want: Tensor, floor: float) -> float:
    """Return the relative error of a tensor, or a quarter of its worst row's over the size of a usual row.

    No row counts as smaller than `floor`: a gradient whose terms cancel is as wrong as its terms are rounded.
    """
    if got.shape != want.shape or not torch.isfinite(got).all():
        return math.inf
    if want.numel() == 0:
        return 0.0
    apart = (got.double() - want.double()).reshape(-1, want.shape[-1]).norm(dim=-1)
    rows = want.double().reshape(-1, want.shape[-1]).norm(dim=-1)
    usual = rows.square().mean().sqrt().clamp_min(max(floor, 1e-12))
    whole = apart.square().mean().sqrt() / usual
    return max(whole.item(), (apart / torch.maximum(rows, usual)).max().item() / 4)


def spoil(device: str) -> None:
    """Leave NaN in memory that the next tensors are cut from: what a kernel leaves out shows."""
    if device == "cuda":
        sizes = [*[2**8] * 128, *[2**13] * 32, *[2**17] * 16, *[2**21] * 4]
        blocks = [torch.full((size,), math.nan, device=device) for size in sizes]
        del blocks


def launched(case: Case, problem: Problem) -> dict[str, Tensor]:
    """Run the call and return what it gives, every tensor as (batch, heads, seqlen, ...)."""
    backend = None if case.backend == "auto" else case.backend
    result = attnroute.attention(
        *problem.given, problem.mask, backend=backend, layout=case.api, **_rest(problem.options)
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    found = {"out": inward(case, out)}
    if lse is not None:
        found["lse"] = lse[None] if case.api == "thd" else lse
    if case.phase.startswith("train"):
        trained = _trained(problem)
        torch.manual_seed(case.seed + 1)
        grad = outward(case, cotangent(case, found["out"]))
        grads = torch.autograd.grad(out, list(trained.values()), grad)
        for (name, _), made in zip(trained.items(), grads, strict=True):
            found[name] = inward(case, made) if name in ("dq", "dk", "dv") else made
    return {name: t.detach() for name, t in found.items()}


def _rest(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "layout"}


def _trained(problem: Problem) -> dict[str, Tensor]:
    found = dict(zip(("dq", "dk", "dv"), problem.given, strict=True))
    extras = {f"d{n}": problem.options[n] for n in ("sink", "bias") if n in problem.options}
    return found | {n: t for n, t in extras.items() if t.requires_grad}


def wanted(case: Case, problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what is true of a case, or what eager attention in a dtype gives."""
    trains = case.phase.startswith("train")
    tensors = [t.detach().clone().requires_grad_(trains) for t in problem.clean]
    truth = dict(problem.truth)
    trained = dict(zip(("dq", "dk", "dv"), tensors, strict=True))
    for name in ("sink", "bias"):
        if name in truth:
            truth[name] = truth[name].detach().clone().requires_grad_(truth[name].requires_grad)
            if truth[name].requires_grad:
                trained[f"d{name}"] = truth[name]
    out, lse = attend(tuple(tensors), dtype=dtype, **truth)
    found = {"out": out, "lse": lse}
    if trains:
        torch.manual_seed(case.seed + 1)
        grad = cotangent(case, out.detach().to(DTYPES[case.dtype])).to(out.dtype)
        # A gradient comes back in the dtype of its leaf, so the truth's leaves are float64.
        found |= dict(zip(trained, torch.autograd.grad(out, list(trained.values()), grad), strict=True))
    return {name: t.detach() for name, t in found.items()}


def held(case: Case, device: str) -> dict[str, Any]:
    """Run one case and return what is to be said of it."""
    problem = build(case, device)
    spoil(device)
    got = launched(case, problem)
    exact = problem._replace(clean=tuple(t.double() for t in problem.clean))  # type: ignore[arg-type]
    exact = exact._replace(truth=_exact(exact.truth))
    want = wanted(case, exact, torch.float64)
    floors = _floors(case, problem)
    errors = {name: _error(t, want[name], floors.get(name, 0.0)) for name, t in got.items()}
    limit = TOLERANCE[case.dtype]
    late = [name for name, error in errors.items() if error > limit]
    if not late:
        return {"status": "ok", "error": max(errors.values())}
    usual = wanted(case, problem, DTYPES[case.dtype])
    stock = {name: _error(usual[name], want[name], floors.get(name, 0.0)) for name in late}
    if case.phase.startswith("train"):
        for name, rounded in as_kernels_round(case, problem).items():
            if name in stock:
                stock[name] = max(stock[name], _error(rounded, want[name], floors.get(name, 0.0)))
    wrong = {
        n: [_short(errors[n]), _short(stock[n])]
        for n in late
        if not errors[n] <= max(limit, SLACK * stock[n])
    }
    if wrong:
        return {"status": "wrong", "wrong": wrong}
    return {
        "status": "ok",
        "error": max(errors[n] for n in errors if n not in late) if len(late) < len(errors) else 0.0,
    }


def _exact(truth: dict[str, Any]) -> dict[str, Any]:
    """Return the truth with its tensors that train as float64 leaves."""
    made = {
        n: t.detach().double().requires_grad_(t.requires_grad)
        for n, t in truth.items()
        if n in ("sink", "bias")
    }
    return truth | made


def _short(number: float) -> float | str:
    return float(f"{number:.3g}") if math.isfinite(number) else str(number)


def _floors(case: Case, problem: Problem) -> dict[str, float]:
    """Return a fiftieth of the size of the terms of a gradient's row, for terms that cancel.

    A key's row sums over all queries that share it: with one key that is every query of the group.
    """
    query, key, value = (t.double().square().mean().sqrt().item() for t in problem.clean)
    width, width_v = case.dims
    score = 0.02 * width_v**0.5 * value
    scale = problem.truth.get("scale") or width**-0.5
    shared = max(1.0, case.lengths[1] / case.lengths[2] * case.heads[0] / case.heads[1])
    return {
        "dq": score * scale * key * width**0.5,
        "dk": score * scale * query * width**0.5 * shared,
        "dbias": score,
    }


def _error(got: Tensor, want: Tensor, floor: float) -> float:
    if want.dim() != 3:
        return difference(got, want, floor)
    if got.shape != want.shape or not torch.equal(got == -math.inf, want == -math.inf):
        return math.inf
    finite = want > -math.inf
    if not finite.any():
        return 0.0
    apart = (got.double() - want.double())[finite].abs() / want.double()[finite].abs().clamp_min(1.0)
    return math.inf if apart.isnan().any() else apart.max().item()


def eligible(case: Case, device: str) -> tuple[str, str]:
    """Return the backend that would run, or an empty word and the first reason."""
    problem = build(case, device)
    backend = None if case.backend == "auto" else case.backend
    try:
        decision = attnroute.explain(
            *problem.given, problem.mask, backend=backend, layout=case.api, **_rest(problem.options)
        )
    except attnroute.AttnRouteError as error:
        return "", f"refused argument: {str(error)[:120]}"
    if decision.selected is not None:
        return decision.selected, ""
    if backend is None:
        return "", "nothing"
    verdict = decision.verdict(backend)
    failed = [f.rule for f in verdict.findings if f.outcome in ("fail", "unknown") and f.repaired_by is None]
    return "", str(failed[0] if failed else verdict.status)


def one(case: Case, device: str) -> dict[str, Any]:
    """Run one case and never raise but for what ends the process."""
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = held(case, device)
        except Exception as error:  # noqa: BLE001 - every failure is a result here
            refused = isinstance(error, attnroute.AttnRouteError)
            text = f"{type(error).__name__}: {error}"[:300]
            found = {"status": "refused" if refused else "raised", "text": text}
        reroutes = [str(w.message)[:200] for w in heard if type(w.message).__name__ == "RerouteWarning"]
    if reroutes:
        found["rerouted"] = reroutes[0]
    return found | {"seconds": round(time.monotonic() - began, 2)}


def say(**line: Any) -> None:
    """Tell the parent something."""
    sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def shard(
    backend: str, number: int, *, seed: int, seconds: float, device: str, fixed: bool, skip: int
) -> None:
    """Run cases of one backend until the time is over.

    Args:
        backend: Its name.
        number: Which of several processes with the same backend this is.
        seed: Of what is drawn.
        seconds: The time.
        device: "cuda" or "cpu".
        fixed: Whether this process also runs its share of the fixed cases, first.
        skip: How many of the fixed cases were done before a restart.
    """
    until = time.monotonic() + seconds
    factors = FACTORS | (SMALL if device == "cpu" else {})
    coverage = Coverage(seed + 1000 * number + skip, factors)
    missed: Counter[str] = Counter()
    profiled: set[str] = set()
    for index, case in enumerate(_cases(backend, coverage, device, fixed=fixed)):
        if time.monotonic() > until:
            break
        if index < skip:
            continue
        selected, reason = eligible(case, device)
        coverage.count(case, 3 if selected else 1)
        if not selected:
            missed[reason] += 1
            continue
        say(start=case.line, index=index)
        found = one(case, device)
        kind = f"{case.api == 'thd' or case.mask in ('documents', 'pad_right')} {case.phase[:5]}"
        if device == "cuda":
            torch.cuda.synchronize()
            if found["status"] == "ok" and number == 0 and kind not in profiled and backend != "auto":
                profiled.add(kind)
                found["kernels"] = _kernels(case, device)
        say(done=case.line, selected=selected, **found)
    say(end=True, not_eligible=missed.most_common(12), missed=missed.total())


def _kernels(case: Case, device: str) -> list[str]:
    """Return what a profile shows of one case: the backend's kernels and marks."""
    problem = build(case, device)
    return [name[:90] for name in kernels_of(lambda: launched(case, problem)) if "elementwise" not in name][
        :12
    ]


def _cases(backend: str, coverage: Coverage, device: str, *, fixed: bool) -> Iterator[Case]:
    if fixed:
        yield from list(fixed_cases(backend, small=device == "cpu"))
    together = 8 if backend in JITTED else 1
    while True:
        first = coverage.draw(backend, {})
        yield first
        shared = {name: getattr(first, name) for name in STRUCTURE}
        for _ in range(together - 1):
            yield coverage.draw(backend, shared)
