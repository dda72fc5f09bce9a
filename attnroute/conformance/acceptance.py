"""What the checks of the installed torch accept on the GPUs that it sees, for the recording of `audit torch`.

The GPUs may be made up: the checks read an architecture and versions, and launch nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from attnroute.audit.torch import BACKENDS, Record, recorded, recording, write
from attnroute.errors import ArgumentError
from attnroute.probes.torch_host import cudnn_text
from attnroute.question.host import arch_of
from attnroute.question.nodes import CausalNode, DenseBias, DenseNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnroute.question.call import Call

_STRIDES: Final[dict[str, Callable[[int, int, int], tuple[int, ...]]]] = {
    "bshd_view": lambda h, s, d: (s * h * d, d, h * d, 1),
    "packed_qkv": lambda h, s, d: (3 * s * h * d, d, 3 * h * d, 1),
    "laststride2": lambda h, s, d: (2 * h * s * d, 2 * s * d, 2 * d, 2),
    "D1_laststride2": lambda h, s, d: (2 * h * s * d, 2 * s * d, 2 * d, 2),
    "transposed_last": lambda h, s, d: (h * s * d, s * d, 1, s),
    "seqstride_odd": lambda h, s, d: (h * s * (d + 1), s * (d + 1), d + 1, 1),
    "expand_heads": lambda _, s, d: (s * d, 0, d, 1),
}
"""By the names of calls that are about memory, strides for heads, length and head dim."""
_MASK_STRIDES: Final = {"mask_laststride0": (1, 0), "mask_laststride_t": (1, 128)}
_OFFSET: Final = "misalign_"
"""How names begin that end in the number of elements in front of a tensor."""


def record() -> list[str]:
    """Ask about every recorded call on every GPU, and write the answers into this checkout.

    Returns:
        What was found, a sentence for each GPU.

    Raises:
        ArgumentError: This is no checkout, or torch sees no GPU.
    """
    import torch

    known, calls = recorded(recording())
    if not torch.cuda.device_count():
        required = "a CUDA build of torch that sees a GPU, or made-up ones"
        raise ArgumentError(f"record acceptance requires {required}; got none; see docs/new-release.md.")
    by_place = {one[:3]: one for one in known}
    said = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):  # The checks read the current one.
            capability = torch.cuda.get_device_capability()
            cases = {name: letters(name, call, "cuda") for name, call in calls.items()}
        new = Record(torch.__version__, _cudnn(), arch_of(capability), cases)
        said.append(_compared(new, by_place.get(new[:3])))
        cases = {**getattr(by_place.get(new[:3]), "cases", {}), **new.cases}
        by_place[new[:3]] = new._replace(cases=cases)
    write(recording(), by_place.values())
    return said


def _cudnn() -> str:
    """Return the version of cuDNN, of one with which torch would not start as well."""
    from torch._C import _cudnn as module

    return cudnn_text(module.getVersionInt())


def letters(name: str, call: Call, device: str) -> str:
    """Ask the checks about one call; y or n for each backend."""
    from torch._C import _can_use_cudnn_attention
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    query, key, value = tensors(name, call, device)
    params = SDPAParams(
        query,
        key,
        value,
        _mask(name, call, device),
        call.dropout_p,
        any(isinstance(node, CausalNode) for node in call.mask),
        call.num_heads_q != call.num_heads_kv,
    )
    checks = {
        "flash": can_use_flash_attention,
        "cudnn": _can_use_cudnn_attention,
        "efficient": can_use_efficient_attention,
    }
    return "".join("y" if checks[backend](params, False) else "n" for backend in BACKENDS)


def tensors(name: str, call: Call, device: str) -> list[Any]:
    """Make query, key and value of a recorded call, whose name says how they lie in memory."""
    import torch

    made = []
    offset = int(name.rpartition("_")[2]) if name.startswith(_OFFSET) else 0
    for heads, length, dim in (
        (call.num_heads_q, call.seqlen_q, call.head_dim_qk),
        (call.num_heads_kv, call.seqlen_kv, call.head_dim_qk),
        (call.num_heads_kv, call.seqlen_kv, call.head_dim_v),
    ):
        shape = (call.batch, heads, length, dim)
        contiguous = (heads * length * dim, length * dim, dim, 1)
        strides = _STRIDES[name](heads, length, dim) if name in _STRIDES else contiguous
        size = offset + math.prod(shape[:1]) * max(strides[0], 1) + 1
        memory = torch.empty(size, dtype=getattr(torch, call.dtype), device=device)
        tensor = memory.as_strided(shape, strides, offset)
        made.append(tensor.requires_grad_(call.phase == "training"))
    return made


def _mask(name: str, call: Call, device: str) -> Any:
    """Return the tensor of a mask or a bias, None without one."""
    import torch

    nodes = (call.bias, *call.mask)
    node = next((node for node in nodes if isinstance(node, DenseBias | DenseNode)), None)
    if node is None:
        return None
    dtype = getattr(torch, node.dtype)
    tensor = torch.empty(node.shape, dtype=dtype, device=device, requires_grad=node.requires_grad)
    return tensor.as_strided(node.shape, _MASK_STRIDES[name]) if name in _MASK_STRIDES else tensor


def _compared(new: Record, old: Record | None) -> str:
    """Say how answers differ from those that stand recorded."""
    where = f"torch {new.torch}, cuDNN {new.cudnn}, {new.arch}: {len(new.cases)} calls"
    if old is None:
        return f"{where}, which nobody had recorded"
    differ = [
        f"{backend} {name} ({before} to {now})"
        for name in new.cases.keys() & old.cases.keys()
        for backend, before, now in zip(BACKENDS, old.cases[name], new.cases[name], strict=True)
        if before != now
    ]
    return (
        f"{where}, {'answered otherwise: ' + ', '.join(sorted(differ)) if differ else 'answered as recorded'}"
    )
