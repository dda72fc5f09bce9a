"""`plan`: what one call becomes on the ranks of a mesh: local calls, decisions, bytes, times, memory.

Heads and batch rows need no communication of attention itself. Tokens do, in one of two ways: in a ring the
keys and values pass through all ranks while each computes with what it has, and Ulysses exchanges tokens for
heads. What is passed on in a ring is hidden behind the computing of the same step.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from attnroute.engine.collectives import Fabric, Group, fabric_of
from attnroute.engine.decide import decide
from attnroute.engine.decision import Decision
from attnroute.engine.quadratic import tensor_bytes
from attnroute.errors import ArgumentError
from attnroute.question import mesh as split
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.mesh import Mesh
from attnroute.question.policy import Policy
from attnroute.tables.folders import Tables
from attnroute.vocabulary import DTYPE_BYTES

WayName = Literal["local", "ring", "ulysses"]
_SUM_BYTES = 4
"""Sums of gradients that pass through a ring are float32."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(_Part):
    """One kind of attention call that a rank makes.

    Attributes:
        times: How often.
        decision: What is chosen for it.
    """

    times: int
    decision: Decision


class Part(_Part):
    """What some ranks do, all of them the same.

    Attributes:
        ranks: How many they are.
        steps: Their attention calls, in this order.
    """

    ranks: int
    steps: tuple[Step, ...]


class Transfer(_Part):
    """What one rank sends in one call.

    Attributes:
        how: "passed_on" to the next rank of a ring, "exchanged" with all, or "summed" over those that have
            the same key/value heads.
        over: The dimension of the mesh.
        ranks: How many ranks take part.
        forward_bytes: What a rank sends in the forward.
        backward_bytes: The same in the backward; 0 in inference.
        ms: The predicted time of both; None where no link is known.
    """

    how: Literal["passed_on", "exchanged", "summed"]
    over: Literal["cp", "tp"]
    ranks: int
    forward_bytes: int
    backward_bytes: int
    ms: float | None


