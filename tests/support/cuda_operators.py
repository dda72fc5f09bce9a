"""torch's CUDA attention operators written down as their definition, so that calls of them run on the CPU.

Each keeps the conventions of the real one: layouts, the shape of the log-sum-exp, what it says of rows with
no key, where the diagonal lies, and that the backward reads nothing but what it is given.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CudaOperators(TorchDispatchMode):
    """Run the operators on CPU tensors in float64, and note their names.

    `padded` gives ragged batches the log-sum-exp of older kernels: (sequences, heads, longest). A gradient of
    the output that a kernel would misread is an error here; those that backwards got are in `gradients`.
    """

    def __init__(self, *, padded=False):
        super().__init__()
        self.padded = padded
        self.seen = []
        self.gradients = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0].removeprefix("aten::")
        if name not in _OPERATORS:
            return func(*args, **(kwargs or {}))
        self.seen.append(name)
        arguments = func._schema.arguments
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= {a.name: value for a, value in zip(arguments, args, strict=False)} | (kwargs or {})
        if name.endswith("_backward"):
            self.gradients.append(_taken(name, given))
        return _OPERATORS[name](self, given)


class Launches(TorchDispatchMode):
    """Note the names of operators that are no views."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.seen.append(func.name().partition(".")[0].removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _taken(name, given):
    """Return the gradient of the output, which the kernel reads 16 bytes at a time along its rows."""
    grad = given["grad_out_"] if "grad_out_" in given else given["grad_out"]
    assert grad.stride(-1) == 1
    assert grad.data_ptr() % 16 == 0, "misaligned address"
    assert all(
        s * grad.element_size() % 16 == 0
        for n, s in zip(grad.shape, grad.stride()[:-1], strict=False)
        if n > 1
    )
    if "cudnn" in name:
        sides = zip(grad.shape, grad.stride(), given["out"].stride(), strict=True)
        assert all(n == 1 or own == of_out for n, own, of_out in sides), (
            "read with the strides of another gradient"
        )
        # With dropout it cannot be told apart, which any/cudnn/dropout-gradient-strides keeps away.
        apart = given["dropout_p"] or math.copysign(1.0, given["dropout_p"]) < 0
        assert apart, "read by a plan of other code"
    return grad


def weights_kept(shape, dropout_p, state):
    """Return what each weight is multiplied with."""
    if not dropout_p:
        return torch.ones(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(int(state))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) >= dropout_p) / (1 - dropout_p)


def _state(given):
    return torch.randint(2**31, (2,)) if given["dropout_p"] else torch.zeros(2, dtype=torch.int64)


def _scores(given, query, key, hidden):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    return (query.double() @ key.double().transpose(-1, -2) * scale + hidden), scale


def _forward(given, query, key, value, hidden, state):
    scores, _ = _scores(given, query, key, hidden)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, math.inf, lse)[..., None])
    weights = weights * weights_kept(weights.shape, given["dropout_p"], state[0])
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return (weights @ value.double()).to(query.dtype), lse.float()


def _backward(given, query, key, value, hidden, state, grad, out, lse):
    """Return the gradients of query, key, value and the scores' bias."""
    scores, scale = _scores(given, query, key, hidden)
    group = query.shape[1] // key.shape[1]
    weights = torch.exp(scores - lse.double()[..., None])
    kept = weights_kept(weights.shape, given["dropout_p"], state[0])
    grad = grad.double()
    grad_weights = grad @ value.double().repeat_interleave(group, 1).transpose(-1, -2) * kept
    grad_scores = weights * (grad_weights - (grad * out.double()).sum(-1, keepdim=True))

    def shared(tensor):
        return tensor.unflatten(1, (-1, group)).sum(2)

    grad_query = grad_scores @ key.double().repeat_interleave(group, 1) * scale
    grad_key = shared(grad_scores.transpose(-1, -2) @ query.double() * scale)
    grad_value = shared((weights * kept).transpose(-1, -2) @ grad)
    return *(t.to(query.dtype) for t in (grad_query, grad_key, grad_value)), grad_scores.to(query.dtype)


