"""`attn_implementation="attnroute"` for transformers >= 5.4.

```python
from attnroute.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="attnroute")
```

Every attention call of the model then goes through `attnroute.attention`: decided per call, so that layers
with different head dims get different kernels, with grouped key/value heads as they are and masks as objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnroute.errors import argument_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["register"]

_SPECIAL = ("eager", "flash", "flex_attention", "paged", "sdpa", "/", "|")
"""Parts of names by which transformers distinguishes implementations."""
_REGISTERED: dict[str, Callable[..., Any]] = {}


def register(name: str = "attnroute", *, ignore: Iterable[str] = (), eager_only: bool = False) -> None:
    """Make ``attn_implementation=name`` available in transformers. Registering again is harmless.

    Args:
        name: What models pass as ``attn_implementation``.
        ignore: Further keyword arguments that a model hands to its attention and that change nothing there.
            Keyword arguments that are not known raise when they are not None or False.
        eager_only: Serve also models that transformers runs with eager attention only. Some of them compute
            with masks as if these were float tensors and give wrong results with others; compare first.

    Raises:
        ArgumentError: transformers would treat the name specially, or somebody else registered it.
        ImportError: transformers is missing, or too old to pass the lengths that a mask is for.
    """
    # Importing transformers takes seconds, so it waits for the first registration.
    from transformers import AttentionInterface, AttentionMaskInterface

    from attnroute.integrations.transformers.attention import attention_function
    from attnroute.integrations.transformers.mask_functions import mark_builders
    from attnroute.integrations.transformers.mask_interface import make_mask, refuse_old_transformers
    from attnroute.integrations.transformers.models import ask_before_models_are_built

    refuse_old_transformers()
    _check_name(name, taken=AttentionInterface().get(name))
    function = attention_function(frozenset(ignore), eager_only=eager_only)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, make_mask)
    _REGISTERED[name] = function
    mark_builders()
    ask_before_models_are_built(_REGISTERED)


def _check_name(name: str, taken: object) -> None:
    special = [part for part in _SPECIAL if part in name]
    if special:
        raise argument_error(
            "name",
            "a name that transformers does not treat specially",
            f'"{name}", which contains "{special[0]}"',
            'take another, such as "attnroute"',
        )
    if taken is not None and taken is not _REGISTERED.get(name):
        raise argument_error(
            "name", "a name that is free", f'"{name}", registered by somebody else', "take another"
        )
