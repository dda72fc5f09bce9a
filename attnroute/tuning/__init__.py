"""Measures the calls of a run on this machine: makes them again, checks every backend and times it."""
