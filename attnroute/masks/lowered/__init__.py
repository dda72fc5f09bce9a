"""The lowered mask, which executors read: its form, what makes it of tensors, and what evaluates it."""