def _band(given, seqlen_q, seqlen_kv, offset, *, left=None, right=None):
    """Return 0 where the band allows and -inf elsewhere."""
    distance = torch.arange(seqlen_kv)[None] - torch.arange(seqlen_q)[:, None] - offset
    hidden = torch.zeros(seqlen_q, seqlen_kv, dtype=torch.float64)
    hidden[(distance > (0 if given.get("is_causal") else math.inf if right is None else right))] = -math.inf
    hidden[distance < (-math.inf if left is None else -left)] = -math.inf
    return hidden


def _plain_hidden(given):
    seqlen_q, seqlen_kv = given["query"].shape[2], given["key"].shape[2]
    return _band(given, seqlen_q, seqlen_kv, seqlen_kv - seqlen_q)


def _plain(_, given):
    state = _state(given)
    out, lse = _forward(given, given["query"], given["key"], given["value"], _plain_hidden(given), state)
    lengths = (given["query"].shape[2], given["key"].shape[2])
    return out, lse.masked_fill(lse == -math.inf, math.inf), None, None, *lengths, state, lse[:0], lse[:0]


def _plain_backward(_, given):
    tensors = [given[n] for n in ("query", "key", "value")]
    state = given.get("philox_seed", given.get("rng_state"))
    assert (given["max_q"], given["max_k"]) == (tensors[0].shape[2], tensors[1].shape[2])
    assert given["logsumexp"].is_contiguous()
    read = (given["grad_out"], given["out"], given["logsumexp"])
    return _backward(given, *tensors, _plain_hidden(given), state, *read)[:3]


def _lower_hidden(given):
    """Return what the window and the sequences hide, for tokens in one row or rows of a batch."""
    sides = {"left": given["window_size_left"], "right": given["window_size_right"]}
    if given["cum_seq_q"] is None:
        seqlen_q, seqlen_kv = given["query"].shape[1], given["key"].shape[1]
        return _band(given, seqlen_q, seqlen_kv, seqlen_kv - seqlen_q, **sides)
    hidden = torch.full((given["query"].shape[0], given["key"].shape[0]), -math.inf, dtype=torch.float64)
    for (start_q, stop_q), (start_kv, stop_kv) in _sequences(given):
        lengths = (stop_q - start_q, stop_kv - start_kv)
        assert lengths[0] <= given["max_q"]
        assert lengths[1] <= given["max_k"]
        hidden[start_q:stop_q, start_kv:stop_kv] = _band(given, *lengths, lengths[1] - lengths[0], **sides)
    return hidden


def _sequences(given):
    """Return where the queries and the keys of each sequence start and stop."""
    queries, keys = (list(pairwise(given[name].tolist())) for name in ("cum_seq_q", "cum_seq_k"))
    used = given.get("seqused_k")
    if used is not None:
        keys = [(start, start + n) for (start, _), n in zip(keys, used.tolist(), strict=True)]
    return zip(queries, keys, strict=True)


def _heads_first(given, *names):
    """Return tensors of tokens before heads as (batch, heads, tokens, head_dim)."""
    tensors = (given[n] for n in names)
    return [(t if given["cum_seq_q"] is None else t[None]).transpose(1, 2) for t in tensors]


def _heads_last(given, tensor):
    return tensor.transpose(1, 2) if given["cum_seq_q"] is None else tensor[0].transpose(0, 1)


def _lower(mode, given):
    state = _state(given)
    out, lse = _forward(given, *_heads_first(given, "query", "key", "value"), _lower_hidden(given), state)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    if given["cum_seq_q"] is not None:
        lse = _padded(given, lse[0]) if mode.padded else lse[0]
    return _heads_last(given, out).contiguous(), lse, state, lse[:0], lse[:0]


def _padded(given, lse):
    sums = given["cum_seq_q"].tolist()
    padded = torch.full((len(sums) - 1, lse.shape[0], given["max_q"]), math.nan)
    for n, (start, stop) in enumerate(pairwise(sums)):
        padded[n, :, : stop - start] = lse[:, start:stop]
    return padded


