"""Padded rows and ragged batches: FLASH without the padding beside kernels that read a mask and stock.

python benchmarks/ragged.py --out results.json [--part padding] [--part left] [--part decode] [--part thd]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Run, kernels_of, peak_extra_bytes, progress, relative, save, side_by_side
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnroute import attention, explain, masks

BACKENDS = ("flash", "cudnn", "efficient")
FILLS = (0.25, 0.5, 0.75, 1.0)
SAMPLED_ROWS = 64
ROUNDS = 3
LENGTHS = (*(64 * n for n in range(1, 16)), 512)
"""Of the sequences of layout thd: 16 that have 8192 tokens together."""


class Shape(NamedTuple):
    """Batch rows whose keys are padded at one side; causal where the padding is on the left."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    side: str = "right"
    is_causal: bool = False
    train: bool = False


PADDING = (
    Shape("bert_512_train", 32, 12, 12, 512, 512, 64, train=True),
    Shape("bert_512", 32, 12, 12, 512, 512, 64),
    Shape("gqa_4k_train", 8, 32, 8, 4096, 4096, 128, train=True),
    Shape("gqa_4k", 8, 32, 8, 4096, 4096, 128),
)
LEFT = (
    Shape("left_prefill_4k", 4, 32, 8, 4096, 4096, 128, "left", is_causal=True),
    Shape("left_train_4k", 4, 32, 8, 4096, 4096, 128, "left", is_causal=True, train=True),
)
DECODE = (
    Shape("left_decode_8k", 8, 32, 8, 1, 8192, 128, "left"),
    Shape("right_decode_8k", 8, 32, 8, 1, 8192, 128),
    Shape("left_decode_8k_b64", 64, 32, 8, 1, 8192, 128, "left"),
)
PARTS = {"padding": PADDING, "left": LEFT, "decode": DECODE}


class Case(NamedTuple):
    """One measured call.

    Attributes:
        inputs: Query, key and value as `attention` takes them.
        ours: Its other arguments.
        allowed: Who may attend, as a bool tensor that a user builds for stock.
        train: Forward and backward are timed, else the forward.
        is_packed: The inputs are those of layout thd.
    """

    name: str
    inputs: tuple[Tensor, Tensor, Tensor]
    ours: dict[str, Any]
    allowed: Tensor
    train: bool
    is_packed: bool = False

    def padded(self) -> tuple[Tensor, ...]:
        """Return query, key and value as stock takes them."""
        return tuple(t.transpose(0, 1)[None] for t in self.inputs) if self.is_packed else self.inputs


