"""`attention()` beside stock scaled_dot_product_attention, in one run: times, errors, memory, what ran.

python benchmarks/beside_stock.py --out results.json [--part shapes] [--part large_heads] [--part faults]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from common import Run, kernels_of, peak_extra_bytes, progress, relative, save, side_by_side
from shapes import LARGE_HEADS, SHAPES, Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnroute import attention, explain

SAMPLED_ROWS = 64
LONG = 4096
"""Above this stock's quadratic path takes so long that two rounds are enough."""


def passes(shape: Shape, forward: Run, inputs: tuple[Tensor, ...]) -> Run:
    """Return the forward pass, with the backward pass where the shape trains."""
    if not shape.train:

        def inference() -> Tensor:
            with torch.no_grad():
                return forward()

        return inference
    cotangent = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, cotangent)


def row_error(shape: Shape, out: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """Compare some rows of the last head of the last batch row with float64."""
    query, key, value = (t.detach()[-1, -1].double() for t in inputs)
    rows = torch.linspace(0, shape.seqlen_q - 1, min(SAMPLED_ROWS, shape.seqlen_q), device="cuda").long()
    scores = query[rows] @ key.T * shape.head_dim_qk**-0.5
    allowed = shape.allowed()
    if allowed is not None:
        part = allowed[-1, -1] if allowed.dim() == 4 else allowed
        scores = scores.masked_fill(~(part[rows] if part.shape[0] > 1 else part), -math.inf)
    return relative(out[-1, -1][rows], scores.softmax(-1) @ value)


def measure(shape: Shape, *, efficient: bool = False) -> dict[str, Any]:
    """Time one shape and say what ran."""
    torch.manual_seed(0)
    inputs = shape.tensors()
    query, key, value = inputs
    group = shape.heads_q // shape.heads_kv
    stock_mask, our_mask = shape.stock(), shape.ours()
    runs = {
        "attnroute": passes(shape, lambda: attention(query, key, value, **our_mask), inputs),
        "stock": passes(shape, lambda: sdpa(query, key, value, enable_gqa=group > 1, **stock_mask), inputs),
    }
    if efficient:

        def repeated() -> Tensor:
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                wide = (t.repeat_interleave(group, 1) for t in (key, value))
                return sdpa(query, *wide, **stock_mask)

        runs["efficient_repeated_kv"] = passes(shape, repeated, inputs)
    decision = explain(query, key, value, **our_mask)
    found = {
        "selected": decision.selected,
        "repairs": list(decision.verdict(decision.selected or "").repairs),
        "kernels": kernels_of(runs["attnroute"]),
        "stock_kernels": kernels_of(runs["stock"]),
        "predicted_stock": None if decision.stock is None else decision.stock.backend,
        "error": row_error(shape, attention(query, key, value, **our_mask).detach(), inputs),
        "extra_MiB": {name: round(peak_extra_bytes(run) / 2**20) for name, run in runs.items()},
    }
    times = side_by_side(runs, rounds=2 if efficient and shape.seqlen_q > LONG else 5)
    found["ms"] = {name: round(ms, 4) for name, ms in times.items()}
    found["ratio_to_stock"] = round(times["attnroute"] / times["stock"], 4)
    if efficient:
        found["ratio_to_efficient"] = round(times["attnroute"] / times["efficient_repeated_kv"], 4)
    progress(f"{shape.name}: {found['selected']} {found['ms']} error {found['error']:.4f}")
    return found


def negative_scores(length: int, *, stock: bool) -> dict[str, Any]:
    """Every score near -120: at lengths of 64 modulo 128 cuDNN's backward gives NaN (pytorch#196678)."""
    torch.manual_seed(0)
    query = torch.zeros(1, 2, length, 64, device="cuda", dtype=torch.bfloat16)
    key = 0.1 * torch.randn(1, 2, length, 64, device="cuda").bfloat16()
    query[..., 0], key[..., 0] = 1.0, -120.0 * 8
    value = torch.randn(1, 2, length, 64, device="cuda").bfloat16()
    inputs = tuple(t.requires_grad_() for t in (query, key, value))
    out = sdpa(*inputs) if stock else attention(*inputs)
    cotangent = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, cotangent)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    reference = (wide[0] @ wide[1].mT / 8).softmax(-1) @ wide[2]
    want = torch.autograd.grad(reference, wide, cotangent.double())
    # dQ is a difference of terms as large as K, so its error is measured against those.
    size = (wide[1].abs().max() * cotangent.double().norm(dim=-1).max()).item()
    return {
        "finite": [bool(torch.isfinite(g).all()) for g in got],
        "dq_error_over_terms": ((got[0].double() - want[0]).abs().max() / size).item(),
        "dk_error": relative(got[1], want[1]),
        "dv_error": relative(got[2], want[2]),
    }


def float32_mask(*, stock: bool) -> dict[str, Any]:
    """A float32 mask beside a float16 query: cuDNN reads it in the wrong type (pytorch#191612)."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 32, 16, device="cuda").half() for _ in range(3))
    mask = torch.full((32, 32), -math.inf, device="cuda").triu(1)
    out = sdpa(query, key, value, attn_mask=mask) if stock else attention(query, key, value, mask)
    scores = query.double() @ key.double().mT * 0.25 + mask.double()
    return {"error": relative(out, scores.softmax(-1) @ value.double())}


def shifted_storage(form: str, *, stock: bool) -> dict[str, Any]:
    """Inputs that do not start, or whose rows do not start, at multiples of 16 bytes."""
    torch.manual_seed(0)

    def make() -> Tensor:
        if form == "odd_row_stride":
            return torch.randn(2, 4, 128, 65, device="cuda").bfloat16()[..., :64]
        count = 2 * 4 * 128 * 64
        return torch.randn(count + 16, device="cuda").bfloat16()[1 : count + 1].view(2, 4, 128, 64)

    query, key, value = make(), make(), make()
    out = sdpa(query, key, value) if stock else attention(query, key, value)
    scores = query.double() @ key.double().mT * 0.125
    return {"error": relative(out, scores.softmax(-1) @ value.double())}


def faults() -> dict[str, Any]:
    """Run the known faults through `attention()` and through stock, side by side."""
    found: dict[str, Any] = {}
    for who, stock in (("attnroute", False), ("stock", True)):
        for length in (192, 704):
            found[f"negative_scores_{length} {who}"] = negative_scores(length, stock=stock)
        found[f"float32_mask {who}"] = float32_mask(stock=stock)
        for form in ("odd_row_stride", "shifted_start"):
            found[f"{form} {who}"] = shifted_storage(form, stock=stock)
    for name, value in found.items():
        progress(f"{name}: {value}")
    return found


def main() -> None:
    """Run the parts that were asked for and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=("shapes", "large_heads", "faults"))
    parser.add_argument("--only", default="", help="names of shapes that contain this")
    options = parser.parse_args()
    parts = options.part or ["shapes", "large_heads", "faults"]
    results: dict[str, Any] = {}
    if "faults" in parts:
        results["faults"] = faults()
        save(options.out, results)
    for part, shapes in (("shapes", SHAPES), ("large_heads", LARGE_HEADS)):
        if part in parts:
            results[part] = {}
            for shape in shapes:
                if options.only in shape.name:
                    results[part][shape.name] = measure(shape, efficient=part == "large_heads")
                    save(options.out, results)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