def _lower_backward(mode, given):
    state = given.get("philox_seed", given.get("rng_state"))
    lse = given["logsumexp"]
    assert lse.is_contiguous()
    if given["cum_seq_q"] is not None:
        if mode.padded:
            sums = given["cum_seq_q"].tolist()
            lse = torch.cat([lse[n, :, : b - a] for n, (a, b) in enumerate(pairwise(sums))], 1)
        lse = lse[None]
    query, key, value, grad, out = _heads_first(given, "query", "key", "value", "grad_out", "out")
    grads = _backward(given, query, key, value, _lower_hidden(given), state, grad, out, lse)
    return tuple(_heads_last(given, t) for t in grads[:3])


def _top_left(given, bias):
    hidden = _band(given, given["query"].shape[2], given["key"].shape[2], 0)
    return hidden if bias is None else hidden + bias.double()


def _cudnn(_, given):
    state = _state(given)
    tensors = (given["query"], given["key"], given["value"])
    out, lse = _forward(given, *tensors, _top_left(given, given["attn_bias"]), state)
    lengths = (given["query"].shape[2], given["key"].shape[2])
    if out.shape == given["query"].shape:
        out = torch.empty_like(given["query"]).copy_(out)
    return out, lse[..., None], None, None, *lengths, state[0], state[1], None


def _cudnn_backward(_, given):
    lse = given["logsumexp"]
    assert lse.shape == (*given["query"].shape[:3], 1)
    assert lse.is_contiguous()
    tensors = (given["query"], given["key"], given["value"])
    read = (given["grad_out"], given["out"], lse[..., 0])
    state = given["philox_seed"][None]
    return _backward(given, *tensors, _top_left(given, given["attn_bias"]), state, *read)[:3]


def _efficient_lse(lse):
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)


def _efficient(_, given):
    state = _state(given)
    tensors = (given["query"], given["key"], given["value"])
    out, lse = _forward(given, *tensors, _top_left(given, given["attn_bias"]), state)
    lse = _efficient_lse(lse) if given["compute_log_sumexp"] else lse[..., :0]
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse, state[0], state[1]


def _efficient_backward(_, given):
    lse, seqlen_q = given["logsumexp"], given["query"].shape[2]
    assert lse.shape[-1] == -(-seqlen_q // 32) * 32
    assert (lse[..., seqlen_q:] == math.inf).all()
    assert given["out"].transpose(1, 2).is_contiguous()
    tensors = (given["query"], given["key"], given["value"])
    read = (given["grad_out_"], given["out"], lse[..., :seqlen_q])
    state = given["philox_seed"][None]
    grads = _backward(given, *tensors, _top_left(given, given["attn_bias"]), state, *read)
    return *grads[:3], grads[3] if given["grad_input_mask"][3] else None


def _corner(given):
    assert given["custom_mask_type"] == 2
    seqlen_q, seqlen_kv = given["query"].shape[1], given["key"].shape[1]
    return _band({"is_causal": True}, seqlen_q, seqlen_kv, seqlen_kv - seqlen_q)


def _corner_forward(_, given):
    given = {**given, "cum_seq_q": None}
    state = _state(given)
    out, lse = _forward(given, *_heads_first(given, "query", "key", "value"), _corner(given), state)
    lse = _efficient_lse(lse) if given["compute_log_sumexp"] else lse[..., :0]
    return out.transpose(1, 2).contiguous(), lse, state[0], state[1], 0, 0


def _corner_backward(_, given):
    given = {**given, "cum_seq_q": None}
    query, key, value, grad, out = _heads_first(given, "query", "key", "value", "grad_out_", "out")
    lse = given["logsumexp"]
    assert (lse[..., query.shape[2] :] == math.inf).all()
    assert given["out"].is_contiguous()
    state = given["philox_seed"][None]
    grads = _backward(given, query, key, value, _corner(given), state, grad, out, lse[..., : query.shape[2]])
    return *(t.transpose(1, 2) for t in grads[:3]), None


_OPERATORS = {
    "_scaled_dot_product_flash_attention": _plain,
    "_scaled_dot_product_flash_attention_backward": _plain_backward,
    "_flash_attention_forward": _lower,
    "_flash_attention_backward": _lower_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_efficient_attention_forward": _corner_forward,
    "_efficient_attention_backward": _corner_backward,
}
