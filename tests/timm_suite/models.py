"""Small models of timm inside of `route_sdpa()`: eager, trained and compiled."""

from __future__ import annotations

import pytest
import timm
import torch
from support.routed import counted_calls, routed_calls
from timm.layers import set_fused_attn
from torch._dynamo.testing import CompileCounterWithBackend

import attnroute

MODELS = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 32, "depth": 2},
    "vit_base_patch16_siglip_224": {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "beit_base_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 4},
    "cait_xxs24_224": {"img_size": 32, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (2, 2)},
    "maxvit_tiny_rw_224": {"img_size": 64},
    "pvt_v2_b0": {},
    "xcit_nano_12_p16_224": {"img_size": 32},
}
"""Of each way in which timm's models call attention, and their settings."""


@pytest.fixture(autouse=True)
def fused():
    """Let the models of windows call torch's function too, which timm leaves out unless asked."""
    torch.compiler.reset()
    set_fused_attn(enable=True, experimental=True)
    yield
    set_fused_attn(enable=True)
    torch.compiler.reset()


def made(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **MODELS[name]).eval()
    size = MODELS[name].get("img_size", 64)
    return model, torch.randn(2, 3, size, size)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_it_gave_and_every_call_is_routed(name):
    model, images = made(name)
    with torch.no_grad():
        want, calls = counted_calls(lambda: model(images))
        got, routed = routed_calls(lambda: model(images))
    assert routed == calls > 0
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_gradients_that_it_gave(name):
    model, images = made(name)

    def trained():
        parameters = list(model.parameters())
        return torch.autograd.grad(model(images).square().sum(), parameters, allow_unused=True)

    want = trained()
    with attnroute.override(backend="chunked"):
        got, routed = routed_calls(trained)
    assert routed
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_has_as_many_graphs_as_with_torchs_own_attention(name):
    model, images = made(name)
    stock, ours = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        want = torch.compile(model, backend=stock)(images)
        torch.compiler.reset()
        with attnroute.trace() as trace, attnroute.route_sdpa(), attnroute.override(backend="chunked"):
            got = torch.compile(model, backend=ours)(images)
    assert {(call.how, call.backend) for call in trace.calls} == {("compiled", "chunked")}
    assert ours.frame_count == stock.frame_count
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
