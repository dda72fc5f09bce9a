"""A compiled model is one graph, in which no mask is as large as the scores where none is needed."""

from __future__ import annotations

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func
from support.transformers_models import LENGTH, PADDING, TOKENS, close, using
from torch._dynamo.backends.common import aot_autograd
from transformers import masking_utils

from attnroute import override
from attnroute.api import graph
from attnroute.integrations.transformers.mask_interface import make_mask
from attnroute.masks import Causal

# transformers renamed arguments on the way; the old names work in every version that is supported.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODER_DECODER = {
    "vocab_size": 48,
    "d_model": 32,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
    "decoder_start_token_id": 1,
}
PICTURES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
SOUNDS = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))
PAIR = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
OTHERS = {
    "bert": ("BertModel", "BertConfig", SMALL, {"input_ids": TOKENS}),
    "bert-decoder": ("BertModel", "BertConfig", {**SMALL, "is_decoder": True}, {"input_ids": TOKENS}),
    "bart": ("BartModel", "BartConfig", ENCODER_DECODER, PAIR),
    "t5": (
        "T5Model",
        "T5Config",
        {"vocab_size": 48, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        PAIR,
    ),
    "whisper": (
        "WhisperModel",
        "WhisperConfig",
        {
            **ENCODER_DECODER,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        {"input_features": SOUNDS, "decoder_input_ids": TOKENS[:, :5]},
    ),
    "vit": (
        "ViTModel",
        "ViTConfig",
        {**SMALL, "image_size": 16, "patch_size": 4},
        {"pixel_values": PICTURES},
    ),
    "siglip": (
        "SiglipVisionModel",
        "SiglipVisionConfig",
        {**SMALL, "image_size": 16, "patch_size": 4},
        {"pixel_values": PICTURES},
    ),
}
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
DECODERS = ["llama", "mistral", "gemma2", "gemma3", "gpt_oss"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts graphs and lists the shapes of the bool tensors in them."""

    def __init__(self):
        self.count = 0
        self.masks = []

    def __call__(self, module, inputs):
        self.count += 1
        return aot_autograd(fw_compiler=self.look, bw_compiler=lambda graph, _: make_boxed_func(graph))(
            module, inputs
        )

    def look(self, graph, _):
        found = [node.meta.get("val") for node in graph.graph.nodes]
        tensors = [value for value in found if isinstance(value, torch.Tensor)]
        self.masks += [tuple(value.shape) for value in tensors if value.dtype == torch.bool]
        return make_boxed_func(graph)

    def squares(self, length=LENGTH):
        return [shape for shape in self.masks if shape[-2:] == (length, length)]


def output_and_gradients(model, run, inputs):
    model.zero_grad()
    out = run(**inputs)[0]
    out.square().mean().backward()
    # A graph gives zeros to heads of which nothing was asked, and eager gives them none.
    grads = {key: w.grad.clone() for key, w in model.named_parameters() if w.grad is not None}
    return out.detach(), {key: grad for key, grad in grads.items() if grad.any()}


def check_one_graph(model, inputs, padding=None):
    """Train eagerly and in one graph; return what the graph holds."""
    graphs = Graphs()
    run = torch.compile(model, backend=graphs, fullgraph=True)
    found, gradients = output_and_gradients(model, run, inputs)
    model.set_attn_implementation("eager")
    expected, expected_gradients = output_and_gradients(model, model, inputs)
    close(found, expected, padding)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[key], rtol=1e-4, atol=1e-5 * largest)
    assert graphs.count == 1
    return graphs


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_train_in_one_graph(name):
    inputs = {"input_ids": TOKENS, "use_cache": True}
    graphs = check_one_graph(using(name, "attnroute"), inputs)
    if name == "llama":
        assert not graphs.squares()


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_windows_reach_the_kernels_of_a_graph(name):
    with override(backend="chunked"):
        graphs = check_one_graph(using(name, "attnroute"), {"input_ids": TOKENS, "use_cache": True})
    assert not graphs.squares()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padding_reaches_the_kernels_of_a_graph(name, side):
    padding = PADDING[side]
    model = using(name, "attnroute")

    def run(**inputs):
        return (model(**inputs).logits * padding[..., None],)

    inputs = {"input_ids": TOKENS, "attention_mask": padding, "use_cache": False}
    graphs = Graphs()
    with torch.no_grad(), override(backend="chunked"):
        found = torch.compile(run, backend=graphs, fullgraph=True)(**inputs)[0]
        model.set_attn_implementation("eager")
        close(found, run(**inputs)[0], padding)
    assert graphs.count == 1
    assert not graphs.squares()


def test_a_graph_takes_no_function_of_somebody_else_for_a_window():
    """`local_size` is also the size of chunks, or stands beside a function of somebody else."""
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))

    def run():
        return make_mask(1, LENGTH, LENGTH, mask_function=chunks, local_size=4)

    found = torch.compile(run, backend="aot_eager", fullgraph=True)()
    expected = masking_utils.sdpa_mask(1, LENGTH, LENGTH, mask_function=chunks, local_size=4)
    assert torch.equal(found, expected)


def test_a_graph_takes_no_function_of_a_caller_for_the_window_of_a_config():
    """Whatever else is said, the function alone says what is masked."""
    config = using("mistral", "attnroute").config

    def run():
        def every_second(batch, head, query, key):
            return (query - key) % 2 == 0

        stated = {"local_size": config.sliding_window, "config": config, "allow_is_causal_skip": True}
        return make_mask(1, LENGTH, LENGTH, mask_function=every_second, **stated)

    places = torch.arange(LENGTH)
    expected = (places[:, None] - places) % 2 == 0
    found = torch.compile(run, backend="aot_eager", fullgraph=True)()
    assert torch.equal(found, expected.expand(1, 1, LENGTH, LENGTH))


def packed(rows, sums):
    """Return the inputs of packed rows; with `sums`, what transformers' collator adds for one row."""
    stated = {}
    if sums:
        lengths = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
        stated = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    return {"input_ids": TOKENS[:rows], "position_ids": POSITIONS[:rows], "use_cache": False, **stated}


@pytest.mark.parametrize(("name", "rows", "sums"), [("llama", 2, False), ("gemma3", 1, True)])
def test_packed_documents_reach_the_kernels_of_a_graph(name, rows, sums):
    with override(backend="chunked"):
        graphs = check_one_graph(using(name, "attnroute"), packed(rows, sums))
    assert not graphs.squares()


def test_documents_stated_by_sums_reach_kernels_as_sums(monkeypatch):
    given, original = [], graph.dispatch.run

    def run(call):
        given.append(call.mask)
        return original(call)

    monkeypatch.setattr(graph.dispatch, "run", run)
    with torch.no_grad():
        torch.compile(using("llama", "attnroute"), backend="aot_eager", fullgraph=True)(
            **packed(1, sums=True)
        )
    for mask in given:
        causal, documents = mask.nodes
        assert causal == Causal()
        assert documents.cu_seqlens is not None


@pytest.mark.parametrize("wrong", ["positions", "sums"])
def test_a_graph_says_what_documents_it_does_not_take(wrong):
    inputs = packed(1, sums=True)
    run = torch.compile(using("llama", "attnroute"), backend="aot_eager", fullgraph=True)
    if wrong == "sums":
        inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
        with torch.no_grad(), pytest.raises(RuntimeError, match="cu_seqlens requires the documents that"):
            run(**inputs)
        return
    ids, positions = torch.zeros(1, LENGTH, dtype=torch.int64), torch.arange(LENGTH)[None] * 2

    def mask(ids, positions):
        inner = masking_utils.remap_positions_for_packed_sequence(
            masking_utils.causal_mask_function, positions
        )
        documents = masking_utils.packed_sequence_mask_function(ids)
        return make_mask(1, LENGTH, LENGTH, mask_function=masking_utils.and_masks(inner, documents))

    with pytest.raises(RuntimeError, match="position_ids that go up by one in each document"):
        torch.compile(mask, backend="aot_eager", fullgraph=True)(ids, positions)


@pytest.mark.parametrize(("name", "side"), [("llama", "none"), ("gemma3", "left"), ("gemma3", "right")])
def test_prompts_of_a_static_cache_reach_the_kernels_of_a_graph(name, side):
    """A prompt in two parts; the second one begins at a key that no graph knows."""
    graphs, cut = Graphs(), 5
    padding = PADDING[side]

    def prompts(model, run):
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 7)
        outs = []
        for part in (slice(0, cut), slice(cut, LENGTH)):
            keep = None if side == "none" else padding[:, : part.stop]
            given = {"input_ids": TOKENS[:, part], "attention_mask": keep, "past_key_values": cache}
            outs.append(run(**given, use_cache=True).logits)
        return torch.cat(outs, 1)

    with torch.no_grad(), override(backend="chunked"):
        model = using(name, "attnroute")
        found = prompts(model, torch.compile(model, backend=graphs, fullgraph=True, dynamic=False))
    with torch.no_grad():
        model = using(name, "eager")
        close(found, prompts(model, model), padding)
    assert graphs.count == 2
    assert not [shape for shape in graphs.masks if len(shape) == 4 and shape[-2] > 1 and shape[-1] > 1]


@pytest.mark.parametrize("name", list(OTHERS))
def test_encoders_and_vision_towers_train_in_one_graph(name):
    kind, config, settings, inputs = OTHERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    model.set_attn_implementation("attnroute")
    assert not check_one_graph(model, inputs).squares() or name == "t5"


def test_an_encoder_with_padding_trains_in_one_graph():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    model.set_attn_implementation("attnroute")

    def run(**inputs):
        return (model(**inputs)[0] * PADDING["right"][..., None],)

    graphs = Graphs()
    inputs = {"input_ids": TOKENS, "attention_mask": PADDING["right"]}
    found, _ = output_and_gradients(model, torch.compile(run, backend=graphs, fullgraph=True), inputs)
    model.set_attn_implementation("eager")
    close(found, output_and_gradients(model, run, inputs)[0], PADDING["right"])
    assert graphs.count == 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_dynamic_cache_takes_no_mask_that_a_graph_can_do_without(name):
    """A prompt, then tokens one by one: one graph for the prompt and, as with sdpa, two for tokens."""

    def steps(model, run):
        cache = transformers.DynamicCache(config=model.config)
        spans = [(0, 4), *((i, i + 1) for i in range(4, LENGTH))]
        outs = [run(TOKENS[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in spans]
        return torch.cat(outs, 1)

    with torch.no_grad():
        graphs = Graphs()
        model = using(name, "attnroute")
        found = steps(model, torch.compile(model, backend=graphs, fullgraph=True))
        model = using(name, "eager")
        close(found, steps(model, model))
    if name == "llama":
        assert graphs.count == 3
        assert not [shape for shape in graphs.masks if len(shape) == 4]
