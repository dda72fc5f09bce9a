"""What the tests of policies, overrides and the environment share."""

from __future__ import annotations

import attnroute
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.policy import Policy

KNOWN = (
    "chunked",
    "cudnn",
    "cudnn_fe",
    "efficient",
    "fa2",
    "fa3",
    "fa4",
    "flash",
    "flex",
    "flex_fa4",
    "math",
    "te",
)
CPU = Host(arch="cpu", versions={"torch": "2.13.0"})
CALL = Call(
    dtype="float32",
    batch=1,
    num_heads_q=2,
    num_heads_kv=2,
    seqlen_q=8,
    seqlen_kv=8,
    head_dim_qk=8,
    head_dim_v=8,
)


def stated(**settings_given):
    return Policy(**settings_given, origin=dict.fromkeys(settings_given, "somebody"))


def selected(**arguments):
    # Imported here, because tests of the engine alone run without torch.
    import torch

    query = torch.zeros(1, 2, 8, 8)
    return attnroute.explain(query, query, query, **arguments).selected
