"""Hand a call over to torch's own `scaled_dot_product_attention`, where torch selects the same kernel for it.

That function costs the host less than its operators do from Python, which return what only a backward needs.
What torch selects follows from the arguments and from switches of the process; it is asked once, and the
switches are compared in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import TYPE_CHECKING, Any, Final

import torch

from attnroute.executors.aten.operators import is_causal
from attnroute.executors.strides import Fit

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention import SDPBackend

    from attnroute.executors.protocol import Bind, Bound, Inputs, Plan

_attention = torch._C._nn.scaled_dot_product_attention  # type: ignore[attr-defined]
_SWITCHES: Final[tuple[Callable[[], object], ...]] = tuple(
    getattr(torch._C, name)
    for name in sorted(dir(torch._C))
    if name == "_get_sdp_priority_order" or (name.startswith("_get_") and name.endswith("_sdp_enabled"))
)
"""What `sdpa_kernel` and `torch.backends.cuda` set; versions of torch have more or fewer."""
_DIMS: Final = (2, 4)
"""Of masks that torch's function takes."""


def handed_over(choice: SDPBackend, *, as_output: bool = False) -> Bind:
    """Return the `Bind` of one of torch's fused kernels.

    Args:
        choice: What torch calls the kernel.
        as_output: The gradient of an output must have the strides of the output.
    """

    def bind(inputs: Inputs, plan: Plan) -> Bound | None:
        if "to_varlen" in plan.repairs:
            return None
        causal, attn = is_causal(inputs), inputs.attn
        if causal and (inputs.mask.band_lo is not None or inputs.mask.band_hi != 0):
            return None
        if attn is not None and attn.dim() not in _DIMS:
            return None
        tensors, known = (inputs.query, inputs.key, inputs.value), tuple(map(call, _SWITCHES))
        # Each argument that torch must read costs the host more than it looks.
        named: dict[str, Any] = {"is_causal": True} if causal else {}
        if inputs.dropout_p:
            named["dropout_p"] = inputs.dropout_p
        if inputs.scale is not None:
            named["scale"] = inputs.scale
        if inputs.query.shape[1] != inputs.key.shape[1]:
            named["enable_gqa"] = True
        if torch._fused_sdp_choice(*tensors, attn, **named) != choice.value:
            return None
        watches = plan.training and plan.device_type != "cpu"

        def run(query: Tensor, key: Tensor, value: Tensor, attn: Tensor | None) -> Tensor | None:
            if tuple(map(call, _SWITCHES)) != known:
                return None
            out: Tensor = (
                _attention(query, key, value, attn, **named) if named else _attention(query, key, value, attn)
            )
            if watches:
                out.register_hook(Fit(out.stride(), as_output=as_output))
            return out

        return run

    return bind
