"""`context_parallel()`: a block in which query, key and value of a call are one rank's part of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from attnroute import scopes
from attnroute.errors import ArgumentError, argument_error
from attnroute.memory import Memory
from attnroute.question.policy import Policy
from attnroute.settings import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

Method = Literal["ring", "ulysses"]
_METHODS = ("ring", "ulysses")
_KEPT = 64
_ALIKE_KEPT = 4096


class Sharding(NamedTuple):
    """How sequences are spread over ranks.

    Attributes:
        group: The ranks.
        size: How many.
        rank: This one's place among them.
        method: The only way that calls may go; None = the ring where it has a kernel, else Ulysses.
        load_balance: Rank r of n holds chunks r and 2n - 1 - r of 2n, in this order ("head-tail"), so that
            all have the same to do under a causal mask; else chunk r of n.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    method: Method | None
    load_balance: bool

    @property
    def name(self) -> str:
        """What it is called in settings: equal for equal ones, so that graphs of torch.compile fit them."""
        order = "head-tail" if self.load_balance else "in order"
        way = self.method or "ring or ulysses"
        return f"{way} over {self.size} ranks (group {self.group.group_name}), tokens {order}"

    @property
    def chunks(self) -> int:
        """Into how many equal chunks a sequence is cut."""
        return 2 * self.size if self.load_balance else self.size

    @property
    def order(self) -> list[int]:
        """The chunks in the order in which the ranks hold them, rank after rank."""
        if not self.load_balance:
            return list(range(self.size))
        return [chunk for rank in range(self.size) for chunk in (rank, self.chunks - 1 - rank)]


_SHARDINGS: Memory[str, Sharding] = Memory(
    _KEPT, f"{__name__}._SHARDINGS", "when a process group of the same name is made: the next block says so"
)


_ALIKE: Memory[object, bool] = Memory(
    _ALIKE_KEPT, f"{__name__}._ALIKE", "never: the shapes that the ranks compared are part of the key"
)


def check_alike(sharding: Sharding, shapes: tuple[tuple[int, ...], ...], way: str) -> None:
    """Have the ranks compare the shapes of a call and the way that it goes, at the first such call.

    Messages of other sizes than the next rank expects would end in wrong numbers or never.

    Args:
        sharding: The ranks.
        shapes: Of query, key and value.
        way: How this rank would go on.

    Raises:
        ArgumentError: They differ; all ranks raise it.
    """
    if sharding.size == 1 or _ALIKE.get((sharding.name, shapes, way)):
        return
    found: list[tuple[tuple[tuple[int, ...], ...], str]] = [(shapes, way)] * sharding.size
    dist.all_gather_object(found, (shapes, way), group=sharding.group)
    to_do = f"pad sequences to a multiple of {sharding.chunks} tokens, and make the same calls everywhere"
    for at, name in enumerate(("query", "key", "value")):
        if got := _different([shapes[at] for shapes, _ in found]):
            raise argument_error(
                name, "the same (batch, num_heads, tokens, head_dim) on each rank", got, to_do
            )
    if got := _different([way for _, way in found]):
        to_do = "use one environment, and make the same calls everywhere"
        raise argument_error("context_parallel", "the same way on each rank", got, to_do)
    _ALIKE.put((sharding.name, shapes, way), True)


def _different(said: Sequence[object]) -> str:
    """Return what the first rank says and one that says something else; nothing where all say the same."""
    odd = next((rank for rank, one in enumerate(said) if one != said[0]), None)
    return "" if odd is None else f"{said[0]} on rank 0 of {len(said)}, {said[odd]} on rank {odd}"


def sharding_of(name: str) -> Sharding:
    """Return what `Policy.context_parallel` names.

    Raises:
        ArgumentError: It was forgotten, as in a recompute after `attnroute.reset()`.
    """
    found = _SHARDINGS.get(name)
    if found is None:
        to_do = "run the whole step without attnroute.reset() in it, or enter the block again"
        raise argument_error("context_parallel", "a block that was entered in this process", name, to_do)
    return found


def named(sharding: Sharding) -> str:
    """Return the name of a sharding, under which `sharding_of` finds it."""
    _SHARDINGS.put(sharding.name, sharding)
    return sharding.name


