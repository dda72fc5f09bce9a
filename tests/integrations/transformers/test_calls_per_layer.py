"""What a layer costs the host, counted in Python calls: little that is not worked out once for all layers."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
from support.spy import Spy
from support.transformers_models import TINY, TOKENS, close, using
from support.ways import ways_taken
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

import attnroute
from attnroute.integrations.transformers import register

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
register()
LAYERS = 4
INTEGRATION = str(Path(attnroute.__file__).parent / "integrations")


def llama(implementation="attnroute"):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, "num_hidden_layers": LAYERS}))
    model.set_attn_implementation(implementation)
    return model.eval()


class Counts(list):
    """For each call of one function, the Python functions that ran inside: of the integration, and all."""

    def around(self, function):
        def counted(*args, **kwargs):
            own, every = 0, 0

            def seen(frame, event, _):
                nonlocal own, every
                if event == "call":
                    every += 1
                    own += frame.f_code.co_filename.startswith(INTEGRATION)

            before = sys.getprofile()
            sys.setprofile(seen)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)
                self.append((own, every))

        return counted


@contextmanager
def counting(interface):
    counts, mapping = Counts(), interface._global_mapping
    original = mapping["attnroute"]
    mapping["attnroute"] = counts.around(original)
    try:
        yield counts
    finally:
        mapping["attnroute"] = original


def decoder(model, *, padded, static):
    """Return a step of decoding by greedy tokens of its own, after a prompt."""
    cache = (
        StaticCache(config=model.config, max_cache_len=32) if static else DynamicCache(config=model.config)
    )
    seen = torch.ones_like(TOKENS)
    if padded:
        seen[1, :3] = 0
    state = {"mask": seen}

    @torch.no_grad()
    def step(tokens=TOKENS[:, :1]):
        if tokens.shape[1] == 1:
            state["mask"] = torch.cat([state["mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        return model(tokens, attention_mask=state["mask"], past_key_values=cache).logits

    step(TOKENS)
    return step


def trainer(model):
    model.train()

    def step():
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()

    return step


RUNS = {
    "decode": lambda model: decoder(model, padded=False, static=False),
    "decode left padded": lambda model: decoder(model, padded=True, static=False),
    "decode static": lambda model: decoder(model, padded=False, static=True),
    "decode static left padded": lambda model: decoder(model, padded=True, static=True),
    "training": trainer,
}


FIRST = {
    "decode": 45,
    "decode left padded": 220,
    "decode static": 60,
    "decode static left padded": 60,
    "training": 35,
}
"""Python functions at most in the first layer of a step: one more key, or another mask, is new to it."""
LATER = {
    "decode": 14,
    "decode left padded": 30,
    "decode static": 30,
    "decode static left padded": 30,
    "training": 16,
}
"""In each later layer."""


@pytest.mark.parametrize("name", list(RUNS))
def test_layers_after_the_first_share_what_was_worked_out(name):
    step = RUNS[name](llama())
    # The first tell that the number of keys grows, and the last what changes with it.
    for _ in range(4):
        step()
    with counting(AttentionInterface) as counts:
        step()
    assert len(counts) == LAYERS
    assert counts[0][1] <= FIRST[name]
    for own, every in counts[1:]:
        # The attention function, what it asks of the module, what its mask says, and whether a row is folded.
        assert own <= 4
        # With `attention()` and everything that it calls.
        assert every <= LATER[name]


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoding_step_makes_one_mask_and_looks_at_padding_once(padded):
    step = decoder(llama(), padded=padded, static=False)
    step()
    with counting(AttentionMaskInterface) as counts, Spy() as spy:
        step()
    assert len(counts) == 1
    assert counts[0][0] <= 20
    # The one wait for the device: whether any key in reach is missing.
    assert spy.seen.count("aten::_local_scalar_dense") == 1
    assert spy.seen.count("aten::_scaled_dot_product_flash_attention_for_cpu") == LAYERS


def test_a_decoding_step_without_padding_has_no_mask(monkeypatch):
    step = decoder(llama(), padded=False, static=False)
    masks = asked(monkeypatch)
    step()
    assert [(call["mask"], call["heads"]) for call in masks] == [(None, 4)] * LAYERS


def test_a_padded_decoding_step_hands_one_object_to_all_layers(monkeypatch):
    step = decoder(llama(), padded=True, static=False)
    masks = asked(monkeypatch)
    for length in (10, 11):
        masks.clear()
        step()
        (mask,) = {id(call["mask"]): call["mask"] for call in masks}.values()
        assert repr(mask) == f"KeyPadding(keep=bool (2, {length}), finite=True)"
        # Heads that share keys are folded into rows, so that no kernel repeats keys for a mask.
        assert {(call["heads"], call["rows"]) for call in masks} == {(2, 2)}


def asked(monkeypatch):
    """Return what `attention()` is asked from now on."""
    from attnroute.integrations.transformers import attention as module

    calls, original = [], module.attention

    def recording(query, key, value, mask, **options):
        calls.append({"mask": mask, "heads": query.shape[1], "rows": query.shape[2]})
        return original(query, key, value, mask, **options)

    monkeypatch.setattr(module, "attention", recording)
    return calls


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_gives_what_sdpa_gives(padded, static):
    runs = {name: decoder(llama(name), padded=padded, static=static) for name in ("attnroute", "sdpa")}
    for at in range(5):
        found, expected = (run(TOKENS[:, at : at + 1]) for run in runs.values())
        close(found, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_steps_of_a_static_cache_go_the_short_way_and_are_right(name, padded, monkeypatch):
    """Each step has masks of its own, of the form that those of the step before had."""
    seen = torch.ones(2, 30, dtype=torch.long)
    seen[1, :3] = 0 if padded else 1
    # Experts of gpt-oss know no float64, and sdpa no sinks; eager attention makes NaN of rows without keys.
    other, dtype = ("eager", torch.float32) if name == "gpt_oss" else ("sdpa", torch.float64)
    models = {kind: deepcopy(using(name, kind)) for kind in ("attnroute", other)}
    models[other].to(dtype)
    caches = {kind: StaticCache(config=model.config, max_cache_len=32) for kind, model in models.items()}
    ways, at = ways_taken(monkeypatch), 0
    for number in (9, *[1] * 12):
        tokens = torch.randint(1, 48, (2, number))
        logits, at = {}, at + number
        for kind, model in models.items():
            del ways[:]
            with torch.no_grad():
                logits[kind] = model(tokens, attention_mask=seen[:, :at], past_key_values=caches[kind]).logits
            if kind == "attnroute" and at > 10:
                assert set(ways) == {"short"}
        close(logits["attnroute"][:, -1].double(), logits[other][:, -1].double())


def test_what_steps_remember_does_not_grow():
    step = decoder(llama(), padded=True, static=False)
    for _ in range(3):
        step()
    held = {m.owner: m.size() for m in attnroute.memory.remembered() if m.owner.startswith("masks.kept")}
    for _ in range(5):
        step()
    assert held == {
        m.owner: m.size() for m in attnroute.memory.remembered() if m.owner.startswith("masks.kept")
    }
