"""Whole models give what their eager implementation gives, by the operator that each layer should get."""

from __future__ import annotations

import pytest
import torch
from support.spy import Spy
from support.transformers_models import (
    LENGTH,
    MODELS,
    OPERATOR,
    PADDING,
    TOKENS,
    attention_operators,
    both,
    built,
    close,
    masks_of,
    using,
)
from transformers import DynamicCache, StaticCache

from attnroute.integrations.transformers.carried_mask import CarriedMask

# transformers renamed arguments and methods on the way; the old names work in every version that is
# supported.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")


# Cohere 2 and Olmo 3 differ from the others in how they are compiled alone.
@pytest.fixture(params=[name for name in MODELS if name not in ("cohere2", "olmo3")])
def name(request):
    return request.param


@pytest.mark.parametrize("side", list(PADDING))
def test_logits(name, side):
    padding = PADDING[side]
    with torch.no_grad():
        found, expected = both(name, lambda model: model(TOKENS, attention_mask=padding).logits)
    close(found, expected, padding)


def test_logits_without_a_padding_mask(name):
    with torch.inference_mode():
        close(*both(name, lambda model: model(TOKENS).logits))


def test_loss_with_the_options_of_transformers_losses():
    """Models hand these to their attention along with everything else."""
    labels = TOKENS.roll(-1, 1)
    options = {"labels": TOKENS, "shift_labels": labels, "ignore_index": int(labels[0, 0])}
    with torch.no_grad():
        found, expected = both("llama", lambda model: model(TOKENS, **options).loss)
    close(found[None], expected[None])


def step_by_step(model, padding, cache):
    """Return the logits of a prompt of four tokens, of two more at once, and of the others one by one."""
    logits = []
    for start, stop in [(0, 4), (4, 6), *((i, i + 1) for i in range(6, LENGTH))]:
        seen = padding[:, :stop]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, start:]
        out = model(
            TOKENS[:, start:stop],
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("side", ["none", "left"])
def test_cached_decoding(name, side):
    padding = PADDING[side]
    with torch.no_grad():
        found, expected = both(
            name, lambda model: step_by_step(model, padding, DynamicCache(config=model.config))
        )
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
        return model.generate(
            TOKENS, attention_mask=PADDING["left"], max_new_tokens=5, num_beams=3, do_sample=False
        )

    found, expected = both("mistral", run)
    assert torch.equal(found, expected)


def gradients(model, padding, **checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    model.train()
    try:
        # What follows a padding token is no label either: what eager computes for rows without keys means
        # nothing.
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
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gemma4"], indirect=True)
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
        out = model(
            TOKENS[:1], position_ids=positions, attention_mask=padding, use_cache=False, **kwargs
        ).logits
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


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma4-shared", 2)], indirect=["name"])
def test_layers_share_mask_objects(name, kinds):
    masks = masks_of(
        using(name, "attnroute"), lambda model: model(TOKENS, attention_mask=PADDING["left"], use_cache=False)
    )
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
