"""Recorded measurements, replayed: what the tables select is about as fast as the fastest that was measured.

Each call is decided on the machine that measured it, and every backend that was not timed there is banned.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from attnroute.engine.decide import decide
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.tables.load import load

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FACTOR = 1.15
"""What a choice may take of the fastest time: the same call differs by a tenth between runs."""
TORCH = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"}
FA4 = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1"}
SHAPES = {
    "llama8b_prefill_8k": "b1 hq32 hkv8 sq8192 d128 causal",
    "llama8b_train_4k": "b2 hq32 hkv8 sq4096 d128 causal train",
    "llama8b_train_16k": "b1 hq32 hkv8 sq16384 d128 causal train",
    "llama_32k_prefill": "b1 hq32 hkv8 sq32768 d128 causal",
    "gemma320_prefill_8k": "b1 hq8 sq8192 d320 causal",
    "gemma320_gqa_train_4k": "b1 hq16 hkv8 sq4096 d320 causal train",
    "gemma_512_prefill_4k": "b1 hq8 hkv4 sq4096 d512 causal",
    "gemma512_prefill_8k": "b1 hq16 hkv8 sq8192 d512 causal",
    "gemma3_d256_train_4k": "b1 hq16 hkv8 sq4096 d256 causal train",
    "densecausal_d128_8k": "b1 hq32 hkv8 sq8192 d128 dense=1x1x8192x8192:recognized=causal",
    "mistral_window_16k": "b1 hq32 hkv8 sq16384 d128 window=4095,0",
    "mla_192_128_train_4k": "b1 hq32 sq4096 d192/128 causal train",
    "mla_192_128_prefill_8k": "b1 hq32 sq8192 d192/128 causal",
    "docpack_8k_train": "b1 hq32 hkv8 sq8192 d128 causal documents train",
    "bert_pad_512": "b32 hq12 sq512 d64 keys train",
    "flux_4608": "b1 hq24 sq4608 d128",
    "sd_self_4096_d64": "b4 hq10 sq4096 d64",
    "vit_257_d64": "b64 hq16 sq257 d64 train",
    "wan_video_32k": "b1 hq12 sq32760 d128",
    "decode_8k": "b8 hq32 hkv8 sq1 skv8192 d128",
    "decode_b1_32k": "b1 hq32 hkv8 sq1 skv32768 d128",
    "short_128_b64": "b64 hq32 hkv8 sq128 d128 causal",
    "bert_512": "b32 hq12 sq512 d64 keys",
    "bert_512_train": "b32 hq12 sq512 d64 keys train",
    "gqa_4k": "b8 hq32 hkv8 sq4096 d128 keys",
    "gqa_4k_train": "b8 hq32 hkv8 sq4096 d128 keys train",
    "left_prefill_4k": "b4 hq32 hkv8 sq4096 d128 causal keys-left",
    "left_train_4k": "b4 hq32 hkv8 sq4096 d128 causal keys-left train",
    "left_decode_8k": "b8 hq32 hkv8 sq1 skv8192 d128 keys-left",
    "right_decode_8k": "b8 hq32 hkv8 sq1 skv8192 d128 keys",
    "left_decode_8k_b64": "b64 hq32 hkv8 sq1 skv8192 d128 keys-left",
}
"""The calls of `benchmarks/shapes.py`, `backends.py` and `ragged.py` by their names."""


class Case(NamedTuple):
    """A call as a line, the packages beside torch, and the milliseconds of each backend."""

    line: str
    packages: dict[str, str]
    times: dict[str, float]


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def wide(name, phase):
    """The call behind a name such as d512_16_8_4096: head dim, query heads, key heads, length."""
    dim, heads, heads_kv, length = name.split("_")
    return f"b1 hq{heads} hkv{heads_kv} sq{length} {dim} causal{phase}"


def small(name):
    """The call behind a name such as window_d128_1_32_8_512, batch after head dim."""
    mask, dim, batch, heads, heads_kv, length = name.split("_")
    masks = {"none": "", "window": "window=255,0", "documents": "causal documents"}
    return f"b{batch} hq{heads} hkv{heads_kv} sq{length} {dim} {masks.get(mask, mask)}"


def sizes(name):
    """The call behind a tuple: batch, query heads, key heads, lengths, head dim, training."""
    batch, heads, heads_kv, seqlen_q, seqlen_kv, dim, train = name.strip("()").split(", ")
    words = "causal" * (seqlen_q == seqlen_kv) + " train" * (train == "True")
    return f"b{batch} hq{heads} hkv{heads_kv} sq{seqlen_q} skv{seqlen_kv} d{dim} {words}"


def masked(name, length):
    """The call behind a name such as window_1024 forward B4, at one length."""
    kind, phase, batch = name.split()
    mask, width = kind.split("_")
    words = f"window={int(width) - 1},0" if mask == "window" else "causal documents"
    return f"b{batch[1:]} hq32 hkv8 sq{length} d128 {words}" + " train" * (phase == "training")


def measured():
    """Give an id and a case for each call of the results that say which call it was."""
    first = read("h100-torch2.11-fa4b36")
    for case in first["cases"]:
        times = {
            name.removesuffix("+repeat_kv").removesuffix("_varlen"): ms for name, ms in case["ms"].items()
        }
        yield f"fa4b36 {case['name']}", Case(SHAPES[case["name"]], FA4, times)
    for source in ("backends", "backends-2", "small-calls"):
        data = read(f"h100-torch2.11-{source}")
        for name, found in data["shapes"].items():
            line = small(name) if source == "small-calls" else SHAPES.get(name) or wide(name, " train")
            yield f"{source} {name}", Case(line, data["packages"], found["ms"])
    for name, times in read("h100-torch2.11-wide-heads")["ms"].items():
        yield f"wide-heads {name}", Case(sizes(name), {}, times)
    for name, found in read("h100-torch2.11-chunked")["shapes"].items():
        yield f"chunked {name} forward", Case(wide(name, ""), {}, found["forward_ms"])
        yield f"chunked {name} train", Case(wide(name, " train"), {}, found["train_ms"])
    for name, lengths in read("h100-torch2.11-flex-crossover")["crossover"].items():
        for length, found in lengths.items():
            yield f"crossover {name} {length}", Case(masked(name, length), {}, found["ms"])
    ragged = read("h100-torch2.11-ragged")
    for name, found in (item for part in ("padding", "left", "decode") for item in ragged[part].items()):
        yield f"ragged {name}", Case(SHAPES[name.split()[0]], {}, found["ms"])


TABLES = load()
CASES = {name: case for name, case in measured() if len(case.times.keys() & TABLES.backends.keys()) > 1}
FULL = "how many keys are padding is no fact of a call: where all rows are full, cudnn is ahead"
SMALL_MASK = "cudnn reads a mask of so few entries faster, once a mask object has made and kept it"
EARLIER = "chunked of a day before; in wide-heads and backends, measured later, efficient is ahead at 8 heads"
SCORES = "one row of twice the length has as many scores, and there flash is ahead"
KNOWN = {
    "ragged gqa_4k_train 0.25": FULL,
    "ragged gqa_4k_train 0.5": FULL,
    "ragged gqa_4k_train 0.75": FULL,
    "ragged gqa_4k 0.25": FULL,
    "ragged gqa_4k 0.5": FULL,
    "small-calls window_d128_1_32_8_512": SMALL_MASK,
    "small-calls documents_d128_1_32_8_512": SMALL_MASK,
    "small-calls documents_d128_1_32_8_1024": SMALL_MASK,
    "small-calls documents_d128_4_32_8_1024": SMALL_MASK,
    "small-calls window_d128_1_32_8_4096": "the bound of small windows suits wider ones, which need fa3 here",
    "chunked d320_16_8_4096 forward": EARLIER,
    "chunked d512_8_4_4096 forward": EARLIER,
    "chunked d512_16_8_4096 forward": "the bound of long calls is where it was measured twice, at 8192",
    "crossover documents_1024 forward B4 4096": SCORES,
    "crossover documents_1024 forward B4 8192": SCORES,
    "crossover window_1024 forward B4 2048": SCORES,
    "crossover window_1024 training B4 2048": SCORES,
}
"""Calls whose choice takes longer, each with the reason why the tables do not say otherwise."""


@cache
def ratio(name):
    """Return the time of the selected backend over that of the fastest one that may run."""
    line, packages, times = CASES[name]
    host = Host(arch="sm_90", versions={**TORCH, **packages})
    untimed = tuple(backend for backend in TABLES.backends if backend not in times)
    decision = decide(parse(f"bf16 {line}"), host, TABLES, Policy(ban=untimed))
    assert len(decision.order) > 1, "one backend alone says nothing about a choice"
    return times[decision.selected] / min(times[backend] for backend in decision.order)


@pytest.mark.parametrize("name", [name for name in CASES if name not in KNOWN])
def test_the_choice_is_about_as_fast_as_the_best(name):
    assert ratio(name) <= FACTOR


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_exception_is_still_one(name):
    assert ratio(name) > FACTOR, f"remove it from KNOWN, where it stands because {KNOWN[name]}"
