"""Kernels of other packages."""
