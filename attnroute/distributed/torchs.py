"""torch's own `context_parallel`: whether a call stands inside of one, and over which mesh.

Inside, torch has put another function in the place of `torch.nn.functional.scaled_dot_product_attention`, for
all threads. That one makes DTensors of its arguments, whose operators go round a ring. `attention()` is no
such call: without a look at this it would attend to the tokens of one rank, silently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.nn import functional

from attnroute.errors import argument_error
from attnroute.memory import cached
from attnroute.question.policy import Policy
from attnroute.settings import call_policy

STOCK: Final = torch._C._nn.scaled_dot_product_attention
"""What stands in `torch.nn.functional` where nobody has put another function."""
_PLACES: Final = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)
"""Modules of torch that have the replaced functions, the newest first: from torch 2.10 and 2.7 on."""


def is_around() -> bool:
    """Return whether a block of torch's `context_parallel` is entered in this process."""
    return _place() is not None


def call_policy_inside(backend: str | None, prefer: str | Iterable[str] | None) -> Policy:
    """Return the settings of a call as `call_policy` does, with the mesh of torch's block around it.

    Raises:
        OverrideError: A backend is not known, or `prefer` stands beside `backend`.
        ArgumentError: The block is there, and its mesh is not where torch keeps it in the versions looked at.
    """
    policy, place = call_policy(backend, prefer), _place()
    if place is None or policy.context_parallel is not None:
        return policy
    function: Any = functional.scaled_dot_product_attention
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "device_mesh" not in held:
        required = "a block whose mesh can be read, as in torch 2.7 to 2.13"
        to_do = "use attnroute.distributed.context_parallel(mesh) in its place"
        raise argument_error("context_parallel", required, f"that of torch {torch.__version__}", to_do)
    # A call without such a block needs none of this.
    from attnroute.distributed.context import named, sharding_on

    options = place._cp_options
    sharding = sharding_on(
        held["device_mesh"].cell_contents, method=None, load_balance=bool(options.enable_load_balance)
    )
    return _over(policy, named(sharding))


@cached(64)
def _over(policy: Policy, name: str) -> Policy:
    origin = {**policy.origin, "context_parallel": "torch's context_parallel"}
    return policy.changed(context_parallel=name, origin=origin)


def _place() -> Any:
    """Return the module whose function stands in the stock one's place, None where another's does."""
    for name in _PLACES:
        module = sys.modules.get(name)
        replaced = getattr(module, "_replaced_functions", None)
        if replaced and functional.scaled_dot_product_attention in replaced:
            return module
    return None
