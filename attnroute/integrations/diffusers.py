"""`model.set_attention_backend("attnroute")` for diffusers >= 0.35.

```python
from attnroute.integrations.diffusers import register

register()
pipeline.transformer.set_attention_backend("attnroute")
```

What diffusers' models hand to their attention backend then runs on `attnroute.attention`, as it does for the
backend "native". Models that call torch's function themselves, such as the U-Net of Stable Diffusion, ask no
backend: put `attnroute.route_sdpa()` around these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnroute.api.sdpa import scaled_dot_product_attention
from attnroute.errors import argument_error

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["register"]

_NAME = "attnroute"


def register() -> None:
    """Make the backend "attnroute" available in diffusers. Registering again is harmless.

    Models take it with ``model.set_attention_backend("attnroute")``, a block with diffusers'
    ``attention_backend("attnroute")``. diffusers reads ``DIFFUSERS_ATTN_BACKEND`` when it is imported, which
    is too early for this name.

    Raises:
        ImportError: diffusers is missing, or too old to have attention backends.
    """
    import diffusers

    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        msg = (
            "The diffusers integration requires attention backends, which diffusers has from 0.35 on; "
            f"got {diffusers.__version__}; install a newer one, or use attnroute.route_sdpa()."
        )
        raise ImportError(msg) from error
    if _NAME not in AttentionBackendName.__members__.values():
        _AttentionBackendRegistry.register(_new_member(AttentionBackendName))(_attention)


def _new_member(names: Any) -> Any:
    """Add a member to diffusers' list of names, an Enum, in which it looks up what a user asks for."""
    member = str.__new__(names, _NAME)
    member._name_, member._value_ = _NAME.upper(), _NAME
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[_NAME] = member
    return member


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Compute what diffusers' backend "native" does; tensors are (batch, seqlen, num_heads, head_dim)."""
    if return_lse:
        to_do = 'call attnroute.attention(..., layout="bshd", return_lse=True) in a processor of your own'
        raise argument_error("return_lse", "False", True, to_do)
    if _parallel_config is not None:
        to_do = 'set the attention backend "native"'
        raise argument_error("parallel_config", "None, so no context parallelism", _parallel_config, to_do)
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        # One entry for each key of the batch, as the backend "native" reads it.
        attn_mask = attn_mask[:, None, None, :]
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)
