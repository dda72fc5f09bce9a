"""Mask objects, which users make and combine. No module here imports torch before a mask has a tensor."""
