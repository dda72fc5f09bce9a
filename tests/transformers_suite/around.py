"""What stands around models gives what it gives with sdpa: Trainer, pipelines, PEFT, generate."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers_suite.families import FAMILIES

from attnroute.integrations.transformers import register

register()

LENGTH = 12
TOKENS = torch.randint(3, 99, (4, LENGTH), generator=torch.Generator().manual_seed(0))
KEEP = torch.ones_like(TOKENS)
KEEP[1, :3] = KEEP[2, -4:] = 0
NAMES = ["llama", "mistral", "gemma3", "gpt_oss"]


def model_of(name, implementation):
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.settings)
    # sdpa has no sinks.
    beside = "eager" if (implementation, name) == ("sdpa", "gpt_oss") else implementation
    config._attn_implementation = beside
    if name == "gpt_oss":
        # Grouped products of its experts, the default, compile on no CPU in transformers 5.4.
        config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    kind = next(each for each in family.models if each.endswith("CausalLM"))
    model = getattr(transformers, kind)(config)
    assert model.config._attn_implementation == beside
    return model


def same(run):
    """Return what attnroute gives, held against what sdpa gives."""
    found, expected = run("attnroute"), run("sdpa")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return found


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs():
    """Return how many graphs were made, and how often they broke, since the last question."""
    counters = torch._dynamo.utils.counters
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    return found


def examples():
    labels = TOKENS.masked_fill(KEEP == 0, -100)
    rows = zip(TOKENS, KEEP, labels, strict=True)
    return [{"input_ids": t, "attention_mask": keep, "labels": wanted} for t, keep, wanted in rows]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("name", NAMES)
def test_trainer(name, options, tmp_path):
    def losses(implementation):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            seed=0,
            **options,
        )
        trainer = transformers.Trainer(model_of(name, implementation), arguments, train_dataset=examples())
        trainer.train()
        return torch.tensor([step["loss"] for step in trainer.state.log_history if "loss" in step])

    assert len(same(losses)) == 3


def tokenizer():
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *"abcdefgh"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


@pytest.mark.parametrize("name", NAMES)
def test_text_generation_pipeline(name):
    def texts(implementation):
        pipe = transformers.pipeline(
            "text-generation", model=model_of(name, implementation), tokenizer=tokenizer(), device="cpu"
        )
        options = {"batch_size": 2, "max_new_tokens": 8, "do_sample": False, "return_tensors": True}
        return [torch.tensor(out[0]["generated_token_ids"]) for out in pipe(["a b c d e", "f g"], **options)]

    assert same(texts)[0].numel() > 5


def tuned(kind):
    if kind == "lora":
        return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "k_proj", "v_proj"])
    return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)


# PEFT refuses prefixes together with checkpoints.
@pytest.mark.parametrize(("kind", "checkpoints"), [("lora", False), ("lora", True), ("prefix", False)])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_peft(name, kind, checkpoints):
    def loss_and_gradients(implementation):
        model = model_of(name, implementation)
        if checkpoints:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        torch.manual_seed(1)
        model = peft.get_peft_model(model, tuned(kind)).train()
        loss = model(TOKENS, attention_mask=KEEP, labels=TOKENS.masked_fill(KEEP == 0, -100)).loss
        loss.backward()
        grads = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
        return {"loss": loss.detach(), **grads}

    assert len(same(loss_and_gradients)) > 1


@pytest.mark.parametrize("whole", [True, False], ids=["model", "layers"])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_training_has_no_more_graphs_than_sdpa(name, checkpoints, whole):
    made = []

    def loss_and_gradients(implementation):
        model = model_of(name, implementation).train()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for part in [model] if whole else model.model.layers:
            part.compile(backend="aot_eager", fullgraph=not checkpoints)
        loss = model(TOKENS, attention_mask=KEEP, labels=TOKENS.masked_fill(KEEP == 0, -100)).loss
        loss.backward()
        made.append(graphs())
        grads = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
        return {"loss": loss.detach(), **grads}

    same(loss_and_gradients)
    ours, theirs = made
    assert ours <= theirs
    assert checkpoints or not whole or ours == (1, 0)


# gpt-oss has no sdpa beside it, and eager attention asks nothing about lengths.
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_compiled_generation_has_as_many_graphs_as_sdpa(name, cache):
    """Tokens go beyond the windows; layers with windows have sliding caches in either kind.

    The row of a mask starts at a multiple of eight elements. On a CPU a cache that grows gets one more graph
    for the lengths that are such multiples themselves.
    """
    made = []

    def logits(implementation):
        model = model_of(name, implementation).eval()
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=True)
        out = model.generate(
            TOKENS,
            attention_mask=torch.ones_like(KEEP).index_fill(1, torch.tensor([0, 1]), 0),
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        made.append(graphs())
        return torch.stack(out.logits)

    same(logits)
    ours, theirs = made
    assert ours[0] <= theirs[0] + (cache == "dynamic")
    assert ours[1] == 0
