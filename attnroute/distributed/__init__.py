"""Attention over several processes of `torch.distributed`: DTensors, consensus of ranks, context parallel.

`api` stands above and hands in how a local call runs; nothing here decides or launches one by itself.
"""

from __future__ import annotations

from attnroute.distributed.context import context_parallel

__all__ = ["context_parallel"]
