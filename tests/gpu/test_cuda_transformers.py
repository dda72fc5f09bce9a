"""Compiled transformers models on a CUDA device: CUDA graphs, and masks that live there."""

from __future__ import annotations

import pytest
import torch
from support.transformers_models import PADDING, TOKENS, built, close, using
from torch._dynamo.utils import counters

from attnroute.integrations.transformers.mask_interface import make_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
    # What torch says of small models: that TF32 is off, that shapes are too small for some kernels.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(params=["mistral", "gemma3", "olmo3"])
def name(request):
    torch.compiler.reset()
    counters.clear()
    built(request.param).cuda()
    yield request.param
    for layer in built(request.param).model.layers:
        layer._compiled_call_impl = None
    built(request.param).cpu()
    torch.compiler.reset()


def generated(name, implementation, *, compiled):
    model = using(name, implementation)
    vars(model).pop("_compiled_call", None)
    out = model.generate(
        TOKENS.cuda(),
        attention_mask=PADDING["left"].cuda(),
        max_new_tokens=12,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not compiled,
        return_dict_in_generate=True,
        output_logits=True,
    )
    vars(model).pop("_compiled_call", None)
    return torch.stack(out.logits)


def test_generation_compiles_by_itself(name):
    expected = generated(name, "eager", compiled=False)
    counters.clear()
    found = generated(name, "attnroute", compiled=True)
    assert counters["stats"]["unique_graphs"] >= 1
    close(found, expected)


def test_layers_in_cuda_graphs(name):
    lengths = [(9, "left"), (9, "right"), (7, "left"), (6, "right")]

    def run(model, length, side):
        padding = PADDING[side][:, :length].cuda()
        torch.compiler.cudagraph_mark_step_begin()
        return model(TOKENS[:, :length].cuda(), attention_mask=padding, use_cache=False).logits.clone()

    with torch.no_grad():
        eager = using(name, "eager")
        expected = [run(eager, length, side) for length, side in lengths]
        model = using(name, "attnroute")
        for layer in model.model.layers:
            layer.compile(mode="reduce-overhead", fullgraph=True)
        for (length, side), wanted in zip(lengths, expected, strict=True):
            for _ in range(3):
                close(run(model, length, side), wanted, PADDING[side][:, :length].cuda())


def test_masks_lie_on_one_device():
    mask = make_mask(2, 4, 6, 2, device="cuda")
    parts = [getattr(mask, name) for name in mask.__tensor_flatten__()[0]]
    assert {part.device for part in (mask, mask.dense(), *parts)} == {torch.ones(1, device="cuda").device}
    assert torch.equal(torch.vmap(torch.logical_not)(mask), ~mask.dense())
