"""Which backend's kernels a device ran, by the names that profiles show."""

from __future__ import annotations

import re

import torch
from torch.profiler import ProfilerActivity, profile

from attnroute.conformance.kernels import DEVICE_NAMES

KERNELS = {b: DEVICE_NAMES[b] for b in ("flash", "cudnn", "efficient")} | {"math": r"softmax"}
"""Torch's own, as profiles of torch 2.11 on an H100 show them."""
PACKAGES = {b: DEVICE_NAMES[b] for b in ("cudnn_fe", "te", "fa4", "fa3", "fa2")}
"""Those of other packages: cuDNN's own are cudnn_generated_..., the frontend's have it as prefix."""
SHARED = {"cudnn_fe": "cudnn", "te": "cudnn", "flex_fa4": "fa4"}
"""Backends that run another's kernels, which their operator tells apart."""
MARKS = {"chunked": "attnroute::chunked"}


def names_of(run):
    """Return what `run` returns, the names on the device, and every name of its profile."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        result = run()
        torch.cuda.synchronize()
    on_device = {e.name for e in seen.events() if str(e.device_type).endswith("CUDA")}
    return result, on_device, {e.name for e in seen.events()}


def backend_seen(on_device, names):
    """Return the backends whose kernels or marks appear; math only where no fused kernel does."""
    patterns = {b: p for b, p in (KERNELS | PACKAGES).items() if b != "math" and b not in SHARED}
    found = {b for b, pattern in patterns.items() if any(re.search(pattern, n) for n in on_device)}
    for backend, kernels in SHARED.items():
        if kernels in found and f"attnroute::{backend}" in names:
            found = found - {kernels} | {backend}
    found |= {b for b, mark in MARKS.items() if mark in names}
    if "aten::_scaled_dot_product_attention_math" in names:
        found.add("math")
    return found
