"""Small transformers models with random weights: which operator ran in them, which masks arrived."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from support.spy import Spy
from transformers import masking_utils as hf

from attnroute.integrations.transformers import register

register()

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
    "gemma2": (
        "Gemma2",
        "Gemma2Config",
        {**BOTH_KINDS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {**BOTH_KINDS, "query_pre_attn_scalar": 16}),
    "gemma4": (
        "Gemma4",
        "Gemma4TextConfig",
        {
            **BOTH_KINDS,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 48,
        },
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
    "cohere2": ("Cohere2", "Cohere2Config", BOTH_KINDS),
    "olmo3": ("Olmo3", "Olmo3Config", BOTH_KINDS),
    "gpt_oss": ("GptOss", "GptOssConfig", {**BOTH_KINDS, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
# torch's CPU kernel knows no softcap; attnroute's own blocks do. A sink is put in from its log-sum-exp.
OPERATOR = dict.fromkeys(MODELS, "aten::_scaled_dot_product_flash_attention_for_cpu")
OPERATOR["gemma2"] = "attnroute::chunked"
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


@cache
def built(name):
    """Return a model with random weights; sinks and norms too, so that a lost one would show."""
    family, config, extra = MODELS[name]
    torch.manual_seed(0)
    # The model is kept for other tests, whoever asks for it first.
    with torch.inference_mode(mode=False):
        model = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, config)(**{**TINY, **extra})
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.3)
    return model.eval()


def using(name, implementation):
    model = built(name)
    model.set_attn_implementation(implementation)
    model.zero_grad()
    return model.eval()


def attention_operators(spy):
    return {operator for operator in spy.seen if operator in ATTENTION}


def close(found, expected, kept=None):
    kept = slice(None) if kept is None else kept.bool()
    torch.testing.assert_close(
        found[kept], expected[kept], rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


def both(name, function):
    """Return what attnroute and eager give, after seeing that the right operator ran and no other."""
    expected = function(using(name, "eager"))
    with Spy() as spy:
        found = function(using(name, "attnroute"))
    assert attention_operators(spy) == {OPERATOR[name]}
    return found, expected


def masks_of(model, run):
    """Return the masks that the attention modules got in one forward pass."""
    got = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: got.append(kwargs["attention_mask"]), with_kwargs=True
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


def materialized(mask, size):
    """Return what the mask object and the range of keys say, as a dense mask."""
    pattern = mask.pattern
    start, stop = pattern.keys
    whole = torch.zeros(size["batch_size"], 1, size["q_length"], size["kv_length"], dtype=torch.bool)
    whole[..., start:stop] = pattern.mask.materialize(
        size["q_length"], stop - start, batch=size["batch_size"]
    )
    return whole


def packed_function(positions, inner=hf.causal_mask_function):
    """Return the mask function that transformers builds for packed documents."""
    ids = hf.find_packed_sequence_indices(positions)
    remapped = hf.remap_positions_for_packed_sequence(inner, positions)
    return hf.and_masks(remapped, hf.packed_sequence_mask_function(ids))
