"""Holds the rows of the capability tables against the kernels of this machine, on both sides of each."""