class ContextParallel(scopes.Stating):
    """What `context_parallel()` returns."""

    maker = "distributed.context_parallel"

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        stated = {"context_parallel": named(sharding), "origin": {"context_parallel": f"{self.maker}()"}}
        super().__init__(Policy.model_validate(stated), environment)

    def __enter__(self) -> Self:
        named(self._sharding)
        self.enter()
        return self

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that every rank has whole.

        Everything that has an entry per token is cut so: tokens or hidden states, positions and position
        embeddings, labels.

        Args:
            tensor: The whole.
            dim: Its dimension of tokens, whose size must be a multiple of the ranks' number, with
                `load_balance` of twice that number.

        Returns:
            The rank's tokens in the order in which it holds them: a view where that is one chunk. A gradient
            of the whole is zero outside of the part.

        Raises:
            ArgumentError: The tokens cannot be cut into equal parts.
        """
        self._used = True
        size, of = tensor.shape[dim], self._sharding
        if size % of.chunks:
            raise _uneven("tensor", f"{size} tokens", of)
        parts = tensor.chunk(of.chunks, dim)
        own = of.order[of.rank * of.chunks // of.size : (of.rank + 1) * of.chunks // of.size]
        return parts[own[0]] if len(own) == 1 else torch.cat([parts[chunk] for chunk in own], dim)

    def unshard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the whole tensor of which each rank has a part, in the order of the sequence.

        Args:
            tensor: This rank's part, of the same shape on each rank.
            dim: Its dimension of tokens.

        Returns:
            The whole, on each rank, without a gradient.
        """
        of, own = self._sharding, tensor.detach().contiguous()
        held = [torch.empty_like(own) for _ in range(of.size)]
        dist.all_gather(held, own, group=of.group)
        parts = [part for whole in held for part in whole.chunk(of.chunks // of.size, dim)]
        return torch.cat([parts[of.order.index(chunk)] for chunk in range(of.chunks)], dim)


scopes.outside_of_graphs(ContextParallel.__enter__)


def context_parallel(
    mesh: DeviceMesh, *, method: Method | None = None, load_balance: bool = False
) -> ContextParallel:
    """Have each call inside a block attend over sequences whose tokens are spread over ranks.

    Inside of ``with context_parallel(mesh):`` query, key and value of `attention()`, and of torch's
    scaled_dot_product_attention inside of `route_sdpa()`, are the tokens of this rank: each rank of the mesh
    makes the same call with as many tokens. Masks, windows and biases speak of the whole sequence. The output
    and the gradients of query, key and value are those of the rank's tokens, as one process would have them.
    A tensor that is the same on all ranks (a sink, slopes, a bias) gets this rank's share of its gradient, as
    parameters do: sum them over the mesh.

    Causal and full calls go round a ring: keys and values pass from rank to rank, one kernel attends to each
    part, forward and backward, and the outputs are merged by their log-sum-exp in float32. All other calls
    (windows, documents, padding, biases, sinks, softcap, dropout) exchange tokens for heads before and after
    (Ulysses), and run as on one rank: the number of query heads must then be a multiple of the ranks' number.

    The backward pass may run outside of the block; recomputes of checkpoints find it by themselves. The block
    is a decorator too. Inside of torch's own ``context_parallel`` calls of `attention()` go the same ways,
    over its mesh.

    Args:
        mesh: A mesh of one dimension: ``mesh["cp"]`` of a larger one.
        method: "ring" or "ulysses": the only way that calls may go. None = the ring where it has a kernel for
            the call, else Ulysses.
        load_balance: Rank r of n holds chunks r and 2n - 1 - r of 2n, as ``block.shard(tensor, dim)`` and
            torch's ``context_parallel`` cut sequences ("head-tail"): under a causal mask all have the same to
            do. False = each holds one chunk, in the order of the sequence.

    Returns:
        The block, whose `shard` and `unshard` cut and join tensors.

    Raises:
        ArgumentError: The mesh has several dimensions, or another argument is none of the above.

    Warns:
        OverrideWarning: What was returned is dropped unused.
    """
    if not (method is None or method in _METHODS):
        raise argument_error("method", 'None, "ring" or "ulysses"', repr(method), "pass one of them")
    if not isinstance(load_balance, bool):
        raise argument_error("load_balance", "True or False", repr(load_balance), "pass one of them")
    return ContextParallel(sharding_on(mesh, method=method, load_balance=load_balance))


scopes.outside_of_graphs(context_parallel)


def sharding_on(mesh: DeviceMesh, *, method: Method | None, load_balance: bool) -> Sharding:
    """Return how sequences are spread over the ranks of a mesh.

    Raises:
        ArgumentError: The mesh has several dimensions.
    """
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        got, name = f"{mesh.ndim} ({', '.join(names) if names else 'unnamed'})", names[-1] if names else "cp"
        raise argument_error("mesh", "one dimension", got, f'pass that of the tokens: mesh["{name}"]')
    group = mesh.get_group()
    return Sharding(group, mesh.size(), dist.get_rank(group), method, load_balance)


def _uneven(argument: str, got: str, sharding: Sharding) -> ArgumentError:
    required = f"a multiple of {sharding.chunks} tokens over {sharding.size} ranks"
    order = " with load_balance" if sharding.load_balance else ""
    return argument_error(argument, f"{required}{order}", got, "pad the sequence")