def draw(*sizes: tuple[int, ...], train: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return random bfloat16 query, key and value of these shapes."""
    query, key, value = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=train) for size in sizes
    )
    return query, key, value


def padded_case(shape: Shape, fill: float) -> Case:
    """Return a padded batch whose rows have `fill` of the keys on average, between nothing and all."""
    low, high = max(0.0, 2 * fill - 1), min(1.0, 2 * fill)
    spread = torch.linspace(low, high, shape.batch)[torch.randperm(shape.batch)]
    counts = (spread * shape.seqlen_kv).round().long().clamp(min=1).cuda()
    places = torch.arange(shape.seqlen_kv, device="cuda")
    if shape.side == "right":
        mask, kept = masks.KeyPadding(lengths=counts), places < counts[:, None]
    else:
        mask = masks.KeyPadding(left=shape.seqlen_kv - counts)
        kept = places >= shape.seqlen_kv - counts[:, None]
    allowed = kept[:, None, None]
    ours: dict[str, Any] = {"mask": mask}
    if shape.is_causal:
        ours["is_causal"] = True
        allowed = allowed & (places <= places[:, None])
    kv = (shape.batch, shape.heads_kv, shape.seqlen_kv, shape.head_dim)
    query = (shape.batch, shape.heads_q, shape.seqlen_q, shape.head_dim)
    return Case(f"{shape.name} {fill}", draw(query, kv, kv, train=shape.train), ours, allowed, shape.train)


def packed_cases() -> Iterator[Case]:
    """Yield the sequences of layout thd, with and without causal, in both phases."""
    sums = torch.tensor([0, *accumulate(LENGTHS)], device="cuda", dtype=torch.int32)
    total, longest = sum(LENGTHS), max(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
    same = sequence[:, None] == sequence
    for is_causal in (True, False):
        for train in (True, False):
            inputs = draw((total, 32, 128), (total, 8, 128), (total, 8, 128), train=train)
            ours = {"layout": "thd", "cu_seqlens_q": sums, "max_seqlen_q": longest, "is_causal": is_causal}
            name = f"thd_8k{'_causal' if is_causal else ''}{'_train' if train else ''}"
            yield Case(name, inputs, ours, same.tril() if is_causal else same, train, is_packed=True)


def stock(case: Case) -> Tensor:
    """Run scaled_dot_product_attention on the dense mask."""
    query, key, value = case.padded()
    is_gqa = query.shape[1] != key.shape[1]
    return sdpa(query, key, value, attn_mask=case.allowed, enable_gqa=is_gqa)


def forwards(case: Case) -> dict[str, Run]:
    """Return the forward pass of each backend that may run the case, and of stock."""
    runs: dict[str, Run] = {}
    for backend in BACKENDS:
        if explain(*case.inputs, **case.ours, backend=backend).selected == backend:
            runs[backend] = partial(attention, *case.inputs, **case.ours, backend=backend)
    runs["stock"] = partial(stock, case)
    return runs


def passes(case: Case, forward: Run) -> Run:
    """Return the forward pass, with the backward pass where the case trains."""
    if not case.train:
        return forward
    cotangent = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), case.inputs, cotangent)


def row_error(case: Case, out: Tensor) -> float:
    """Compare some rows of the last head of the last batch row with float64; rows with no key are zeros."""
    query, key, value = (t.detach()[-1, -1].double() for t in case.padded())
    allowed = case.allowed.expand(*case.allowed.shape[:-2], query.shape[0], -1)
    allowed = allowed[-1, -1] if allowed.dim() == 4 else allowed
    rows = torch.linspace(0, query.shape[0] - 1, min(SAMPLED_ROWS, query.shape[0]), device="cuda").long()
    scores = (query[rows] @ key.T * query.shape[-1] ** -0.5).masked_fill(~allowed[rows], -math.inf)
    return relative(out[-1, -1][rows], scores.softmax(-1).nan_to_num(0.0) @ value)


def outcome(case: Case, name: str, run: Run) -> float | str:
    """Return the error of one output, rounded, or why there is none."""
    try:
        out = run().detach()
        passes(case, run)()
    except torch.OutOfMemoryError:
        return "out of memory"
    packed = case.is_packed and name != "stock"
    error = row_error(case, out.transpose(0, 1)[None] if packed else out)
    return round(error, 5) if math.isfinite(error) else "nonfinite"


def measure(case: Case) -> dict[str, Any]:
    """Time one case on every backend that may run it, and hold each output against float64."""
    runs = forwards(case)
    errors = {name: outcome(case, name, run) for name, run in runs.items()}
    timed = {name: passes(case, run) for name, run in runs.items() if errors[name] != "out of memory"}
    decision = explain(*case.inputs, **case.ours)
    found = {
        "selected": decision.selected,
        "repairs": {name: list(decision.verdict(name).repairs) for name in runs if name != "stock"},
        "kernels": {name: kernels_of(run) for name, run in timed.items()},
        "error": errors,
        "extra_MiB": {name: round(peak_extra_bytes(run) / 2**20) for name, run in timed.items()},
        "ms": {name: round(ms, 4) for name, ms in side_by_side(timed, rounds=ROUNDS).items()},
    }
    progress(f"{case.name}: {found['ms']} errors {errors}")
    return found


def cases_of(part: str) -> Iterator[Case]:
    """Yield the cases of a part."""
    if part == "thd":
        yield from packed_cases()
        return
    for shape in PARTS[part]:
        for fill in FILLS:
            yield padded_case(shape, fill)


def main() -> None:
    """Measure the parts that were asked for and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=(*PARTS, "thd"))
    parser.add_argument("--only", default="", help="names of cases that contain this")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for part in options.part or (*PARTS, "thd"):
        results[part] = {}
        torch.manual_seed(0)
        for case in cases_of(part):
            if options.only in case.name:
                results[part][case.name] = measure(case)
                save(options.out, results)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
