"""A dense float64 attention for the tests of `chunked`: slow, short, differentiable by autograd."""

from __future__ import annotations

import torch


def allowed(mask, shape):
    """Return who may attend as a bool tensor of `shape` (batch, num_heads_q, seqlen_q, seqlen_kv)."""
    b, h, i, j = positions(shape, "cpu")
    offset = j - (i if mask.diagonal is None else mask.diagonal.cpu()[:, None])
    allow = torch.ones(shape, dtype=torch.bool)
    if mask.band_lo is not None:
        allow &= offset >= mask.band_lo
    if mask.band_hi is not None:
        allow &= offset <= mask.band_hi
    if mask.key_keep is not None:
        allow &= mask.key_keep[:, None, None, :].cpu()
    if mask.document_ids_q is not None:
        same = mask.document_ids_q[:, :, None] == mask.document_ids_kv[:, None, :]
        allow &= same[:, None].cpu()
    if mask.dense is not None:
        allow &= mask.dense.cpu()
    for alternatives in mask.either:
        allow &= torch.stack([allowed(part, shape) for part in alternatives]).any(0)
    for part in mask.exclude:
        allow &= ~allowed(part, shape)
    # The functions of the tests take index tensors that broadcast as well as single indices, and the blocks
    # of a BlockMask that create_block_mask made say what its mask_mod says.
    for function in (*mask.functions, *mask.sparse):
        allow &= function.mask_mod(b, h, i, j)
    return allow


def positions(shape, device):
    """Return batch rows, heads, queries and keys as four tensors that broadcast to `shape`."""
    sizes = [[-1 if dim == other else 1 for other in range(4)] for dim in range(4)]
    return [torch.arange(n, device=device).view(size) for n, size in zip(shape, sizes, strict=True)]


def reference(query, key, value, mask, *, bias=None, scale=None, softcap=0.0, sink=None, alibi_slopes=None,
              score_mod=None, keep=None, dropout_p=0.0):  # fmt: skip
    """Return output and log-sum-exp in float64; `keep` is the drop mask, True = kept."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod is not None:
        changed = score_mod(scores, *positions(scores.shape, scores.device))
        scores = changed.to(scores.dtype).expand(scores.shape)
    if alibi_slopes is not None:
        seqlen_q, seqlen_kv = scores.shape[2:]
        i = torch.arange(seqlen_q, device=query.device)[:, None] + seqlen_kv - seqlen_q
        distance = (i - torch.arange(seqlen_kv, device=query.device)).abs()
        scores = scores - alibi_slopes[..., None, None] * distance
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed(mask, scores.shape).to(scores.device), float("-inf"))
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    logits = torch.cat([logits, torch.full_like(scores[..., :0].sum(-1, keepdim=True), float("-inf"))], -1)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    probs = weights[..., : scores.shape[-1]] / safe
    if keep is not None:
        probs = probs * keep / (1.0 - dropout_p)
    lse = torch.where(empty, float("-inf"), top + torch.log(safe)).squeeze(-1)
    return probs @ value, lse


def wide(tensor):
    """Return a float64 leaf with the values of `tensor`."""
    return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)


def error(got, want):
    """Return the relative error ||got - want|| / ||want||, absolute where `want` is zero."""
    got, want = got.double().cpu(), want.double().cpu()
    difference = (got - want).norm()
    return float((difference if want.norm() == 0 else difference / want.norm()).detach())
