"""Facts whose CUDA errors make the process useless: each is to run in a process of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from facts_common import DEVICE, KERNELS, Fact, Inputs, Kernel, compare, error, reference


def shifted_start() -> Inputs:
    """Draw bfloat16 inputs, (2, 4, 128, 64), that start two bytes after a multiple of 16."""
    count = 2 * 4 * 128 * 64

    def draw() -> torch.Tensor:
        storage = torch.randn(count + 16, device=DEVICE).bfloat16()
        return storage[1 : 1 + count].view(2, 4, 128, 64).requires_grad_()

    return draw(), draw(), draw()


def odd_rows() -> Inputs:
    """Draw bfloat16 inputs, (2, 4, 128, 64), whose rows lie 65 numbers apart."""

    def draw() -> torch.Tensor:
        return torch.randn(2, 4, 128, 65, device=DEVICE).bfloat16()[..., :64].requires_grad_()

    return draw(), draw(), draw()


def misaligned(kernel: Kernel) -> dict[str, Any]:
    """Give inputs that do not start at a multiple of 16 bytes."""
    tensors = shifted_start()
    out, _ = kernel(*tensors)
    torch.cuda.synchronize()
    return compare(out, tensors)


def odd_row_stride(kernel: Kernel) -> dict[str, Any]:
    """Give inputs whose rows do not start at multiples of 16 bytes."""
    tensors = odd_rows()
    out, _ = kernel(*tensors)
    torch.cuda.synchronize()
    return compare(out, tensors)


def large_grid(kernel: Kernel, heads: int, batch: int) -> float | str:
    """Give more heads or batch rows than a launch grid's second and third dimension hold (65535)."""
    tensor = torch.randn(batch, heads, 16, 16, device=DEVICE).half()
    out, _ = kernel(tensor, tensor, tensor)
    torch.cuda.synchronize()
    return error(out, reference((tensor, tensor, tensor))[0])


FACTS: dict[str, Fact] = {
    **{
        f"{name} grid H{heads} B{batch}": partial(large_grid, kernel, heads, batch)
        for heads, batch in ((65536, 1), (1, 65536), (1, 100000))
        for name, kernel in KERNELS.items()
    },
    **{f"{name} misaligned": partial(misaligned, kernel) for name, kernel in KERNELS.items()},
    **{f"{name} seqstride_odd": partial(odd_row_stride, kernel) for name, kernel in KERNELS.items()},
}
