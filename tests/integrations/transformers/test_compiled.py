"""Compiled models, layers, export and vmap give what eager attention gives; graphs hold for later steps."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers
from support.transformers_models import LENGTH, MODELS, PADDING, TOKENS, close, masks_of, using

from attnroute.integrations.transformers.carried_mask import CarriedMask

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
    # What dynamo says about transformers' own code.
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning"),
]
NAMES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "cohere2", "olmo3", "gpt_oss"]
LENGTHS = [(9, "left"), (7, "right"), (6, "left")]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def compiled_layers():
    """Compile every layer of a model by itself, and undo it afterwards."""
    compiled = []

    def compile_layers(name, **options):
        model = using(name, "attnroute")
        for layer in model.model.layers:
            layer.compile(fullgraph=True, **options)
            compiled.append(layer)
        return model

    yield compile_layers
    for layer in compiled:
        layer._compiled_call_impl = None


def eagerly(name):
    """Return the model with eager attention, nothing of it compiled."""
    model = using(name, "eager")
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    return model


def logits(model, length, side, **options):
    padding = PADDING[side][:, :length]
    return model(TOKENS[:, :length], attention_mask=padding, use_cache=False, **options).logits


def check_lengths(run, name):
    with torch.no_grad():
        found = [run(length, side) for length, side in LENGTHS]
        eager = eagerly(name)
        for (length, side), one in zip(LENGTHS, found, strict=True):
            close(one, logits(eager, length, side), PADDING[side][:, :length])


@pytest.mark.parametrize("name", NAMES)
def test_compiled_model(name):
    model = torch.compile(using(name, "attnroute"), backend="eager", fullgraph=True)
    check_lengths(lambda length, side: logits(model, length, side), name)
    assert graphs() == 2


@pytest.mark.parametrize("name", NAMES)
def test_compiled_layers(name, compiled_layers):
    model = compiled_layers(name, backend="eager")
    check_lengths(lambda length, side: logits(model, length, side), name)
    # One graph for the first length and one for all others. Layers with windows and without share them, but
    # not where head dims or rotations differ.
    assert graphs() == (4 if name in ("gemma4", "cohere2") else 2)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "olmo3"])
def test_compiled_layers_where_the_compiler_does_not_say_so(name, compiled_layers, monkeypatch):
    """In torch 2.11, `is_compiling` says no while torch.compile's own code looks at inputs."""
    monkeypatch.setattr(torch.compiler, "_compile_session_context", nullcontext, raising=False)
    test_compiled_layers(name, compiled_layers)


