"""Whole transformers models with random weights: attn_implementation="attnroute" beside "sdpa", in turns.

A training step is forward, loss and backward without an optimizer; a decoding step is one token for every
sequence, eight of them in a row; a prefill is the forward pass of a prompt into a new cache. gpt-oss has
sinks, which sdpa cannot say, so eager attention is beside it.

python benchmarks/models.py --out models.json [--only decode] [--seconds 200]
python benchmarks/models.py --out models.json --device cpu --tiny   # sees that it runs; needs no GPU
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from common import progress, relative
from sweep import environment

from attnroute.integrations.transformers import register

ROUNDS = (3, 8)
"""At least and at most so many pairs of turns, as the time allows; in one of a pair sdpa is first."""
WARM_UP = 2
STEPS = 8
"""Decoding steps in one sample."""
KERNELS_SHOWN = 8
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "sliding_window": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


@dataclass(frozen=True)
class Case:
    """One model and what it does.

    Attributes:
        name: How results call it.
        family: Key of `CLASSES`.
        config: What the configuration has beside defaults.
        batch: Sequences.
        length: Tokens of each, for decoding those that are in the cache before.
        kind: "train", "prefill" or "decode".
        documents: Documents of equal length in each row, stated by position_ids; 0 = none are stated.
        padded: Missing tokens at the left of sequence i are i * length / (2 * batch).
        static: Decode from a StaticCache instead of a DynamicCache.
        beside: What attnroute is compared with.
    """

    name: str
    family: str
    config: dict[str, Any]
    batch: int
    length: int
    kind: str
    documents: int = 0
    padded: bool = False
    static: bool = False
    beside: str = "sdpa"

    def tiny(self) -> Case:
        """Return the same in a size for a CPU."""
        config = {name: TINY.get(name, value) for name, value in self.config.items()}
        if "layer_types" in config:
            config["layer_types"] = ["sliding_attention", "full_attention"]
        return replace(self, config=config, batch=min(self.batch, 2), length=64)


def sizes(layers: int, hidden: int, inner: int, heads: int, heads_kv: int, head_dim: int) -> dict[str, Any]:
    """Return what most configurations call alike."""
    return {
        "vocab_size": 32000,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "head_dim": head_dim,
        "max_position_embeddings": 16384,
    }


CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Llama": ("LlamaConfig", "LlamaForCausalLM"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GptOss": ("GptOssConfig", "GptOssForCausalLM"),
}
GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12} | dict.fromkeys(
    ("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0
)
D64 = sizes(8, 2048, 8192, 32, 8, 64)
D128 = sizes(4, 4096, 14336, 32, 8, 128)
DECODER = sizes(8, 4096, 14336, 32, 8, 128)
LOCAL = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA = sizes(6, 2560, 10240, 8, 4, 256) | {"sliding_window": 1024, "layer_types": LOCAL}
OSS = sizes(4, 2880, 2880, 64, 8, 64) | {
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CASES = (
    Case("gpt2_train", "GPT2", GPT2, 16, 1024, "train"),
    Case("llama_d64_train", "Llama", D64, 2, 4096, "train"),
    Case("llama_d128_train", "Llama", D128, 1, 8192, "train"),
    Case("llama_d128_packed_train", "Llama", D128, 1, 8192, "train", documents=8),
    Case("gemma3_train", "Gemma3", GEMMA, 1, 8192, "train"),
    Case("gpt_oss_train", "GptOss", OSS, 1, 4096, "train", beside="eager"),
    Case("llama_prefill", "Llama", D128, 1, 8192, "prefill"),
    Case("decode", "Llama", DECODER, 8, 2048, "decode"),
    Case("decode_left_padded", "Llama", DECODER, 8, 2048, "decode", padded=True),
    Case("decode_static", "Llama", DECODER, 8, 2048, "decode", static=True),
    Case("gemma3_decode_static", "Gemma3", GEMMA, 8, 2048, "decode", static=True),
    Case("gpt_oss_decode_static", "GptOss", OSS, 8, 2048, "decode", static=True, beside="eager"),
)


@dataclass
class Samples:
    """Milliseconds of one implementation, by sample.

    Attributes:
        wall: Until the device was ready; of decoding, at lengths that the other implementation ran before.
        host: Until the call returned, the device idle at its begin.
        new: As `wall`, of decoding steps at lengths that no other implementation ran before. cuDNN makes a
            plan for each new length, which whoever comes first waits for.
        first_s: Seconds of the first call, compilation included.
        result: Loss or logits of the first call.
    """

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    first_s: float = 0.0
    result: torch.Tensor | None = None


def model_of(case: Case, device: str) -> Any:
    """Return a model with random weights in bfloat16."""
    named_config, named_model = CLASSES[case.family]
    config = getattr(transformers, named_config)(**case.config)
    config.pad_token_id = None
    torch.manual_seed(0)
    with torch.device(device):
        make = getattr(transformers, named_model)._from_config  # noqa: SLF001 - no other way states the dtype
        model = make(config, dtype=torch.bfloat16)
    return model.train(case.kind == "train")


def training(case: Case, model: Any, device: str) -> Callable[[], torch.Tensor]:
    """Return a step of training that leaves no gradients."""
    tokens = torch.randint(model.config.vocab_size, (case.batch, case.length), device=device)
    extra = {}
    if case.documents:
        positions = torch.arange(case.length, device=device) % (case.length // case.documents)
        extra["position_ids"] = positions.expand(case.batch, -1)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(tokens, labels=tokens, use_cache=False, **extra).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def cache_name(model: Any) -> str:
    """Return what the installed transformers calls a cache."""
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


def prefill(case: Case, model: Any, device: str) -> Callable[[], torch.Tensor]:
    """Return the forward pass of a prompt, with the logits of its last token."""
    tokens = torch.randint(model.config.vocab_size, (case.batch, case.length), device=device)

    @torch.no_grad()
    def step() -> torch.Tensor:
        logits: torch.Tensor = model(tokens, use_cache=True, logits_to_keep=1).logits
        return logits

    return step


@torch.no_grad()
def decoding(case: Case, model: Any, device: str) -> Callable[[], torch.Tensor]:
    """Return `STEPS` steps that go on where the last ones ended, with the mask that generate() passes."""
    torch.manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (case.batch, case.length), device=device)
    attention_mask = torch.ones_like(tokens)
    if case.padded:
        missing = torch.arange(case.batch, device=device) * case.length // (2 * case.batch)
        attention_mask = (torch.arange(case.length, device=device) >= missing[:, None]).long()
    longest = case.length + STEPS * (2 * ROUNDS[1] + WARM_UP + 2)
    if case.static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=longest)
    else:
        cache = transformers.DynamicCache(config=model.config)
    name = cache_name(model)
    one, at = torch.ones_like(tokens[:, :1]), (attention_mask.cumsum(1) - 1).clamp_(min=0)
    model(
        tokens,
        attention_mask=attention_mask,
        position_ids=at,
        use_cache=True,
        logits_to_keep=1,
        **{name: cache},
    )
    state = {"mask": attention_mask, "at": at[:, -1:]}

    @torch.no_grad()
    def steps() -> torch.Tensor:
        for _ in range(STEPS):
            state["mask"] = torch.cat([state["mask"], one], 1)
            state["at"] = state["at"] + 1
            out = model(one, attention_mask=state["mask"], position_ids=state["at"], **{name: cache})
        logits: torch.Tensor = out.logits
        return logits

    return steps


KINDS = {"train": training, "prefill": prefill, "decode": decoding}


def ready(device: str) -> None:
    """Wait until the device has nothing to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def sample(run: Callable[[], torch.Tensor], device: str, *, count: int) -> tuple[float, float, torch.Tensor]:
    """Return milliseconds of wall time and of host time of one of `count` steps, and the result."""
    ready(device)
    start = time.perf_counter()
    result = run()
    returned = time.perf_counter()
    ready(device)
    return (time.perf_counter() - start) * 1e3 / count, (returned - start) * 1e3 / count, result


