"""Simulates training steps of Llama models on 8 to 1024 GPUs: communication, memory and time, on paper.

Attention and what it moves come from the plan that `explain --mesh` prints, other communication from the same
links and formulas. A rank checkpoints each layer, shards weights, gradients and Adam's moments over all ranks
of dp and cp (FSDP2), and has one sequence. What is gathered for the next layer is hidden behind the computing
of this one; sums over heads are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from attnroute.engine.collectives import Group, fabric_of
from attnroute.engine.mesh import Way, plan
from attnroute.errors import ArgumentError
from attnroute.question.line import parse
from attnroute.question.mesh import Mesh
from attnroute.question.policy import Policy
from attnroute.tables.cards import peak_of
from attnroute.tables.load import load
from attnroute.tables.machines import machine

CARD, TORCH = "h200", "2.11.0"
CARD_GIB = 141e9 / 2**30
"""NVIDIA H200 datasheet: 141 GB."""
SHARE_OF_PEAK = 0.7
"""Of matrix products of this size; inferred, not measured."""
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_TOKENS = 2**22
"""Of all ranks in one step: more would be another training."""
_HALF, _SINGLE = 2, 4
_STATE = 4 * _SINGLE
"""Bytes of a weight, its gradient and Adam's two moments, in float32."""
_KEPT = 8
"""Vectors of the hidden size that a layer's recompute keeps for its backward, besides heads and MLP."""


@dataclass(frozen=True)
class Model:
    """A Llama model, by its published config."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Weights of one layer."""
        return self.hidden * (2 * (self.heads + self.kv_heads) * self.head_dim + 3 * self.inner)

    @property
    def weights(self) -> int:
        """Weights of all layers, of the embedding and of the head."""
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.hidden


LLAMA_8B = Model("Llama 3 8B", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Model("Llama 3 70B", 80, 8192, 64, 8, 128, 28672, 128256)
CASES = ((LLAMA_8B, 8192), (LLAMA_70B, 8192), (LLAMA_70B, 131072))
"""What is spread: a model and the tokens of a sequence."""


@dataclass(frozen=True)
class Step:
    """One training step on one mesh.

    Attributes:
        mesh: The mesh.
        way: How tokens go: "local", "ring" or "ulysses".
        gib: Memory of one GPU.
        products_ms: Matrix products.
        attention_ms: Attention.
        waiting_ms: Communication that nothing hides.
        tokens: Of all ranks.
    """

    mesh: Mesh
    way: str
    gib: float
    products_ms: float
    attention_ms: float
    waiting_ms: float
    tokens: int

    @property
    def ms(self) -> float:
        """All of it."""
        return self.products_ms + self.attention_ms + self.waiting_ms

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.mesh.ranks / self.ms * 1e3

    @property
    def fits(self) -> bool:
        """Whether a card has as much memory; a tenth of it is left to what nobody counts."""
        return self.gib < 0.9 * CARD_GIB


def best(model: Model, seqlen: int, gpus: int) -> Step | None:
    """Return the fastest step that fits, None where none does."""
    allowed = (mesh for mesh in meshes(gpus) if mesh.dp * seqlen <= MOST_TOKENS)
    found = [step for mesh in allowed for step in steps(model, seqlen, mesh) if step.fits]
    return max(found, key=lambda step: step.tokens_per_second, default=None)


def meshes(gpus: int) -> Iterator[Mesh]:
    """Give every mesh of so many GPUs with at most 8 ranks of heads and 32 of tokens."""
    for tp in (1, 2, 4, 8):
        for cp in (1, 2, 4, 8, 16, 32):
            if gpus % (tp * cp) == 0:
                yield Mesh(tp=tp, cp=cp, dp=gpus // (tp * cp))


def steps(model: Model, seqlen: int, mesh: Mesh) -> list[Step]:
    """Return a step for each way in which tokens can go."""
    pairs = zip(
        _ways(model, seqlen, mesh.tp, mesh.cp, "train"),
        _ways(model, seqlen, mesh.tp, mesh.cp, ""),
        strict=True,
    )
    return [_step(model, seqlen, mesh, *pair) for pair in pairs if all(way.is_possible for way in pair)]


@cache
def _ways(model: Model, seqlen: int, tp: int, cp: int, phase: str) -> tuple[Way, ...]:
    """Return how attention of one sequence goes over heads and tokens."""
    sizes = f"hq{model.heads} hkv{model.kv_heads} sq{seqlen} d{model.head_dim}"
    call, tables = parse(f"bf16 b1 {sizes} causal {phase}"), load()
    host = machine(CARD, tables, argument="card", given={"torch": TORCH})
    try:
        return plan(call, Mesh(tp=tp, cp=cp), host, tables, Policy()).ways
    except ArgumentError:
        return ()


def _step(model: Model, seqlen: int, mesh: Mesh, trained: Way, again: Way) -> Step:
    tables = load()
    host = machine(CARD, tables, argument="card", given={"torch": TORCH})
    fabric, peak = fabric_of(tables, host), peak_of(tables, host)
    assert fabric is not None
    assert peak is not None
    local = seqlen // mesh.cp
    # Forward, recompute, and a backward of twice as much.
    flops = 2 * local * 4 * (model.weights - model.vocabulary * model.hidden) / mesh.tp
    products = flops / (peak.tflops * 1e12 * SHARE_OF_PEAK) * 1e3
    attention = model.layers * ((trained.attention_ms or 0.0) + (again.attention_ms or 0.0))
    heads = Group.of(fabric, mesh.tp, 1)
    # Behind attention and behind the MLP: in the forward, in the recompute, and for gradients.
    sums = 6 * heads.summed_ms(local * model.hidden * _HALF)
    shards = Group.of(fabric, mesh.dp * mesh.cp, mesh.tp)
    layer = model.layer_weights / mesh.tp
    moved = 2 * shards.gathered_ms(layer * _HALF) + shards.gathered_ms(layer * _SINGLE)
    computed = (products + attention) / model.layers
    waiting = (trained.waiting_ms or 0.0) + (again.waiting_ms or 0.0) + sums + max(0.0, moved - computed)
    return Step(
        mesh=mesh,
        way=trained.name,
        gib=_gib(model, local, mesh, trained),
        products_ms=products,
        attention_ms=attention,
        waiting_ms=model.layers * waiting,
        tokens=seqlen * mesh.dp,
    )


def _gib(model: Model, local: int, mesh: Mesh, way: Way) -> float:
    """Return the memory of one GPU: states, two gathered layers, checkpoints, one layer's tensors, logits."""
    states = _STATE * model.weights / mesh.ranks
    gathered = (2 * _HALF + _SINGLE) * model.layer_weights / mesh.tp
    checkpoints = model.layers * local * model.hidden * _HALF
    layer = local * (_KEPT * model.hidden + 3 * model.inner / mesh.tp) * _HALF + way.memory_bytes
    logits = local * model.vocabulary / mesh.tp * (_HALF + _SINGLE)
    return (states + gathered + checkpoints + layer + logits) / 2**30