class Way(_Part):
    """One way of spreading the call.

    Attributes:
        name: "local" where tokens stay whole, else "ring" or "ulysses".
        refused: Why it cannot be gone, a sentence; empty where it can.
        parts: What ranks do, those with the most first.
        transfers: What each of those sends.
        kv_copies: How often key/value heads are copied, so that each rank has one.
        kv_whole: The key/value heads that each rank holds, where they cannot be split as the query heads are;
            None where each holds what it reads.
        copies_heads: Then some ranks copy a key/value head for each of its query heads.
        memory_bytes: Query, key, value and output of a rank, with their gradients in training, and what is
            received beside them.
        attention_ms: Predicted time of attention of those with the most; None where it is not measured.
        waiting_ms: Predicted time of transfers in which nothing is computed.
    """

    name: WayName
    refused: str = ""
    parts: tuple[Part, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    kv_copies: int = 1
    kv_whole: int | None = None
    copies_heads: bool = False
    memory_bytes: int = 0
    attention_ms: float | None = None
    waiting_ms: float | None = None

    @property
    def is_possible(self) -> bool:
        """Whether every call of every rank can run."""
        return not self.refused and all(t.decision.selected for part in self.parts for t in part.steps)

    @property
    def ms(self) -> float | None:
        """Attention and waiting together."""
        return _sum([self.attention_ms, self.waiting_ms])


class Plan(_Part):
    """What a call becomes on a mesh.

    Attributes:
        mesh: The mesh.
        whole: What is chosen for the call on one device.
        ways: How it can be spread.
        link: The link between cards of one machine, and how many it joins; None where none is known.
        between: The link between machines, where the mesh takes more than one.
    """

    mesh: Mesh
    whole: Decision
    ways: tuple[Way, ...]
    link: tuple[str, float, int] | None = None
    between: tuple[str, float] | None = None


def plan(call: Call, mesh: Mesh, host: Host, tables: Tables, policy: Policy) -> Plan:
    """Return what a call becomes on a mesh of hosts that are all alike.

    Raises:
        ArgumentError: The parts of the call do not fit together, or a rank would have nothing to do.
        TableError: The tables are malformed or do not describe the host's architecture.
    """
    whole = decide(call, host, tables, policy)
    planner = _Planner(mesh, host, tables, policy, fabric_of(tables, host))
    found = split.shares(call, mesh)
    names: tuple[WayName, ...] = ("ring", "ulysses") if mesh.cp > 1 else ("local",)
    fabric = planner.fabric
    spans = fabric is not None and mesh.ranks > fabric.gpus
    return Plan(
        mesh=mesh,
        whole=whole,
        ways=tuple(planner.way(name, found) for name in names),
        link=None if fabric is None else (fabric.inside.title, fabric.inside.gbs, fabric.gpus),
        between=(fabric.between.title, fabric.between.gbs) if fabric is not None and spans else None,
    )


class _Planner:
    def __init__(self, mesh: Mesh, host: Host, tables: Tables, policy: Policy, fabric: Fabric | None) -> None:
        self.mesh, self.host, self.tables, self.policy, self.fabric = mesh, host, tables, policy, fabric

    def way(self, name: WayName, found: list[split.Share]) -> Way:
        """Return one way; what it cannot split refuses it."""
        try:
            return self._way(name, found)
        except ArgumentError as error:
            return Way(name=name, refused=str(error))

    def _way(self, name: WayName, found: list[split.Share]) -> Way:
        cp, most, copies = self.mesh.cp, found[0], 1
        if name == "ring":
            steps = [split.ring(share.call, cp) for share in found]
        elif name == "ulysses":
            cut = [split.ulysses(share.call, cp) for share in found]
            copies, steps = cut[0][1], [[split.Step(call, 1)] for call, _ in cut]
        else:
            steps = [[split.Step(share.call, 1)] for share in found]
        parts = tuple(
            Part(ranks=share.ranks, steps=tuple(map(self._decided, its)))
            for share, its in zip(found, steps, strict=True)
        )
        tokens = {"ring": self._passed_on, "ulysses": self._exchanged}.get(name)
        moved = [] if tokens is None else [tokens(most.call, copies)]
        sums = self._summed(most)
        attention = _sum([_ms(step.decision, step.times) for step in parts[0].steps])
        return Way(
            name=name,
            parts=parts,
            transfers=(*moved, *sums),
            kv_copies=copies,
            kv_whole=most.kv_whole,
            copies_heads=any(share.copies_heads for share in found),
            memory_bytes=self._held(name, most, copies),
            attention_ms=attention,
            waiting_ms=_sum([self._waited(one, attention) for one in (*moved, *sums)]),
        )

    def _decided(self, step: split.Step) -> Step:
        return Step(times=step.times, decision=decide(step.call, self.host, self.tables, self.policy))

    def _waited(self, transfer: Transfer, attention_ms: float | None) -> float | None:
        """Return the time in which a rank waits for a transfer: of a ring what its steps do not hide."""
        if transfer.how != "passed_on" or transfer.ms is None:
            return transfer.ms
        if attention_ms is None:
            return None
        return max(0.0, transfer.ms - attention_ms * (transfer.ranks - 1) / transfer.ranks)

    def _held(self, name: WayName, share: split.Share, copies: int) -> int:
        """Return the bytes of a rank's own tensors, of their gradients, and of what comes beside them."""
        call = share.call
        cp, trains = self.mesh.cp, call.phase == "training"
        own, keys = tensor_bytes(call) // cp, key_bytes(call) // cp
        # What is read of whole keys is a view of them, unless heads are copied.
        besides = 0 if share.kv_whole is None else key_bytes(_all_keys(share)) // cp
        besides -= keys if besides and not share.copies_heads else 0
        total = (own + besides) * (2 if trains else 1)
        if name == "ring":
            return total + keys + (_sums(call) // cp if trains else 0)
        if name == "ulysses":
            return total + (own + keys * (copies - 1)) * (2 if trains else 1)
        return total

    def _passed_on(self, call: Call, _: int) -> Transfer:
        """Return what a ring moves: keys and values, in the backward also the sums of their gradients."""
        cp, trains = self.mesh.cp, call.phase == "training"
        keys, sums = key_bytes(call) // cp, _sums(call) // cp if trains else 0
        group, ms = self._group("cp", cp), None
        if group is not None:
            ms = (cp - 1) * group.passed_on_ms(keys) * (2 if trains else 1) + cp * group.passed_on_ms(sums)
        return Transfer(
            how="passed_on",
            over="cp",
            ranks=cp,
            forward_bytes=keys * (cp - 1),
            backward_bytes=keys * (cp - 1) + sums * cp if trains else 0,
            ms=ms,
        )

    def _exchanged(self, call: Call, copies: int) -> Transfer:
        """Return what Ulysses moves: the inputs at once, then the output; their gradients likewise."""
        cp, trains = self.mesh.cp, call.phase == "training"
        keys = key_bytes(call) // cp
        queries = tensor_bytes(call) // cp - keys
        output = queries * call.head_dim_v // (call.head_dim_qk + call.head_dim_v)
        inputs = queries - output + keys * copies
        sent = (inputs + output) * (cp - 1) // cp
        group, ms = self._group("cp", cp), None
        if group is not None:
            ms = (group.exchanged_ms(inputs) + group.exchanged_ms(output)) * (2 if trains else 1)
        return Transfer(
            how="exchanged",
            over="cp",
            ranks=cp,
            forward_bytes=sent,
            backward_bytes=sent if trains else 0,
            ms=ms,
        )

    def _summed(self, share: split.Share) -> list[Transfer]:
        """Return the sum of gradients of key/value heads that several ranks read, where there is one."""
        if share.readers == 1 or share.call.phase != "training":
            return []
        size, group = key_bytes(_all_keys(share)) // self.mesh.cp, self._group("tp", share.readers)
        transfer = Transfer(
            how="summed",
            over="tp",
            ranks=share.readers,
            forward_bytes=0,
            backward_bytes=2 * size * (share.readers - 1) // share.readers,
            ms=None if group is None else group.summed_ms(size),
        )
        return [transfer]

    def _group(self, over: Literal["cp", "tp"], size: int) -> Group | None:
        """Return the ranks that communicate over one dimension; those of tp lie side by side."""
        if self.fabric is None:
            return None
        return Group.of(self.fabric, size, self.mesh.tp if over == "cp" else 1)


def _all_keys(share: split.Share) -> Call:
    """Return a call with the key/value heads that a rank holds, of which it may read some."""
    held = share.kv_whole
    return share.call if held is None else share.call.changed(num_heads_kv=held, num_heads_q=held)


def key_bytes(call: Call) -> int:
    """Return the bytes of key and value."""
    width = call.num_heads_kv * (call.head_dim_qk + call.head_dim_v)
    return call.batch * call.seqlen_kv * width * DTYPE_BYTES[call.dtype]


def _sums(call: Call) -> int:
    """Return the bytes of the gradients of key and value while they are summed."""
    return key_bytes(call) // DTYPE_BYTES[call.dtype] * _SUM_BYTES


def _ms(decision: Decision, count: int) -> float | None:
    found = None if decision.selected is None else decision.verdict(decision.selected).predicted_ms
    return None if found is None else found * count


def _sum(times: list[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None
