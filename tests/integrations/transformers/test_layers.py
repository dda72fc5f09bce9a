"""Layers with large head dims, images, encoders and relative positions give what eager attention gives."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.spy import Spy
from support.transformers_models import MODELS, OPERATOR, PADDING, TINY, TOKENS, attention_operators, close

import attnroute

# transformers renamed arguments and methods on the way; the old names work in every version that is
# supported.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")


def gemma4_layer(head_dim):
    """Return one global attention layer of Gemma 4 with 4 query and 1 key/value heads, and its inputs."""
    extra = {**MODELS["gemma4"][2], "global_head_dim": head_dim, "num_key_value_heads": 1}
    config = transformers.Gemma4TextConfig(**{**TINY, **extra}, attn_implementation="attnroute")
    torch.manual_seed(0)
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

    layer = Gemma4TextAttention(config, layer_idx=1)
    hidden = torch.randn(1, 12, 32, requires_grad=True)
    angles = torch.randn(1, 12, head_dim)
    return layer, {
        "hidden_states": hidden,
        "position_embeddings": (angles.cos(), angles.sin()),
        "shared_kv_states": {},
    }


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


def test_image_blocks_attend_both_ways():
    text = {key: value for key, value in {**TINY, **MODELS["gemma3"][2]}.items() if key != "eos_token_id"}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=transformers.SiglipVisionConfig(**vision, image_size=32, patch_size=8),
        mm_tokens_per_image=4,
        image_token_id=47,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    tokens = torch.tensor([[3, 4, 47, 47, 47, 47, 5, 6, 7]])
    inputs = {
        "input_ids": tokens,
        "pixel_values": torch.randn(1, 3, 32, 32),
        "token_type_ids": (tokens == 47).long(),
        "attention_mask": torch.ones_like(tokens),
    }

    def run(implementation):
        model.set_attn_implementation(implementation)
        out = model.generate(
            **inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        return torch.stack(out.logits)

    expected = run("eager")
    with Spy() as spy:
        found = run("attnroute")
    assert attention_operators(spy) == {OPERATOR["gemma3"]}
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
