"""Torch's own fused kernels."""
