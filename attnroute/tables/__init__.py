"""Capability tables: the data model, the loader, the condition grammar and the lint."""
