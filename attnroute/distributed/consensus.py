"""Consensus: the processes of a mesh compare what each would run, before a kernel or a collective can hang.

It communicates, so it is done at the first call of a kind and only where ATTNROUTE_CONSENSUS asks for it.
Every process must come to it: the variable is set for all of them or for none.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnroute.biases import Bias
from attnroute.distributed.call_tensors import changed
from attnroute.errors import ConsensusError
from attnroute.masks.tracing import is_traced, size_hint
from attnroute.memory import Memory
from attnroute.question.line import render
from attnroute.settings import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from attnroute.api.records import Given
    from attnroute.distributed.context import Sharding
    from attnroute.engine.decision import Decision
    from attnroute.question.call import Call
    from attnroute.question.host import Host

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


def seek(given: Given, local: Given, decide: Callable[[Given], Decision], *, takes_part: bool) -> None:
    """Compare what the processes of a mesh would run, at the first call of a kind.

    Args:
        given: The call on DTensors.
        local: The part of this process, on plain tensors.
        decide: Decides about such a part.
        takes_part: Something is left for this process.

    Raises:
        ConsensusError: Two processes differ; all of them raise it.
    """
    mesh = cast("DTensor", given.query).device_mesh
    # A tracer sends no tensors, and the same call compiled may be decided otherwise.
    traced = is_traced(local.query)
    call = ("compiled " if traced else "") + _text(given)
    if mesh.get_coordinate() is None or _AGREED.get((mesh, call)):
        return
    if not takes_part:
        # Where nothing is left to decide about, the machine is compared all the same.
        query, key, value = (t.new_empty([max(n, 1) for n in t.shape]) for t in local[:3])
        local = type(given)(query, key, value)
    decision = decide(local)
    runs = ((decision.selected or "none"), render(decision.call)) if takes_part else ("", "")
    own = _ballot(decision.host, call, *runs)
    _compare(lambda: _gathered(mesh, own), "on DTensors", traced=traced)
    _AGREED.put((mesh, call), True)


def seek_among(
    sharding: Sharding, given: Given, host: Host, runs: Sequence[tuple[str, Call]], *, traced: bool
) -> None:
    """Compare what the ranks of `context_parallel()` would run, at the first call of a kind.

    Args:
        sharding: The ranks.
        given: The call on the tokens of this rank.
        host: Its machine.
        runs: The backend and the call of each kind of step.
        traced: The call is that of a tracer.

    Raises:
        ConsensusError: Two ranks differ; all of them raise it.
    """
    call = ("compiled " if traced else "") + _text(given)
    if sharding.size == 1 or _AGREED.get((sharding.name, call)):
        return
    backends = " and ".join(sorted({backend for backend, _ in runs}))
    own = _ballot(host, call, backends, ", ".join(render(step) for _, step in runs))

    def gather() -> list[Ballot]:
        found = [own] * sharding.size
        dist.all_gather_object(found, own, group=sharding.group)
        return found

    _compare(gather, "inside of context_parallel()", traced=traced)
    _AGREED.put((sharding.name, call), True)


def _ballot(host: Host, call: str, backend: str, local: str) -> Ballot:
    return Ballot(
        dist.get_rank(),
        host.versions,
        f"{host.device_name} ({host.arch})",
        {name: os.environ[name] for name in _COMPARED if name in os.environ},
        call,
        backend,
        local,
    )


def _compare(gather: Callable[[], list[Ballot]], where: str, *, traced: bool) -> None:
    """Raise a ConsensusError where processes differ; no tracer sees what is sent."""
    difference = difference_of(_in_a_thread(gather) if traced else gather(), where)
    if difference is not None:
        raise ConsensusError(difference)


def _text(given: Given) -> str:
    """Return a call on DTensors as text, which is the same on each process that makes it."""
    words = []

    def tell(name: str, value: Any, _: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            placed = list(value.placements) if isinstance(value, DTensor) else "plain"
            trains = ", trained" if value.requires_grad and torch.is_grad_enabled() else ""
            words.append(f"{name} {value.dtype} {tuple(map(size_hint, value.shape))} {placed}{trains}")
        return value

    changed(given, tell)
    defaults = given._field_defaults
    for name, value in zip(given._fields, given, strict=True):
        if not isinstance(value, Tensor | Bias) and name in defaults and value != defaults[name]:
            words.append(f"{name}={value}")
    return ", ".join(words)


def difference_of(ballots: Sequence[Ballot], where: str = "on DTensors") -> str | None:
    """Return the first thing in which a process differs from most, as a sentence; None where all agree."""
    said = _difference(ballots)
    if said is None:
        return None
    required, got, to_do = said
    return f"attention() {where} requires {required} on all processes of the mesh; got {got}; {to_do}."


def _difference(ballots: Sequence[Ballot]) -> tuple[str, str, str] | None:
    """Return what is required, what the processes say, and what to do; None where all agree."""
    for name in sorted({name for ballot in ballots for name in ballot.software}):
        said = _different(ballots, [ballot.software.get(name, "none") for ballot in ballots])
        if said:
            return (f"one version of {name}", said, "install the same everywhere")
    if said := _different(ballots, [ballot.card for ballot in ballots]):
        return ("cards of one kind", said, "keep a mesh on one kind")
    for name in sorted({name for ballot in ballots for name in ballot.environment}):
        said = _different(ballots, [ballot.environment.get(name, "unset") for ballot in ballots])
        if said:
            return (f"one value of {name}", said, "set it for all processes")
    if said := _different(ballots, [ballot.call for ballot in ballots]):
        return ("the same call", said, "see which process took another branch")
    part = [ballot for ballot in ballots if ballot.backend]
    if said := _different(part, [ballot.backend for ballot in part]):
        lines = _different(part, [ballot.local for ballot in part])
        but = f"; the local calls differ too: {lines}" if lines else ""
        return ("one backend", f"{said}{but}", "pass backend=, or shard evenly")
    return None


def _different(ballots: Sequence[Ballot], values: Sequence[str]) -> str:
    """Return what the first process says that differs from most, and what these say."""
    if len(set(values)) <= 1:
        return ""
    most = Counter(values).most_common(1)[0][0]
    odd = next(at for at, value in enumerate(values) if value != most)
    return f"{values[odd]} on rank {ballots[odd].rank}, {most} on rank {ballots[values.index(most)].rank}"


def _gathered(mesh: DeviceMesh, own: Ballot) -> list[Ballot]:
    """Gather along one dimension of the mesh after the other, in the groups that it has."""
    ballots = [own]
    for at in range(mesh.ndim):
        found: list[list[Ballot]] = [[] for _ in range(mesh.size(at))]
        dist.all_gather_object(found, ballots, group=mesh.get_group(at))
        ballots = [ballot for part in found for ballot in part]
    return ballots


def _in_a_thread(gather: Callable[[], list[Ballot]]) -> list[Ballot]:
    """Gather where no tracer sees it: modes belong to a thread, and so does the current device."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def gathered() -> list[Ballot]:
        if device is not None:
            torch.cuda.set_device(device)
        return gather()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(gathered).result()