def on_device(run: Callable[[], torch.Tensor], device: str, *, count: int) -> dict[str, Any]:
    """Return the device time of all kernels of a step in milliseconds, and that of the longest by name."""
    if device != "cuda":
        return {"device_ms": None}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            times[event.name[:90]] = times.get(event.name[:90], 0.0) + event.time_range.elapsed_us() / 1e3
    longest = sorted(times, key=lambda name: -times[name])[:KERNELS_SHOWN]
    return {
        "device_ms": round(sum(times.values()) / count, 3),
        "kernels_ms": {name: round(times[name] / count, 3) for name in longest},
    }


def measure(case: Case, device: str, *, until: float) -> dict[str, Any]:
    """Time the implementations in turns."""
    model = model_of(case, device)
    named = (case.beside, "attnroute")
    count = STEPS if case.kind == "decode" else 1
    runs, samples = {}, {name: Samples() for name in named}
    for name in named:
        model.set_attn_implementation(name)
        start = time.perf_counter()
        torch.manual_seed(1)
        runs[name] = KINDS[case.kind](case, model, device)
        samples[name].result = runs[name]()
        ready(device)
        samples[name].first_s = time.perf_counter() - start
        for _ in range(WARM_UP - 1):
            runs[name]()
    for turn in range(2 * ROUNDS[1]):
        if turn >= 2 * ROUNDS[0] and time.monotonic() >= until:
            break
        for at, name in enumerate(named[:: 1 if turn % 2 else -1]):
            model.set_attn_implementation(name)
            wall, host, _ = sample(runs[name], device, count=count)
            if case.kind == "decode" and at == 0:
                samples[name].new.append(wall)
            else:
                samples[name].wall.append(wall)
                samples[name].host.append(host)
    found: dict[str, Any] = {
        "case": {"family": case.family, "batch": case.batch, "length": case.length, "config": case.config},
        "samples": len(samples["attnroute"].wall),
    }
    for name in named:
        model.set_attn_implementation(name)
        found[name] = {
            "ms": round(median(samples[name].wall), 3),
            "least_ms": round(min(samples[name].wall), 3),
            "new_lengths_ms": round(median(samples[name].new), 3) if samples[name].new else None,
            "host_ms": round(median(samples[name].host), 3),
            **on_device(runs[name], device, count=count),
            "first_s": round(samples[name].first_s, 2),
        }
    ours, other = samples["attnroute"].result, samples[case.beside].result
    assert ours is not None
    assert other is not None
    found["ratio"] = round(found["attnroute"]["ms"] / found[case.beside]["ms"], 4)
    found["difference"] = relative(ours.float(), other.float())
    layers = case.config.get("num_hidden_layers", case.config.get("n_layer", 1))
    more = found["attnroute"]["host_ms"] - found[case.beside]["host_ms"]
    found["host_us_per_layer_over"] = round(more * 1e3 / layers, 1)
    return found


