"""Tiles of flex for dense masks, dense biases and head dims above 256: milliseconds, or what was raised."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

import torch
from common import Run, progress, relative
from masks_common import DEVICE, Job, Sizes, Steps, draw, number, raised, release, timed, usable, wait
from torch import Tensor

from attnroute import attention, biases, explain, masks
from attnroute.executors.flex import run as flex
from attnroute.executors.protocol import Inputs, Plan
from attnroute.masks.lowered.form import FULL, Extent

LENGTH: Final = 4096
AT_A_TIME: Final = 4
"""Tiles that one process compiles."""

Options = tuple[tuple[str, int], ...]


def fwd(block_m: int, block_n: int, stages: int, warps: int) -> Options:
    """Return the tiles of a forward pass as options."""
    values = (block_m, block_n, stages, warps)
    return tuple(zip(("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps"), values, strict=True))


def bwd(rows: int, columns: int, stages: int, warps: int) -> Options:
    """Return the tiles of a backward pass: `rows` is what a program steps by, `columns` what it keeps."""
    names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
    values = (rows, columns, columns, rows, stages, warps)
    return tuple((f"bwd_{name}", value) for name, value in zip(names, values, strict=True))


def title(options: Options) -> str:
    """Return options as a name."""
    said = dict(options)
    parts = []
    if "fwd_BLOCK_M" in said:
        parts.append(f"fwd {said['fwd_BLOCK_M']}x{said['fwd_BLOCK_N']}")
        parts.append(f"s{said['fwd_num_stages']} w{said['fwd_num_warps']}")
    if "bwd_BLOCK_M1" in said:
        parts.append(f"bwd {said['bwd_BLOCK_M1']}x{said['bwd_BLOCK_N1']}")
        parts.append(f"s{said['bwd_num_stages']} w{said['bwd_num_warps']}")
    return " ".join(parts) or "default"


FORWARD: Final[dict[int, tuple[Options, ...]]] = {
    64: (
        (),
        fwd(128, 128, 2, 4),
        fwd(128, 128, 3, 8),
        fwd(128, 64, 3, 4),
        fwd(128, 64, 2, 4),
        fwd(128, 64, 3, 8),
        fwd(64, 128, 3, 4),
        fwd(64, 64, 3, 4),
    ),
    128: (
        (),
        fwd(128, 64, 2, 8),
        fwd(128, 64, 3, 4),
        fwd(128, 128, 2, 8),
        fwd(128, 32, 3, 8),
        fwd(64, 64, 3, 4),
        fwd(64, 64, 2, 4),
        fwd(64, 32, 3, 4),
    ),
}
"""The defaults of torch 2.13 are 128x128 s3 w4 at head_dim 64 and 128x64 s3 w8 at 128."""

TRAINED_BIAS: Final[dict[int, tuple[Options, ...]]] = {
    64: (
        fwd(128, 128, 2, 4),
        fwd(128, 64, 3, 4),
        fwd(64, 64, 3, 4),
        fwd(128, 64, 2, 4) + bwd(64, 128, 2, 8),
        fwd(128, 64, 2, 4) + bwd(64, 64, 2, 4),
        fwd(128, 64, 2, 4) + bwd(64, 64, 1, 4),
        fwd(128, 64, 2, 4) + bwd(32, 64, 2, 4),
        fwd(128, 64, 2, 4) + bwd(32, 128, 2, 8),
    ),
    128: (
        (),
        fwd(128, 64, 2, 8),
        fwd(64, 64, 2, 4),
        fwd(64, 64, 2, 4) + bwd(64, 128, 2, 8),
        fwd(64, 64, 2, 4) + bwd(64, 64, 2, 4),
        fwd(64, 64, 2, 4) + bwd(64, 64, 1, 4),
        fwd(64, 64, 2, 4) + bwd(32, 64, 2, 4),
        fwd(64, 64, 2, 4) + bwd(32, 32, 2, 4),
    ),
}
"""The default backward is bwd 64x128 s3 w8."""

WIDE: Final = tuple(
    fwd(64, 64, 1, 8) + bwd(*tiles)
    for tiles in (
        (16, 16, 1, 4),
        (16, 32, 1, 4),
        (16, 32, 1, 8),
        (16, 64, 1, 8),
        (32, 32, 1, 4),
        (32, 32, 1, 8),
        (32, 64, 1, 8),
        (32, 32, 2, 8),
    )
)
"""The default backward above head_dim 256 is bwd 16x16 s1 w4."""


class Setup(NamedTuple):
    """One call of flex.

    Attributes:
        inputs: What the executor gets.
        said: The other arguments of `attention`.
        trained: The tensors that get gradients; none in inference.
    """

    inputs: Inputs
    said: dict[str, Any]
    trained: tuple[Tensor, ...] = ()


def setup(kind: str, head_dim: int, sizes: Sizes) -> Setup:
    """Return the call of a kind: mask, bias, trained_bias or wide."""
    train = kind in ("trained_bias", "wide")
    length, width = sizes.tokens(LENGTH), sizes.head_dim(head_dim)
    heads_q, heads_kv = sizes.heads(*{"wide": (16, 8) if head_dim == 320 else (8, 4)}.get(kind, (16, 4)))
    query, key, value = (draw(1, n, length, width, train=train) for n in (heads_q, heads_kv, heads_kv))
    qkv, extent = (query, key, value), Extent(1, heads_q, length, length, query.device)
    if kind in ("mask", "wide"):
        causal = masks.Causal()
        random = torch.rand(1, 1, length, length, device=DEVICE) < 0.5
        mask = causal if kind == "wide" else masks.Dense(random)
        return Setup(Inputs(*qkv, mask.lower(FULL, extent), mask), {"mask": mask}, qkv if train else ())
    bias = draw(1, heads_q, length, length, train=train)
    trained = (*qkv, bias) if train else ()
    return Setup(Inputs(*qkv, bias=bias), {"bias": biases.Dense(bias)}, trained)


def tiles(kind: str, head_dim: int, candidates: tuple[Options, ...], sizes: Sizes) -> Steps:
    """Compile these options and compare their results, then time them beside `chunked` and what is routed."""
    case = setup(kind, head_dim, sizes)
    qkv = (case.inputs.query, case.inputs.key, case.inputs.value)
    cotangent = draw(*qkv[0].shape)
    forward: dict[str, Run] = {
        "chunked": partial(attention, *qkv, **case.said, backend="chunked"),
        "routed": partial(attention, *qkv, **case.said),
        **{title(options): partial(_flex, case, options) for options in candidates},
    }
    runs: dict[str, Run] = {
        name: partial(_results, run, case.trained, cotangent) for name, run in forward.items()
    }
    found: dict[str, Any] = {"routed_is": explain(*qkv, **case.said).selected}
    found["errors"], found["raised"] = _compared(runs)
    yield
    ready = {name: run for name, run in runs.items() if name in found["errors"]} if usable() else {}
    found["ms"] = timed(ready, rounds=1, rep=60) if ready else {}
    for name in runs:
        ms, error = found["ms"].get(name), found["errors"].get(name)
        told = found["raised"].get(name, f"{ms} ms, error {error}")
        progress(f"tiles {kind} d{head_dim} {name}: {told[:160]}")
    return found


def _compared(runs: dict[str, Run]) -> tuple[dict[str, float | str], dict[str, str]]:
    """Return the largest relative difference of each from the first that runs, and what was raised."""
    errors: dict[str, float | str] = {}
    failed: dict[str, str] = {}
    want: tuple[Tensor, ...] = ()
    for name, run in runs.items():
        if failed and not usable():
            failed[name] = "not run, as an error before it stays until the process ends"
            continue
        try:
            got = run()
            wait()
        except Exception as error:  # noqa: BLE001 - what is raised is the result
            failed[name] = raised(error)
            continue
        want = want or got
        errors[name] = number(max(relative(a, b) for a, b in zip(got, want, strict=True)))
        del got
        release()
    return errors, failed


def _flex(case: Setup, options: Options) -> Tensor:
    plan = Plan("flex", (), bool(case.trained), False, case.inputs.query.device.type, options)
    return flex.run(case.inputs, plan)[0]


def _results(run: Run, trained: tuple[Tensor, ...], cotangent: Tensor) -> tuple[Tensor, ...]:
    """Return the output, and the gradients where there are some."""
    out = run()
    return (out.detach(), *torch.autograd.grad(out, trained, cotangent)) if trained else (out,)


def tile_jobs(sizes: Sizes) -> dict[str, Job]:
    """Return jobs of a few options each."""
    asked = [("mask", d, FORWARD[d]) for d in FORWARD]
    asked += [("trained_bias", d, TRAINED_BIAS[d]) for d in TRAINED_BIAS]
    asked += [("bias", d, FORWARD[d]) for d in FORWARD]
    asked += [("wide", d, WIDE) for d in (320, 512)]
    return {
        f"{kind} d{head_dim} {start // AT_A_TIME}": partial(
            tiles, kind, head_dim, candidates[start : start + AT_A_TIME], sizes
        )
        for kind, head_dim, candidates in asked
        for start in range(0, len(candidates), AT_A_TIME)
    }
