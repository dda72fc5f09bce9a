"""Whole models give what their eager implementation gives, by the operator that each layer should get."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import transformers
from spy import Spy
from transformers import DynamicCache, StaticCache

import attnroute
from attnroute.integrations._transformers_carrier import CarriedMask
from attnroute.integrations.transformers import register

register()

# transformers renamed arguments and methods on the way; the old names work in every version that is supported.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")

TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
MODELS = {
    "llama": ("Llama", "LlamaConfig", {}),
    "qwen3": ("Qwen3", "Qwen3Config", {}),
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": 4}),
    "gemma2": ("Gemma2", "Gemma2Config", {**BOTH_KINDS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {**BOTH_KINDS, "query_pre_attn_scalar": 16}),
    "gemma4": (
        "Gemma4",
        "Gemma4TextConfig",
        {**BOTH_KINDS, "global_head_dim": 24, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 48},
    ),
    "gemma4-shared": (
        "Gemma4",
        "Gemma4TextConfig",
        {
            **BOTH_KINDS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 48,
        },
    ),
    "gpt_oss": ("GptOss", "GptOssConfig", {**BOTH_KINDS, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
# torch's CPU kernel knows neither softcap nor sinks; attnroute's own blocks do.
OPERATOR = dict.fromkeys(MODELS, "aten::_scaled_dot_product_flash_attention_for_cpu")
OPERATOR |= {"gemma2": "attnroute::chunked", "gpt_oss": "attnroute::chunked"}
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::scaled_dot_product_attention",
    "attnroute::chunked",
)
LENGTH = 9
PADDING = {
    "none": torch.ones(2, LENGTH, dtype=torch.int64),
    "left": torch.tensor([[1] * LENGTH, [0] * 3 + [1] * (LENGTH - 3)]),
    "right": torch.tensor([[1] * LENGTH, [1] * (LENGTH - 3) + [0] * 3]),
}
TOKENS = torch.randint(3, 48, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@lru_cache(maxsize=None)
def built(name):
    """Return a model with random weights; sinks and norms too, so that a lost one would show."""
    family, config, extra = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**{**TINY, **extra}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model.eval()


@pytest.fixture(params=list(MODELS))
def name(request):
    return request.param


def using(name, implementation):
    model = built(name)
    model.set_attn_implementation(implementation)
    model.zero_grad()
    return model.eval()


def attention_operators(spy):
    return {operator for operator in spy.seen if operator in ATTENTION}


def close(found, expected, kept=None):
    kept = slice(None) if kept is None else kept.bool()
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def both(name, function):
    """Return what eager gives and what attnroute gives, after seeing that the right operator ran and no other."""
    expected = function(using(name, "eager"))
    with Spy() as spy:
        found = function(using(name, "attnroute"))
    assert attention_operators(spy) == {OPERATOR[name]}
    return found, expected


@pytest.mark.parametrize("side", list(PADDING))
def test_logits(name, side):
    padding = PADDING[side]
    with torch.no_grad():
        found, expected = both(name, lambda model: model(TOKENS, attention_mask=padding).logits)
    close(found, expected, padding)


def test_logits_without_a_padding_mask(name):
    with torch.inference_mode():
        close(*both(name, lambda model: model(TOKENS).logits))


def step_by_step(model, padding, cache):
    """Return the logits of a prompt of four tokens, of two more at once, and of the others one by one."""
    logits = []
    for start, stop in [(0, 4), (4, 6), *((i, i + 1) for i in range(6, LENGTH))]:
        seen = padding[:, :stop]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, start:]
        out = model(TOKENS[:, start:stop], attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("side", ["none", "left"])
def test_cached_decoding(name, side):
    padding = PADDING[side]
    with torch.no_grad():
        found, expected = both(name, lambda model: step_by_step(model, padding, DynamicCache(config=model.config)))
    close(found, expected, padding)


def test_static_cache(name):
    def run(model):
        return step_by_step(model, PADDING["left"], StaticCache(config=model.config, max_cache_len=16))

    with torch.no_grad():
        found, expected = both(name, run)
    close(found, expected, PADDING["left"])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, cache):
    def run(model):
        padding = PADDING["left"]
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
        out = model.generate(
            TOKENS, attention_mask=padding, return_dict_in_generate=True, output_logits=True, **options
        )
        return torch.stack(out.logits)

    close(*both(name, run))


def test_beam_search():
    def run(model):
        return model.generate(TOKENS, attention_mask=PADDING["left"], max_new_tokens=5, num_beams=3, do_sample=False)

    found, expected = both("mistral", run)
    assert torch.equal(found, expected)


def gradients(model, padding, **checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    model.train()
    try:
        # What follows a padding token is no label either: what eager computes for rows without keys means nothing.
        labels = TOKENS.masked_fill((padding & torch.nn.functional.pad(padding[:, :-1], (1, 0))) == 0, -100)
        loss = model(TOKENS, attention_mask=padding, labels=labels, use_cache=False).loss
        loss.backward()
    finally:
        model.gradient_checkpointing_disable()
    found = {key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None}
    return loss.detach(), found


@pytest.mark.parametrize("side", ["left", "right"])
def test_training(name, side):
    (loss, found), (expected_loss, expected) = both(name, lambda model: gradients(model, PADDING[side]))
    close(loss[None], expected_loss[None])
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        close(gradient, expected[key])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*use_reentrant.*:UserWarning")
def test_gradient_checkpointing(name, reentrant):
    _, expected = gradients(using(name, "eager"), PADDING["left"])
    with Spy() as spy:
        _, found = gradients(using(name, "attnroute"), PADDING["left"], use_reentrant=reentrant)
    assert attention_operators(spy) == {OPERATOR[name]}
    assert sum(operator == OPERATOR[name] for operator in spy.seen) >= 2 * len(built(name).model.layers)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        close(gradient, expected[key])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma4"], indirect=True)
def test_packed_documents(name, rows):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6]])[:rows]

    def run(model):
        return model(TOKENS[:rows], position_ids=positions, use_cache=False).logits

    with torch.no_grad():
        found, expected = both(name, run)
        close(found, expected)
        alone = using(name, "attnroute")(TOKENS[:1, 4:7]).logits
    close(found[:1, 4:7], alone)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"], indirect=True)
@pytest.mark.parametrize("stated", ["with positions", "alone"])
def test_packed_documents_by_cumulative_lengths(name, stated):
    model = using(name, "attnroute")
    sums = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    kwargs = {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums.clone(), "max_length_q": 4, "max_length_k": 4}
    padding = None if stated == "with positions" else PADDING["none"][:1]
    with torch.no_grad():
        out = model(TOKENS[:1], position_ids=positions, attention_mask=padding, use_cache=False, **kwargs).logits
        for start, stop in [(0, 4), (4, 7), (7, 9)]:
            close(out[:, start:stop], using(name, "eager")(TOKENS[:1, start:stop]).logits)


def test_dropout_runs():
    model = using("llama", "attnroute")
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.5
    try:
        with Spy() as spy:
            loss, found = gradients(model, PADDING["left"])
        again, _ = gradients(model, PADDING["left"])
    finally:
        model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.0
    assert attention_operators(spy) == {"attnroute::chunked", OPERATOR["llama"]}
    assert loss != again
    assert all(gradient.isfinite().all() for gradient in found.values())


def masks_of(model, run):
    """Return the masks that the attention modules got in one forward pass."""
    got = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: got.append(kwargs["attention_mask"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    try:
        with torch.no_grad():
            run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return got


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma4-shared", 2)], indirect=["name"])
def test_layers_share_mask_objects(name, kinds):
    masks = masks_of(using(name, "attnroute"), lambda model: model(TOKENS, attention_mask=PADDING["left"], use_cache=False))
    assert all(isinstance(mask, CarriedMask) for mask in masks)
    assert len({id(mask.pattern.mask) for mask in masks}) == kinds
    assert len(masks) > kinds


def test_shared_layers_keep_the_object_of_the_last_token():
    masks = masks_of(
        using("gemma4-shared", "attnroute"),
        lambda model: model(TOKENS, attention_mask=PADDING["left"], logits_to_keep=1),
    )
    assert [mask.shape[2] for mask in masks] == [LENGTH, LENGTH, 1, 1]
    assert all(isinstance(mask, CarriedMask) for mask in masks)


def test_the_longest_prompt_of_a_static_cache_reads_no_empty_keys():
    model = using("llama", "attnroute")
    cache = StaticCache(config=model.config, max_cache_len=32)
    (mask, _) = masks_of(model, lambda model: model(TOKENS, past_key_values=cache, use_cache=True))
    assert mask.shape[-1] == 32
    assert mask.pattern.keys == (0, LENGTH)


def gemma4_layer(head_dim):
    """Return one global attention layer of Gemma 4 with 4 query and 1 key/value heads, and its inputs."""
    extra = {**MODELS["gemma4"][2], "global_head_dim": head_dim, "num_key_value_heads": 1}
    config = transformers.Gemma4TextConfig(**{**TINY, **extra}, attn_implementation="attnroute")
    torch.manual_seed(0)
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

    layer = Gemma4TextAttention(config, layer_idx=1)
    hidden = torch.randn(1, 12, 32, requires_grad=True)
    angles = torch.randn(1, 12, head_dim)
    return layer, {"hidden_states": hidden, "position_embeddings": (angles.cos(), angles.sin()), "shared_kv_states": {}}


@pytest.mark.parametrize("backend", [None, "chunked"])
@pytest.mark.parametrize("training", [False, True])
def test_gemma4_head_dim_512_never_reaches_math(training, backend):
    layer, inputs = gemma4_layer(512)
    assert layer.head_dim == 512
    assert layer.num_key_value_groups == 4

    def run():
        out, _ = layer(**inputs, attention_mask=None)
        return torch.autograd.grad(out.square().sum(), inputs["hidden_states"])[0] if training else out

    with Spy() as spy, torch.set_grad_enabled(training), attnroute.override(backend=backend):
        found = run()
    expected_operator = "attnroute::chunked" if backend else OPERATOR["gemma4"]
    assert attention_operators(spy) == {expected_operator}
    layer.config._attn_implementation = "eager"
    causal = torch.full((12, 12), -torch.inf).triu(1)
    with torch.set_grad_enabled(training):
        out, _ = layer(**inputs, attention_mask=causal[None, None])
        expected = torch.autograd.grad(out.square().sum(), inputs["hidden_states"])[0] if training else out
    close(found, expected)


def test_encoders_attend_both_ways():
    config = transformers.BertConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    for padding in (None, PADDING["left"]):
        with torch.no_grad():
            model.set_attn_implementation("eager")
            expected = model(TOKENS, attention_mask=padding).last_hidden_state
            model.set_attn_implementation("attnroute")
            with Spy() as spy:
                found = model(TOKENS, attention_mask=padding).last_hidden_state
        assert attention_operators(spy) == {OPERATOR["llama"]}
        close(found, expected, padding)


def test_biased_encoders_and_decoders():
    config = transformers.T5Config(
        vocab_size=48, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()

    def run(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(TOKENS, attention_mask=PADDING["right"], labels=TOKENS[:, :5].contiguous())
        out.loss.backward()
        table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        return out.logits.detach(), table.grad.clone()

    expected = run("eager")
    with Spy() as spy:
        found = run("attnroute")
    assert attention_operators(spy) <= {OPERATOR["llama"], "attnroute::chunked"}
    assert "attnroute::chunked" in spy.seen  # The bias wants a gradient, which torch's kernel does not give.
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_model_stops_at_attention_and_goes_on():
    model = using("gemma3", "attnroute")
    with torch.no_grad():
        expected = model(TOKENS, attention_mask=PADDING["left"]).logits
        compiled = torch.compile(model, backend="eager")
        close(compiled(TOKENS, attention_mask=PADDING["left"]).logits, expected, PADDING["left"])
    torch._dynamo.reset()