def told(found: dict[str, Any]) -> str:
    """Return a result as one line."""
    if "error" in found:
        return str(found["error"])
    times = {name: each for name, each in found.items() if isinstance(each, dict) and "ms" in each}
    parts = [
        f"{name} {t['ms']} (host {t['host_ms']}, device {t['device_ms']}, new lengths {t['new_lengths_ms']})"
        for name, t in times.items()
    ]
    return ", ".join(parts) + f" ms; host {found['host_us_per_layer_over']} us a layer over"


def main() -> None:
    """Measure the cases that were asked for and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], help="names that contain this")
    parser.add_argument("--seconds", type=float, default=200.0, help="of all cases together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    register()
    transformers.logging.set_verbosity_error()
    cases = [c for c in CASES if not options.only or any(part in c.name for part in options.only)]
    results: dict[str, Any] = {
        "environment": environment(options.device) | {"transformers": transformers.__version__},
        "models": {},
    }
    end = time.monotonic() + options.seconds
    for at, case in enumerate(cases):
        now = time.monotonic()
        if now > end:
            progress(f"{case.name} and what follows: no time is left")
            break
        until = now + (end - now) / (len(cases) - at)
        try:
            found = measure(case.tiny() if options.tiny else case, options.device, until=until)
        except Exception as error:  # noqa: BLE001 - one model that does not run is no reason to lose the others
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        results["models"][case.name] = found
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        progress(f"{case.name}: {told(found)}")
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
