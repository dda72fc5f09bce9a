"""Small calls on the CPU that differ in one thing each, and in one that a decision may depend on."""

from __future__ import annotations

import torch

from attnroute import biases, masks
from attnroute.question.facts import FACTS


def tensors(batch=2, heads=4, heads_kv=4, seqlen_q=6, seqlen_kv=6, head_dim=8, dtype=torch.float32):
    shapes = [(batch, heads, seqlen_q, head_dim), *[(batch, heads_kv, seqlen_kv, head_dim)] * 2]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def trained(**sizes):
    return [t.requires_grad_() for t in tensors(**sizes)]


def shifted():
    """Tensors that start 4 bytes behind a multiple of 16."""
    return [torch.empty(t.numel() + 1)[1:].view(t.shape).copy_(t) for t in tensors()]


FLAGS = torch.ones(2, 1, 6, 6, dtype=torch.bool)
OTHER = {
    "batch": (lambda: tensors(batch=3), {}),
    "heads": (lambda: tensors(heads=8, heads_kv=8), {}),
    "shared heads": (lambda: tensors(heads_kv=2), {}),
    "query length": (lambda: tensors(seqlen_q=5), {}),
    "key length": (lambda: tensors(seqlen_kv=7), {}),
    "head_dim": (lambda: tensors(head_dim=16), {}),
    "dtype": (lambda: tensors(dtype=torch.float64), {}),
    "memory order": (lambda: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors()], {}),
    "alignment": (shifted, {}),
    "training": (trained, {}),
    "causal": (tensors, {"is_causal": True}),
    "window": (tensors, {"window": (2, 0)}),
    "wider window": (tensors, {"window": (3, 0)}),
    "negative scale": (tensors, {"scale": -1.0}),
    "no scale at all": (tensors, {"scale": 0.0}),
    "softcap": (tensors, {"softcap": 30.0}),
    "sink": (tensors, {"sink": torch.zeros(4)}),
    "slopes": (tensors, {"alibi_slopes": torch.zeros(4)}),
    "slopes per row": (tensors, {"alibi_slopes": torch.zeros(2, 4)}),
    "dropout": (tensors, {"dropout_p": 0.5}),
    "layout": (tensors, {"layout": "bshd"}),
    "log-sum-exp": (tensors, {"return_lse": True}),
    "deterministic": (tensors, {"deterministic": True}),
    "required backend": (tensors, {"backend": "math"}),
    "preferred backend": (tensors, {"prefer": "math"}),
    "mask": (tensors, {"mask": FLAGS}),
    "mask of another shape": (tensors, {"mask": FLAGS[:1]}),
    "mask as an object": (tensors, {"mask": masks.Dense(FLAGS)}),
    "documents": (tensors, {"mask": masks.Documents(lengths=[6])}),
    "other documents": (tensors, {"mask": masks.Documents(lengths=[3, 3])}),
    "documents by ids": (tensors, {"mask": masks.Documents(ids=torch.zeros(6, dtype=torch.int64))}),
    "padding": (tensors, {"mask": masks.KeyPadding(lengths=[6, 6])}),
    "other padding": (tensors, {"mask": masks.KeyPadding(lengths=[6, 0])}),
    "padding on the device": (tensors, {"mask": masks.KeyPadding(lengths=torch.tensor([6, 6]))}),
    "bias": (tensors, {"bias": torch.zeros(6, 6)}),
    "bias of another shape": (tensors, {"bias": torch.zeros(6)}),
    "bias beside a required backend": (tensors, {"bias": torch.zeros(6, 6), "backend": "chunked"}),
    "bias of another dtype": (
        tensors,
        {"bias": torch.zeros(6, 6, dtype=torch.float64), "backend": "chunked"},
    ),
    "trained bias": (tensors, {"bias": torch.zeros(6, 6).requires_grad_()}),
}


def strided(*, place, step):
    """Tensors with a gap in one dimension, the last one or that of the rows."""
    made = []
    for tensor in tensors(head_dim=12):
        sizes = list(tensor.shape)
        sizes[place] *= step
        whole = torch.randn(sizes)
        made.append(whole[..., ::step] if place == -1 else whole[..., : tensor.shape[-2], :])
    return made


