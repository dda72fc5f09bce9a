"""Says which call stands behind each name in the results of the H100, which came before calls had lines.

Their inputs were contiguous as (batch, heads, seqlen, head_dim), so where a mask makes it matter a line says
`tokens_apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

ENVIRONMENT = {
    "card": "NVIDIA H100 80GB HBM3",
    "driver": "580.159.04",
    "date": "2026-11-27",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": "91900",
}
"""Of the files that do not say it."""
FA4 = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1"}
PACKAGES = {
    "h100-torch2.11-fa4b36": FA4,
    "h100-fa3-fa4-cudnn": {**FA4, "xformers": "0.0.34"},
}
"""What was installed beside torch, for the files that do not say it."""


COMPILED: Final = ("window_1024 forward B1 4096", "flex")
"""A time with a compilation in it: 1.55 ms, where half and twice the length took 0.40 and 0.42."""


def documents(length: int, width: int) -> str:
    """Return the words of causal documents that are all of one length."""
    return f"causal documents={','.join([str(width)] * (length // width))} tokens_apart"


LINES = {
    "llama8b_prefill_8k": "b1 hq32 hkv8 sq8192 d128 causal",
    "llama8b_train_4k": "b2 hq32 hkv8 sq4096 d128 causal train",
    "llama8b_train_16k": "b1 hq32 hkv8 sq16384 d128 causal train",
    "llama_32k_prefill": "b1 hq32 hkv8 sq32768 d128 causal",
    "gemma320_prefill_8k": "b1 hq8 sq8192 d320 causal",
    "gemma320_gqa_train_4k": "b1 hq16 hkv8 sq4096 d320 causal train",
    "gemma_512_prefill_4k": "b1 hq8 hkv4 sq4096 d512 causal",
    "gemma512_prefill_8k": "b1 hq16 hkv8 sq8192 d512 causal",
    "gemma3_d256_train_4k": "b1 hq16 hkv8 sq4096 d256 causal train",
    "densecausal_d128_8k": "b1 hq32 hkv8 sq8192 d128 dense=8192x8192:recognized=causal tokens_apart",
    "mistral_window_16k": "b1 hq32 hkv8 sq16384 d128 window=4095,0",
    "mla_192_128_train_4k": "b1 hq32 sq4096 d192/128 causal train",
    "mla_192_128_prefill_8k": "b1 hq32 sq8192 d192/128 causal",
    "docpack_8k_train": f"b1 hq32 hkv8 sq8192 d128 {documents(8192, 1024)} train",
    "bert_pad_512": "b32 hq12 sq512 d64 keys:finite train tokens_apart",
    "flux_4608": "b1 hq24 sq4608 d128",
    "sd_self_4096_d64": "b4 hq10 sq4096 d64",
    "vit_257_d64": "b64 hq16 sq257 d64 train",
    "wan_video_32k": "b1 hq12 sq32760 d128",
    "decode_8k": "b8 hq32 hkv8 sq1 skv8192 d128",
    "decode_b1_32k": "b1 hq32 hkv8 sq1 skv32768 d128",
    "short_128_b64": "b64 hq32 hkv8 sq128 d128 causal",
    "bert_512": "b32 hq12 sq512 d64 keys:finite tokens_apart",
    "bert_512_train": "b32 hq12 sq512 d64 keys:finite train tokens_apart",
    "gqa_4k": "b8 hq32 hkv8 sq4096 d128 keys:finite tokens_apart",
    "gqa_4k_train": "b8 hq32 hkv8 sq4096 d128 keys:finite train tokens_apart",
    "left_prefill_4k": "b4 hq32 hkv8 sq4096 d128 causal keys-left:finite tokens_apart",
    "left_train_4k": "b4 hq32 hkv8 sq4096 d128 causal keys-left:finite train tokens_apart",
    "left_decode_8k": "b8 hq32 hkv8 sq1 skv8192 d128 keys-left:finite tokens_apart",
    "right_decode_8k": "b8 hq32 hkv8 sq1 skv8192 d128 keys:finite tokens_apart",
    "left_decode_8k_b64": "b64 hq32 hkv8 sq1 skv8192 d128 keys-left:finite tokens_apart",
}
"""The calls of `shapes.py`, `backends.py` and `ragged.py`. Nothing was cleared of what padding left out then,
as where it is stated to be finite."""
FA3_LINES = {
    "prefill 8k": LINES["llama8b_prefill_8k"],
    "train 4k": LINES["llama8b_train_4k"],
    "train 16k": LINES["llama8b_train_16k"],
    "full 4.6k": LINES["flux_4608"],
    "d64 full": LINES["sd_self_4096_d64"],
    "d256 train": LINES["gemma3_d256_train_4k"],
    "mla prefill": LINES["mla_192_128_prefill_8k"],
    "mla train": LINES["mla_192_128_train_4k"],
    "window 16k": LINES["mistral_window_16k"],
    "vit 257": LINES["vit_257_d64"],
    "short 128": LINES["short_128_b64"],
    "decode 8k": LINES["decode_8k"],
    "decode 32k": LINES["decode_b1_32k"],
}
"""The calls of h100-fa3-fa4-cudnn whose sizes are known."""
WRONG = 0.05


class Named(NamedTuple):
    """A call by name, as a line without its dtype, bfloat16.

    Attributes:
        ms: By backend, stock among them; where it trains, forward and backward.
        selected: What `attention()` chose on that day.
        wrong: Backends whose result was not right.
    """

    name: str
    line: str
    ms: dict[str, float]
    selected: str | None = None
    wrong: frozenset[str] = frozenset()


def packages(source: str, data: dict[str, Any]) -> dict[str, str]:
    """Return what was installed beside torch when a file was made."""
    found: dict[str, str] = data.get("packages") or PACKAGES.get(source, {})
    return found


def _first(data: dict[str, Any]) -> Iterator[Named]:
    names = {"sdpa": "stock", "efficient+repeat_kv": "efficient", "fa4_varlen": "fa4", "flex_small": "flex"}
    for case in data["cases"]:
        ms = {names.get(name, name): taken for name, taken in case["ms"].items()}
        if case["mask"] == "densecausal":
            # These read the tensor as a mask, which `attention()` recognises.
            del ms["cudnn"], ms["efficient"]
        yield Named(case["name"], LINES[case["name"]], ms)


def _packages(data: dict[str, Any]) -> Iterator[Named]:
    for name, line in FA3_LINES.items():
        found = data[name]
        apart = {other: max(found.get(f"{other}_rel", [0.0])) for other in ("fa4", "cudnn")}
        wrong = frozenset(other for other, most in apart.items() if most > WRONG)
        yield Named(name, line, {b: found[b] for b in ("fa3", "fa4", "cudnn") if b in found}, None, wrong)


def _backends(data: dict[str, Any]) -> Iterator[Named]:
    for name, found in data["shapes"].items():
        errors = found.get("errors", {})
        wrong = frozenset(backend for backend, error in errors.items() if error > WRONG)
        line = LINES.get(name) or _wide(name, " train")
        yield Named(name, line, found["ms"], found["selected"], wrong)


def _small(data: dict[str, Any]) -> Iterator[Named]:
    """Read names such as window_d128_1_32_8_512: mask, head dim, batch, query heads, key heads, length."""
    for name, found in data["shapes"].items():
        mask, dim, batch, heads, heads_kv, length = name.split("_")
        masks = {"none": "", "window": "window=255,0", "documents": documents(int(length), 256)}
        line = f"b{batch} hq{heads} hkv{heads_kv} sq{length} {dim} {masks.get(mask, mask)}"
        yield Named(name, line, found["ms"], found["selected"])


def _wide_heads(data: dict[str, Any]) -> Iterator[Named]:
    """Read names such as (8, 16, 8, 512, 512, 320, False): the last says whether it trains."""
    for name, ms in data["ms"].items():
        batch, heads, heads_kv, seqlen_q, seqlen_kv, dim, train = name.strip("()").split(", ")
        words = "causal" * (seqlen_q == seqlen_kv) + " train" * (train == "True")
        yield Named(name, f"b{batch} hq{heads} hkv{heads_kv} sq{seqlen_q} skv{seqlen_kv} d{dim} {words}", ms)


def _chunked(data: dict[str, Any]) -> Iterator[Named]:
    for name, found in data["shapes"].items():
        yield Named(f"{name} forward", _wide(name, ""), found["forward_ms"])
        yield Named(f"{name} train", _wide(name, " train"), found["train_ms"])


def _wide(name: str, phase: str) -> str:
    """Return the line of a name such as d512_16_8_4096: head dim, query heads, key heads, length."""
    dim, heads, heads_kv, length = name.split("_")
    return f"b1 hq{heads} hkv{heads_kv} sq{length} {dim} causal{phase}"


def _crossover(data: dict[str, Any]) -> Iterator[Named]:
    """Read names such as window_1024 forward B4, each with several lengths."""
    for name, lengths in data["crossover"].items():
        kind, phase, batch = name.split()
        mask, width = kind.split("_")
        train = " train" * (phase == "training")
        for length, found in lengths.items():
            window = f"window={int(width) - 1},0 tokens_apart"
            words = window if mask == "window" else documents(int(length), int(width))
            line = f"b{batch[1:]} hq32 hkv8 sq{length} d128 {words}{train}"
            measured = {n: ms for n, ms in found["ms"].items() if (f"{name} {length}", n) != COMPILED}
            yield Named(f"{name} {length}", line, measured, found["selected"])


def _ragged(data: dict[str, Any]) -> Iterator[Named]:
    """Read padded batches; the number in a name is the share of keys that are there, on average."""
    for part in ("padding", "left", "decode"):
        for name, found in data[part].items():
            wrong = frozenset(
                backend
                for backend, error in found["error"].items()
                if isinstance(error, str) or error > WRONG
            )
            yield Named(name, LINES[name.split()[0]], found["ms"], found["selected"], wrong)


READERS: dict[str, Callable[[dict[str, Any]], Iterator[Named]]] = {
    "h100-torch2.11-fa4b36": _first,
    "h100-fa3-fa4-cudnn": _packages,
    "h100-torch2.11-backends": _backends,
    "h100-torch2.11-backends-2": _backends,
    "h100-torch2.11-small-calls": _small,
    "h100-torch2.11-wide-heads": _wide_heads,
    "h100-torch2.11-chunked": _chunked,
    "h100-torch2.11-flex-crossover": _crossover,
    "h100-torch2.11-ragged": _ragged,
}
"""What reads each file."""
