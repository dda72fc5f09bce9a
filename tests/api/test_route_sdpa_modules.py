"""Modules of torch and blocks as scripts write them run on attnroute inside of `route_sdpa()`."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.routed import KEY, QUERY, TOKENS, VALUE, multi_head, routed_calls
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

PADDING = torch.tensor([[False] * 8, [False] * 5 + [True] * 3])


class Block(nn.Module):
    """A block as LLaMA scripts write it, with the function imported before."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return imported_before(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def encoder(*, training, **named):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).train(training)
    return module, lambda: module(TOKENS, **named)


def decoder(*, training):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    module = nn.TransformerDecoder(layer, 2).train(training)
    return module, lambda: module(TOKENS[:, :5], TOKENS, tgt_mask=CAUSAL[:5, :5], tgt_is_causal=True)


def transformer(*, training):
    torch.manual_seed(0)
    module = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True).train(training)
    return module, lambda: module(
        TOKENS, TOKENS[:, :5], tgt_mask=CAUSAL[:5, :5], memory_key_padding_mask=PADDING
    )


def hand_written():
    torch.manual_seed(0)
    module = Block()
    return module, lambda: module(TOKENS)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(8)
MODULES = {
    "multi-head": (multi_head, 1),
    "multi-head, padding": (lambda: multi_head(key_padding_mask=PADDING), 1),
    "multi-head, causal": (lambda: multi_head(attn_mask=CAUSAL, is_causal=True), 1),
    "encoder, train": (lambda: encoder(training=True), 2),
    "encoder, eval": (lambda: encoder(training=False), 2),
    "encoder, causal": (lambda: encoder(training=False, mask=CAUSAL, is_causal=True), 2),
    "encoder, padding": (lambda: encoder(training=False, src_key_padding_mask=PADDING), 2),
    "decoder, train": (lambda: decoder(training=True), 4),
    "decoder, eval": (lambda: decoder(training=False), 4),
    "transformer, train": (lambda: transformer(training=True), 6),
    "transformer, eval": (lambda: transformer(training=False), 6),
    "hand-written": (hand_written, 1),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("make", "expected"), MODULES.values(), ids=MODULES)
def test_modules_are_routed_and_give_what_they_gave(make, expected, grad):
    module, run = make()
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        # What torch says of nested tensors.
        warnings.simplefilter("ignore")
        want = run()
        got, calls = routed_calls(run)
    assert calls == expected
    # Where torch leaves padded tokens out, it gives zeros for them.
    at = slice(0, 5) if got.shape != want.shape or (want[1, 5:] == 0).all() else slice(None)
    torch.testing.assert_close(got[:, at], want[:, at], atol=1e-5, rtol=1e-5)
    if grad:
        parameters = list(module.parameters())
        both = [torch.autograd.grad(out.square().sum(), parameters) for out in (got, want)]
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backward", ["method", "function", "grad"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_is_routed_as_its_forward_was(backward, use_reentrant):
    if use_reentrant and backward == "grad":
        # torch refuses it.
        return
    query = QUERY.clone().requires_grad_()

    def run():
        def call(q):
            return F.scaled_dot_product_attention(q, KEY, VALUE)

        loss = checkpoint(call, query, use_reentrant=use_reentrant).sum()
        if backward == "grad":
            torch.autograd.grad(loss, [query])
        elif backward == "method":
            loss.backward()
        else:
            torch.autograd.backward([loss])

    # Otherwise a recompute ends inside of the kernel.
    with set_checkpoint_early_stop(False):
        assert routed_calls(run)[1] == 2
