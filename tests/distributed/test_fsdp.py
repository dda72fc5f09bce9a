"""Small Llama and Gemma models under FSDP2 and tensor parallel: losses and gradients equal one process's.

All ranks run one training step with `attn_implementation="attnroute"`, with float32 weights so that what
differs is an error and not rounding.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import attnroute
from attnroute.integrations.transformers import register

RECIPE = Path(__file__).parent / "recipe_weights_and_heads.py"
VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}
HALF = {"rtol": 2**-7, "atol": 2**-7}
STYLES = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def model_of(name):
    import transformers

    register()
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**SIZES)
    else:
        # A sliding layer and a global one.
        kinds = ["sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attnroute")
    return model.float()


def step(model, rows):
    """Return the loss of a training step, whose gradients are then in the model."""
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    return loss.detach()


def alone(name, rows, dtype):
    """Return loss and gradients of one process; weights that are not float32 take a rank's rows at a time."""
    model = model_of(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if dtype == torch.float32:
        return step(model, rows), gradients_of(model)
    losses, gradients = [], []
    for half in rows.chunk(2):
        losses.append(step(model, half))
        gradients.append(gradients_of(model))
        model.zero_grad()
    names = gradients[0]
    return torch.stack(losses).mean(), {n: sum(g[n].float() for g in gradients) / 2 for n in names}


def gradients_of(model):
    """Return every gradient, gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gathered = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name.replace("_checkpoint_wrapped_module.", "")] = gathered
    return found


def spread(model, mesh, options):
    """Spread a model as users do: heads first, then checkpoints and graphs of layers, then weights."""
    layers = model.model.layers
    if "tp" in mesh.mesh_dim_names:
        for layer in layers:
            styles = {name: style() for name, style in STYLES.items()}
            if hasattr(layer.self_attn, "q_norm"):
                # Their weights are on all ranks, and each rank has the gradient of its own heads.
                norm = SequenceParallel(sequence_dim=1, use_local_output=True)
                styles |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
            parallelize_module(layer, mesh["tp"], styles)
    if "checkpoint" in options:
        for at, layer in enumerate(layers):
            layers[at] = checkpoint_wrapper(layer)
    if "compile" in options:
        for layer in layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    if "dp" in mesh.mesh_dim_names:
        half = torch.bfloat16 if "bf16" in options else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return model


def compared(name, sizes, options):
    """Train one step alone and one spread, compare on this rank, and return the attention calls that ran."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    rows = torch.randint(VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))
    expected, gradients = alone(name, rows, torch.bfloat16 if "bf16" in options else torch.float32)
    model = spread(model_of(name), mesh, options).train()
    mine = rows.chunk(2)[mesh.get_local_rank("dp")] if "dp" in sizes else rows
    with attnroute.trace() as seen:
        loss = step(model, mine)
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    # Where heads are spread, the sum of their projections is rounded on each rank before it is added.
    near = HALF if "bf16" in options and "tp" in sizes else SINGLE
    torch.testing.assert_close(torch.stack(losses).mean(), expected, **near)
    found = gradients_of(model)
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, **near, msg=lambda said, key=key: f"{key}: {said}")
    return [
        (call.how, call.backend, call.line.split(), sum(place.recomputed for place in call.places))
        for call in seen.calls
    ]


def check(results, words, *, how="eager", again=0):
    """Every rank ran the same calls, with these words in their lines, on the fused kernel."""
    assert all(result == results[0] for result in results)
    assert {(found[0], found[1]) for found in results[0]} == {(how, "flash")}
    assert all(set(words.split()) <= set(line) for _, _, line, _ in results[0])
    assert sum(found[3] for found in results[0]) == again


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_weights_over_two_ranks(two_ranks, name):
    check(two_ranks.run(compared, name, {"dp": 2}, ()), "fp32 b2 hq4 hkv2 train")


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_weights_in_bfloat16_with_checkpoints(two_ranks, name):
    found = two_ranks.run(compared, name, {"dp": 2}, ("bf16", "checkpoint"))
    check(found, "bf16 b2 hq4 hkv2 train", again=2)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_heads_over_two_ranks_with_checkpoints(two_ranks, name):
    check(two_ranks.run(compared, name, {"tp": 2}, ("checkpoint",)), "fp32 b4 hq2 hkv1 train", again=2)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_weights_and_heads_over_four_ranks(four_ranks, name):
    check(four_ranks.run(compared, name, {"dp": 2, "tp": 2}, ()), "fp32 b2 hq2 hkv1 train")


def test_weights_in_bfloat16_and_heads_with_checkpoints(four_ranks):
    found = four_ranks.run(compared, "gemma", {"dp": 2, "tp": 2}, ("bf16", "checkpoint"))
    check(found, "bf16 b2 hq2 hkv1 train", again=2)


def test_weights_and_heads_of_compiled_layers(four_ranks):
    found = four_ranks.run(compared, "llama", {"dp": 2, "tp": 2}, ("compile",))
    check(found, "fp32 b2 hq2 hkv1 train", how="compiled")


def recipe():
    return runpy.run_path(str(RECIPE))["loss"].item()


def test_the_recipe_of_the_page(four_ranks):
    first, *others = four_ranks.run(recipe)
    assert 0 < first < 10
    assert len(others) == 3
