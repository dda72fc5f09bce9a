"""Preparations that make a call acceptable to a kernel."""
