"""Attention over several processes of `torch.distributed`: DTensors, consensus of ranks, context parallel.

`api` stands above and hands in how a local call runs; nothing here decides or launches one by itself.
"""
