"""Calls on DTensors that repeat an earlier one but for values: to local tensors and back in few steps.

What torch's `to_local` and `from_local` make anew in each call, forward and backward, depends on placements,
sizes and strides alone. It is made once here, by these two, and one autograd function takes the place of
three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from attnroute.masks.objects.bands import Causal, Window
from attnroute.memory import Memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from attnroute.api.records import Given, Output

_SPECS_KEPT: Final = 16
"""Orders in memory of output, log-sum-exp and three gradients, for each kind of call."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a tensor lies on a mesh.

    Attributes:
        mesh: The mesh.
        placements: On each dimension of it.
        shape: Of the whole tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    def dtensor(self, local: Tensor) -> DTensor:
        """Return the DTensor of a local tensor; dimensions lie in memory in the order of the local ones."""
        strides, step = [0] * len(self.shape), 1
        order = [*reversed(range(len(self.shape)))]
        if local.dim() == len(self.shape) and 0 not in local.shape:
            order.sort(key=local.stride)
        for dim in order:
            strides[dim], step = step, step * self.shape[dim]
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )


@dataclass(frozen=True, eq=False, slots=True)
class Calls:
    """Calls whose query, key and value lie alike, with nothing else that is a tensor.

    Attributes:
        cut: Returns what this process needs of query, key and value, from the local tensors.
        gradients: How their gradients lie.
        results: How output and log-sum-exp lie.
        specs: What DTensors need to be made, by which of these they are and how their local tensors lie.
    """

    cut: Callable[[list[Tensor]], list[Tensor]]
    gradients: tuple[Spread, ...]
    results: tuple[Spread, ...]
    specs: Memory[object, Any] = field(default_factory=lambda: Memory(_SPECS_KEPT))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh on which results and gradients lie."""
        return self.results[0].mesh

    def run(self, given: Given, attend: Callable[[Given], Output]) -> Output:
        """Run a call of these."""
        inputs: Any = given[:3]
        local = [tensor._local_tensor for tensor in inputs]
        trained: tuple[int, ...] = ()
        if torch.is_grad_enabled():
            trained = tuple([at for at, tensor in enumerate(inputs) if tensor.requires_grad])
        if trained:
            chosen = [inputs[at] for at in trained]
            found = _Local.apply(self, trained, *chosen)  # type: ignore[no-untyped-call]
            for at, tensor in zip(trained, found, strict=True):
                local[at] = tensor
        out, lse = attend(tuple.__new__(type(given), (*self.cut(local), *given[3:])))
        whole = self._result(out, 0)
        return whole, None if lse is None or not given.return_lse else self._result(lse, 1)

    def dtensor(self, local: Tensor, which: tuple[str, int]) -> DTensor:
        """Return the DTensor of a local tensor; its gradient is nobody's concern."""
        key = (which, local.stride(), local.dtype)
        spec = self.specs.get(key)
        if spec is None:
            spread = self.spread_of(which)
            spec = self.specs.keep(key, lambda: spread.dtensor(local.detach())._spec)
        make: Any = DTensor
        return make(local, spec, requires_grad=local.requires_grad)  # type: ignore[no-any-return]

    def spread_of(self, which: tuple[str, int]) -> Spread:
        """Return how a result or a gradient lies."""
        return (self.results if which[0] == "result" else self.gradients)[which[1]]

    def _result(self, local: Tensor, at: int) -> Tensor:
        which = ("result", at)
        if not local.requires_grad:
            return self.dtensor(local, which)
        return _Whole.apply(self, which, local)  # type: ignore[no-untyped-call,no-any-return]


def place_of(given: Given) -> Any:
    """Return under what calls like one are kept; None for one with other tensors, or of a tracer."""
    query, key, value, mask, *_ = given
    if not (mask is None or type(mask) in (Causal, Window)):
        return None
    if not (
        given.bias is given.sink is given.alibi_slopes is given.cu_seqlens_q is given.cu_seqlens_kv is None
    ):
        return None
    place: list[Any] = [given.layout]
    for tensor in (query, key, value):
        # The local tensor of a tracer is none of this type, nor is one that is still under way.
        if type(tensor) is not DTensor or type(tensor._local_tensor) is not Tensor:
            return None
        spec = tensor._spec
        place += spec.mesh, spec.placements, tensor.shape
    coordinate = place[1].get_coordinate()
    return (*place, None if coordinate is None else tuple(coordinate))


class _Local(torch.autograd.Function):
    """The local tensors of some DTensors."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, which: tuple[int, ...], *tensors: DTensor) -> tuple[Tensor, ...]:
        ctx.calls, ctx.which = calls, which
        ctx.set_materialize_grads(False)
        # Autograd writes into what is returned, so it is a tensor of its own.
        return tuple([tensor._local_tensor.view_as(tensor._local_tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        whole: list[DTensor | None] = []
        for at, grad in zip(ctx.which, grads, strict=True):
            if grad is None:
                whole.append(None)
            elif torch.is_grad_enabled():
                # A second derivative goes back through what torch makes.
                whole.append(ctx.calls.gradients[at].dtensor(grad))
            else:
                whole.append(ctx.calls.dtensor(grad, ("gradient", at)))
        return None, None, *whole


class _Whole(torch.autograd.Function):
    """The DTensor of a result."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, which: tuple[str, int], local: Tensor) -> DTensor:
        ctx.placements = calls.spread_of(which).placements
        ctx.set_materialize_grads(False)
        return calls.dtensor(local.view_as(local), which)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None
        if grad.placements != ctx.placements:
            grad = grad.redistribute(placements=ctx.placements)
        return None, None, grad.to_local()
