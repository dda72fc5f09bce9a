"""Small models of each family, in the form in which transformers' common tests ask for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

BATCH, LENGTH, VOCABULARY = 3, 7, 99
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
BOTH_KINDS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "head_dim": 16,
}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 37 for part in ("encoder", "decoder")},
}
PICTURE = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
NO_TOKENS = {"test_resize_embeddings": False}


@dataclass(frozen=True)
class Family:
    """Classes of one family, and a small configuration for all of them.

    Attributes:
        config: Name of the configuration class.
        models: Names of the model classes.
        settings: Arguments of the configuration.
        inputs: Which inputs the models take: "text", "pair", "sound" or "picture".
        attributes: What the tests ask of a family besides, under the names of transformers' test class.
    """

    config: str
    models: tuple[str, ...]
    settings: dict[str, Any]
    inputs: str = "text"
    attributes: dict[str, Any] = field(default_factory=dict)


def _decoder(
    stem: str, settings: dict[str, Any], *heads: str, config: str | None = None, **attributes: Any
) -> Family:
    models = tuple(f"{stem}{end}" for end in ("Model", "ForCausalLM", *heads))
    return Family(f"{stem}Config", models, settings, attributes=attributes)


HEADS = ("ForSequenceClassification", "ForTokenClassification")
FAMILIES = {
    "llama": _decoder("Llama", GROUPED, *HEADS),
    "mistral": _decoder("Mistral", {**GROUPED, "sliding_window": 4}, *HEADS),
    "qwen2": _decoder("Qwen2", GROUPED, *HEADS),
    "qwen3": _decoder("Qwen3", {**GROUPED, "head_dim": 16}, *HEADS),
    "phi3": _decoder("Phi3", GROUPED, *HEADS),
    "gemma2": _decoder("Gemma2", {**GROUPED, **BOTH_KINDS, "attn_logit_softcapping": 2.0}, *HEADS),
    "gpt_oss": _decoder(
        "GptOss",
        {
            **GROUPED,
            **BOTH_KINDS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            # Grouped matrix products want rows of 16 bytes.
            "intermediate_size": 40,
        },
        *HEADS,
        # An expert to which no token went has no gradient.
        test_all_params_have_gradient=False,
    ),
    "gemma3": Family("Gemma3TextConfig", ("Gemma3TextModel", "Gemma3ForCausalLM"), {**GROUPED, **BOTH_KINDS}),
    "gpt2": Family(
        "GPT2Config",
        ("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForTokenClassification"),
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "bert": Family(
        "BertConfig",
        ("BertModel", "BertForMaskedLM", "BertLMHeadModel", *(f"Bert{head}" for head in HEADS)),
        SMALL,
    ),
    "bart": Family("BartConfig", ("BartModel", "BartForConditionalGeneration"), ENCODER_DECODER, "pair"),
    "t5": Family(
        "T5Config",
        ("T5Model", "T5ForConditionalGeneration"),
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 37,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        "pair",
    ),
    "whisper": Family(
        "WhisperConfig",
        ("WhisperModel", "WhisperForConditionalGeneration"),
        {
            **{name: value for name, value in ENCODER_DECODER.items() if name != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
        },
        "sound",
    ),
    "vit": Family("ViTConfig", ("ViTModel", "ViTForImageClassification"), PICTURE, "picture", NO_TOKENS),
    "siglip": Family("SiglipVisionConfig", ("SiglipVisionModel",), PICTURE, "picture", NO_TOKENS),
    "clip_text": Family(
        "CLIPTextConfig",
        ("CLIPTextModel",),
        SMALL,
        attributes={"test_resize_embeddings": False},
    ),
    "clip_vision": Family(
        "CLIPVisionConfig",
        ("CLIPVisionModel",),
        PICTURE,
        "picture",
        NO_TOKENS,
    ),
}


class ModelTester:
    """What transformers calls a model tester: it makes a configuration and inputs."""

    is_training = True
    batch_size = BATCH
    seq_length = LENGTH
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    image_size = 16
    patch_size = 4
    mask_length = 16
    num_masks = 2

    def __init__(self, family: Family) -> None:
        self.family = family
        if family.inputs == "picture":
            # One token more for the whole picture, but not in SigLIP.
            self.seq_length = self.mask_length + ("Siglip" not in family.config)
        if family.inputs == "sound":
            self.encoder_seq_length = self.key_length = 16

    def get_config(self) -> Any:
        return getattr(transformers, self.family.config)(**copy.deepcopy(self.family.settings))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.get_config(), INPUTS[self.family.inputs]()


def _text(low: int = 3) -> dict[str, torch.Tensor]:
    keep = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    keep[-1, -2:] = 0
    return {"input_ids": torch.randint(low, VOCABULARY, (BATCH, LENGTH)), "attention_mask": keep}


def _decoder_text() -> dict[str, torch.Tensor]:
    text = _text()
    return {"decoder_input_ids": text["input_ids"], "decoder_attention_mask": text["attention_mask"]}


def _picture() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(BATCH, 3, 16, 16)}


INPUTS = {
    "text": _text,
    "pair": lambda: {**_text(), **_decoder_text()},
    "sound": lambda: {"input_features": torch.rand(BATCH, 8, 32), **_decoder_text()},
    "picture": _picture,
}
