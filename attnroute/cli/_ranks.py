"""`attnroute probe --all-ranks`: what every process of a job would decide by, side by side."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Final

from attnroute._version import __version__
from attnroute.cli._terminal import columns, painted
from attnroute.errors import ArgumentError, AttnRouteError
from attnroute.question.host import Host
from attnroute.report.json import document
from attnroute.report.ranks import Rank, differences, ranks_data, render_ranks
from attnroute.settings import stated

DIFFERENT: Final = 1
_SET_BY_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COMMAND: Final = "torchrun --nproc-per-node=gpu -m attnroute probe --all-ranks"
_PATIENCE: Final = timedelta(minutes=5)
"""How long a rank waits for the others, which import every installed package before they answer."""


def all_ranks(probe: Callable[[], Host], *, as_json: bool) -> int:
    """Gather what each rank found, print it on rank 0; 1 on every rank where they differ.

    What is gathered goes over gloo and no kernel runs, so ranks are compared that could not work together.

    Args:
        probe: Returns the machine of this process.
        as_json: Print data in place of a table.

    Raises:
        ArgumentError: The process is not one of a job, or torch is not installed.
    """
    if find_spec("torch") is None:
        raise ArgumentError("--all-ranks requires torch; got an environment without it; install torch.")
    import torch.distributed as dist

    is_new = not dist.is_initialized()
    if is_new:
        _check_started()
        dist.init_process_group("gloo", timeout=_PATIENCE)
    group = None if is_new else dist.new_group(backend="gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _own(probe, dist.get_rank()), group=group)
    if dist.get_rank() == 0:
        print(document(ranks_data(found)) if as_json else painted(render_ranks(found, columns())), flush=True)
    # torchrun ends all processes when one ends with an error, and rank 0 has to print before that.
    dist.barrier(group=group)
    if is_new:
        dist.destroy_process_group()
    return DIFFERENT if differences(found) else 0


def _check_started() -> None:
    missing = [name for name in _SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        required = f"a process that torchrun started, which sets {', '.join(_SET_BY_TORCHRUN)}"
        got = f"one without {', '.join(missing)}"
        raise ArgumentError(f"--all-ranks requires {required}; got {got}; type `{_COMMAND}`.")


def _own(probe: Callable[[], Host], rank: int) -> Rank:
    """Return what this process would decide by; what keeps it from being probed is told, not raised."""
    host, problem = None, ""
    try:
        _take_device()
        host = probe()
    except (AttnRouteError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    return Rank(
        rank=rank,
        machine=platform.node(),
        attnroute=__version__,
        host=host,
        settings=stated(),
        problem=problem,
    )


def _take_device() -> None:
    """Take the GPU that torchrun means for this process, as training code does."""
    import torch

    if not torch.cuda.is_available():
        return
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        got = f"rank {local} of a machine with {count} GPUs"
        raise ArgumentError(f"--all-ranks requires a GPU for each process; got {got}; start fewer.")
    torch.cuda.set_device(local)
