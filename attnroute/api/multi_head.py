"""torch's multi_head_attention_forward, line for line, with our scaled_dot_product_attention in it.

While a TorchFunctionMode handles a function it is off, so what the function calls would not be seen. This one
looks its names up here, and in a module because torch.compile looks for them in the module of a function.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from torch.nn import functional

from attnroute.api.sdpa import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["multi_head_attention_forward", "scaled_dot_product_attention", "stock"]

stock: Final[Any] = functional.multi_head_attention_forward


def has_torch_function(_: object) -> bool:
    """Return False: the mode that found the call has looked."""
    return False


def _check_key_padding_mask(mask: Tensor, src_len: int, bsz: int) -> None:
    """Check as torch does, which torch.compile cannot trace: it puts the whole function into a graph."""
    if tuple(mask.shape) != (bsz, src_len):
        raise AssertionError(f"Expected key_padded_mask.shape to be {(bsz, src_len)}, but got {mask.shape}")


globals().update(
    (name, getattr(functional, name))
    for name in stock.__code__.co_names
    if hasattr(functional, name) and name not in globals()
)
multi_head_attention_forward: Final = FunctionType(
    stock.__code__, globals(), stock.__name__, stock.__defaults__
)
multi_head_attention_forward.__kwdefaults__ = stock.__kwdefaults__