def expanded():
    query, key, value = tensors(heads_kv=1)
    return [query, key.expand(-1, 4, -1, -1), value.expand(-1, 4, -1, -1)]


def odd_values(head_dim_v, head_dim=8):
    query, key, _ = tensors(head_dim=head_dim)
    return [query, key, torch.randn(2, 4, 6, head_dim_v)]


def packed():
    return [torch.randn(12, 4, 8) for _ in range(3)]


SUMS = torch.tensor([0, 5, 12])
CALLS = {
    "plain": (tensors, {}),
    **OTHER,
    "wide": (lambda: tensors(head_dim=96), {}),
    "long": (lambda: tensors(seqlen_q=130, seqlen_kv=130), {}),
    "gapped rows": (lambda: strided(place=-2, step=2), {}),
    "strided features": (lambda: strided(place=-1, step=2), {}),
    "expanded heads": (expanded, {}),
    "narrow values": (lambda: odd_values(4), {}),
    "values of 7": (lambda: odd_values(7), {}),
    "values of 24": (lambda: odd_values(24), {}),
    "values of 96": (lambda: odd_values(96, 64), {}),
    "three query heads to a key head": (lambda: tensors(heads=6, heads_kv=2), {}),
    "dropout of a tenth": (tensors, {"dropout_p": 0.1}),
    "window that is open": (tensors, {"window": (2, None)}),
    "causal object": (lambda: tensors(seqlen_q=5), {"mask": masks.Causal()}),
    "causal object at the bottom": (lambda: tensors(seqlen_q=5), {"mask": masks.Causal("bottom_right")}),
    "window object": (tensors, {"mask": masks.Window(2, 0)}),
    "other window object": (tensors, {"mask": masks.Window(3, 1)}),
    "causal at the bottom": (
        lambda: tensors(seqlen_q=5),
        {"is_causal": True, "causal_alignment": "bottom_right"},
    ),
    "causal at the top": (lambda: tensors(seqlen_q=5), {"is_causal": True, "causal_alignment": "top_left"}),
    "both corners": (
        lambda: tensors(seqlen_q=5),
        {"mask": masks.Causal("top_left") & masks.Window(3, 0, "bottom_right")},
    ),
    "finite padding": (tensors, {"mask": masks.KeyPadding(lengths=torch.tensor([6, 4]), finite=True)}),
    "nobody": (tensors, {"mask": masks.KeyPadding(lengths=[0, 6])}),
    "prefix": (tensors, {"mask": masks.PrefixLM([3, 3])}),
    "alternatives": (tensors, {"mask": masks.Causal() | masks.KeyPadding(lengths=[6, 4])}),
    "function": (tensors, {"mask": masks.Function(lambda _b, _h, i, j: i >= j)}),
    "score function": (tensors, {"bias": biases.Function(lambda s, _b, _h, i, j: s + i - j)}),
    "mask of 6": (tensors, {"mask": FLAGS[0, 0, 0]}),
    "unaligned mask": (tensors, {"mask": torch.ones(2, 1, 6, 7, dtype=torch.bool)[..., :6]}),
    "aligned mask": (tensors, {"mask": torch.ones(2, 1, 6, 8, dtype=torch.bool)[..., :6]}),
    "turned mask": (tensors, {"mask": FLAGS.transpose(2, 3).contiguous().transpose(2, 3)}),
    "sequences": (packed, {"layout": "thd", "cu_seqlens_q": SUMS}),
    "sequences of other keys": (
        packed,
        {"layout": "thd", "cu_seqlens_q": SUMS, "cu_seqlens_kv": torch.tensor([0, 4, 12])},
    ),
    "training with a bias": (trained, {"bias": torch.zeros(6, 6).requires_grad_()}),
}
"""Those and more: each fact that an eager call on the CPU can have differs somewhere."""
EAGER_FACTS = FACTS.keys() - {"compiled", "cuda_graph", "distributed", "dispatch_mode", "transform"}
"""What surrounds a call is no argument of it; tests of surroundings have it."""
