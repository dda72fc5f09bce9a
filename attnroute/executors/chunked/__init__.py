"""Exact attention in blocks, for every call that no fused kernel takes."""
