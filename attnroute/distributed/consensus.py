"""Consensus: the processes of a mesh compare what each would run, before a kernel or a collective can hang.

It communicates, so it is done at the first call of a kind and only where ATTNROUTE_CONSENSUS asks for it.
Every process must come to it: the variable is set for all of them or for none.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.distributed as dist

from attnroute.errors import ConsensusError
from attnroute.memory import Memory
from attnroute.question.line import render
from attnroute.settings import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from attnroute.engine.decision import Decision

_KEPT: Final = 4096
_COMPARED: Final = tuple(name for name in VARIABLES if name != "ATTNROUTE_EXPLAIN")
"""Variables that may change what runs."""
_AGREED: Memory[object, bool] = Memory(_KEPT, f"{__name__}._AGREED", "never: what was compared is read once")
"""Kinds of calls about which the processes agreed, by mesh."""


class Ballot(NamedTuple):
    """What one process says about a call.

    Attributes:
        rank: Its global rank.
        software: Its libraries, with versions.
        card: Its device.
        environment: Its variables `ATTNROUTE_*`.
        call: The call on DTensors, as text.
        backend: What it would run; "" where no part of the call is left for it.
        local: Its part of the call, as a line.
    """

    rank: int
    software: dict[str, str]
    card: str
    environment: dict[str, str]
    call: str
    backend: str
    local: str


def is_new(mesh: DeviceMesh, call: str) -> bool:
    """Return whether the processes of a mesh have not agreed about such calls yet."""
    return _AGREED.get((mesh, call)) is None


def reach(mesh: DeviceMesh, call: str, decision: Decision, *, takes_part: bool, traced: bool) -> None:
    """Compare what the processes of a mesh would run.

    Args:
        mesh: The mesh.
        call: The call on DTensors, as text.
        decision: What was decided for the part of this process.
        takes_part: Part of the call is left for this process; else the decision is about somebody else's.
        traced: A tracer is active, in whose thread no tensor can be sent.

    Raises:
        ConsensusError: Two processes differ; all of them raise it.
    """
    host = decision.host
    own = Ballot(
        dist.get_rank(),
        host.versions,
        f"{host.device_name} ({host.arch})",
        {name: os.environ[name] for name in _COMPARED if name in os.environ},
        call,
        (decision.selected or "none") if takes_part else "",
        render(decision.call) if takes_part else "",
    )
    ballots = _in_a_thread(mesh, own) if traced else _gathered(mesh, own)
    difference = difference_of(ballots)
    if difference is not None:
        raise ConsensusError(difference)
    _AGREED.put((mesh, call), True)


def difference_of(ballots: Sequence[Ballot]) -> str | None:
    """Return the first thing in which a process differs from most, as a sentence; None where all agree."""
    for name in sorted({name for ballot in ballots for name in ballot.software}):
        said = _different(ballots, [ballot.software.get(name, "none") for ballot in ballots])
        if said:
            return _sentence(f"one version of {name}", said, "install the same everywhere")
    if said := _different(ballots, [ballot.card for ballot in ballots]):
        return _sentence("cards of one kind", said, "keep a mesh on one kind")
    for name in sorted({name for ballot in ballots for name in ballot.environment}):
        said = _different(ballots, [ballot.environment.get(name, "unset") for ballot in ballots])
        if said:
            return _sentence(f"one value of {name}", said, "set it for all processes")
    if said := _different(ballots, [ballot.call for ballot in ballots]):
        return _sentence("the same call", said, "see which process took another branch")
    part = [ballot for ballot in ballots if ballot.backend]
    if said := _different(part, [ballot.backend for ballot in part]):
        lines = _different(part, [ballot.local for ballot in part])
        but = f"; the local calls differ too: {lines}" if lines else ""
        return _sentence("one backend", f"{said}{but}", "pass backend=, or shard evenly")
    return None


def _different(ballots: Sequence[Ballot], values: Sequence[str]) -> str:
    """Return what the first process says that differs from most, and what these say."""
    if len(set(values)) <= 1:
        return ""
    most = Counter(values).most_common(1)[0][0]
    odd = next(at for at, value in enumerate(values) if value != most)
    return f"{values[odd]} on rank {ballots[odd].rank}, {most} on rank {ballots[values.index(most)].rank}"


def _sentence(required: str, said: str, to_do: str) -> str:
    return f"attention() on DTensors requires {required} on all processes of the mesh; got {said}; {to_do}."


def _gathered(mesh: DeviceMesh, own: Ballot) -> list[Ballot]:
    """Gather along one dimension of the mesh after the other, in the groups that it has."""
    ballots = [own]
    for at in range(mesh.ndim):
        found: list[list[Ballot]] = [[] for _ in range(mesh.size(at))]
        dist.all_gather_object(found, ballots, group=mesh.get_group(at))
        ballots = [ballot for part in found for ballot in part]
    return ballots


def _in_a_thread(mesh: DeviceMesh, own: Ballot) -> list[Ballot]:
    """Gather where no tracer sees it: modes belong to a thread, and so does the current device."""
    device = torch.cuda.current_device() if mesh.device_type == "cuda" else None

    def gathered() -> list[Ballot]:
        if device is not None:
            torch.cuda.set_device(device)
        return _gathered(mesh, own)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(gathered).result()