def loss_and_gradients(model, run):
    # What padding predicts is no label: what eager computes for rows without keys means nothing.
    labels = TOKENS.masked_fill(PADDING["right"] == 0, -100)
    loss = run(TOKENS, attention_mask=PADDING["right"], labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {key: w.grad.clone() for key, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize(
    ("name", "what", "backend"),
    [
        ("gemma3", "model", "aot_eager"),
        ("gemma3", "layers", "aot_eager"),
        ("gpt_oss", "layers", "aot_eager"),
        ("mistral", "layers", "inductor"),
    ],
)
def test_compiled_training(name, what, backend, compiled_layers):
    if what == "layers":
        model = run = compiled_layers(name, backend=backend)
    else:
        model = using(name, "attnroute")
        run = torch.compile(model, backend=backend, fullgraph=True)
    loss, found = loss_and_gradients(model, run)
    eager = eagerly(name)
    expected_loss, expected = loss_and_gradients(eager, eager)
    close(loss[None], expected_loss[None])
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        close(gradient, expected[key])


def generated(name, implementation, config):
    model = using(name, implementation)
    # A model keeps its first compiled call.
    vars(model).pop("_compiled_call", None)
    out = model.generate(
        TOKENS,
        attention_mask=PADDING["left"],
        max_new_tokens=12,
        do_sample=False,
        cache_implementation="static",
        compile_config=config,
        disable_compile=config is None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    vars(model).pop("_compiled_call", None)
    return torch.stack(out.logits)


@pytest.mark.parametrize(
    ("name", "backend"), [(name, "inductor" if name == "gemma3" else "eager") for name in NAMES]
)
def test_compiled_generation_with_a_static_cache(name, backend):
    """Tokens go beyond the window, so that sliding caches come to drop keys."""
    config = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    found = generated(name, "attnroute", config)
    windows = "sliding_window" in MODELS[name][2]
    # As with transformers' own implementations: sliding caches need a second graph once they are full.
    assert graphs() == 1 + windows
    close(found, generated(name, "eager", None))


@pytest.mark.parametrize("sums", [False, True])
def test_packed_documents_in_compiled_layers(sums, compiled_layers):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    options = {"position_ids": positions, "use_cache": False}
    if sums:
        lengths = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
        options |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths.clone(), "position_ids": positions[:1]}
    rows = len(options["position_ids"])
    with torch.no_grad():
        found = compiled_layers("gemma3", backend="aot_eager")(TOKENS[:rows], **options).logits
        options = {"position_ids": positions[:rows], "use_cache": False}
        close(found, eagerly("gemma3")(TOKENS[:rows], **options).logits)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("lengths", [[LENGTH], [LENGTH, 5]], ids=["one length", "open length"])
def test_exported_model(strict, lengths):
    given = {"input_ids": TOKENS, "attention_mask": PADDING["none"], "use_cache": False}
    length = {1: torch.export.Dim("length", min=2, max=64)} if len(lengths) > 1 else None
    shapes = {"input_ids": length, "attention_mask": length, "use_cache": None}
    with torch.no_grad():
        model = using("gemma3", "attnroute")
        program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=strict).module()
        for n in lengths:
            padding = PADDING["left"][:, :n]
            found = program(input_ids=TOKENS[:, :n], attention_mask=padding, use_cache=False).logits
            close(found, logits(using("gemma3", "eager"), n, "left"), padding)


def test_vmap_over_a_model():
    model = using("olmo3", "attnroute")

    def one(tokens, padding):
        return model(tokens[None], attention_mask=padding[None], use_cache=False).logits[0]

    with torch.no_grad():
        found = torch.vmap(one)(TOKENS, PADDING["left"])
        close(found, logits(using("olmo3", "eager"), LENGTH, "left"), PADDING["left"])


def sliding_layer():
    """Return a layer of Mistral, what it got from the model, and what it gives with the dense mask."""
    model = using("mistral", "attnroute")
    got = []
    layer = model.model.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: got.append((args, kwargs)), with_kwargs=True
    )
    (mask, _) = masks_of(model, lambda model: model(TOKENS, attention_mask=PADDING["left"], use_cache=False))
    hook.remove()
    (hidden,), kwargs = got[0]
    assert isinstance(mask, CarriedMask)
    given = {key: value for key, value in kwargs.items() if key in ("position_embeddings", "attention_mask")}
    with torch.no_grad():
        expected = layer(hidden, **{**given, "attention_mask": mask.dense().clone()})
    return layer, hidden.detach(), given, expected


@pytest.mark.parametrize("strict", [False, True])
def test_a_mask_as_an_example_of_export(strict):
    layer, hidden, given, expected = sliding_layer()
    with torch.no_grad():
        program = torch.export.export(layer, (hidden,), given, strict=strict)
        assert program.graph_signature.user_inputs
        close(program.module()(hidden, **given), expected, PADDING["left"])


def test_a_mask_mapped_by_vmap():
    layer, hidden, given, expected = sliding_layer()
    cos, sin = given["position_embeddings"]

    def one(hidden, mask):
        return layer(hidden[None], position_embeddings=(cos, sin), attention_mask=mask[None])[0]

    with torch.no_grad():
        cos, sin = cos[:1], sin[:1]
        close(torch.vmap(one)(hidden, given["attention_mask"]), expected, PADDING["left"])
