"""The calls of real models that `sweep.py --set models` measures: tensors as models have them."""

from __future__ import annotations

from sweep_calls import SweepCall

Sizes = tuple[tuple[int, ...], ...]
_LLAMA, _SMALL, _BERT, _GEMMA = (32, 8), (64, 8), (12, 12), (16, 8)


def _unit(
    sizes: Sizes,
    mask: str,
    width: int,
    heads: tuple[int, int],
    phase: str = "inference",
    *,
    memory: str = "tokens",
    extra: str = "none",
    dtype: str = "bf16",
    width_v: int = 0,
) -> list[SweepCall]:
    """Return one structure at several sizes: batch and length, or batch, queries and keys."""
    return [
        SweepCall(
            dtype,
            "contiguous" if mask.startswith("thd") else memory,
            mask,
            extra,
            (width, width_v or width),
            heads,
            phase,
            batch,
            lengths[0],
            lengths[-1],
        )
        for batch, *lengths in sizes
    ]


def models() -> list[list[SweepCall]]:
    """Return the calls by structure, in the order in which they are measured."""
    return [*_language_models(), *_encoders(), *_images(), *_decoding(), *_rare()]


def _language_models() -> list[list[SweepCall]]:
    train = "training"
    return [
        _unit(((4, 1024), (2, 4096), (1, 16384)), "causal", 128, _LLAMA),
        _unit(((8, 512), (1, 6000), (1, 24576)), "causal", 128, _LLAMA, memory="contiguous"),
        _unit(((8, 1024), (4, 2048), (1, 16384)), "causal", 128, _LLAMA, train),
        _unit(((32, 512), (8, 1024), (4, 2048)), "causal", 64, _BERT, train),
        _unit(((16, 512), (8, 2048), (2, 4096)), "causal", 64, _LLAMA, train),
        _unit(((16, 512), (2, 4096), (1, 16384)), "causal", 64, _LLAMA),
        _unit(((64, 128), (4, 2048), (1, 10000)), "causal", 128, (28, 4), memory="contiguous"),
        _unit(((4, 1024), (2, 4096), (1, 8192)), "causal", 256, _GEMMA, train),
        _unit(((4, 2048), (1, 8192), (1, 16384)), "window_large", 256, (8, 4)),
        _unit(((4, 1024), (1, 8192)), "window_small", 256, _GEMMA, train),
        _unit(((2, 4096), (1, 8192), (1, 32768)), "window_large", 128, _LLAMA),
        _unit(((4, 2048), (1, 8192), (1, 16384)), "window_large", 128, _LLAMA, train),
        _unit(((8, 1024), (1, 4096), (1, 16384)), "window_small", 64, _SMALL, extra="sink"),
        _unit(((8, 1024), (1, 4096), (1, 16384)), "causal", 64, _SMALL, extra="sink"),
        _unit(((2, 2048), (1, 4096)), "causal", 64, _SMALL, train, extra="sink"),
        _unit(((1, 4096), (1, 8192), (1, 16384)), "documents_few", 128, _LLAMA, train),
        _unit(((1, 4096), (1, 8192), (1, 16384)), "documents_many", 128, _LLAMA, train),
        _unit(((8, 4096), (8, 8192), (8, 16384)), "thd_causal", 128, _LLAMA, train),
        _unit(((4, 1024), (1, 4096)), "causal", 256, _GEMMA, extra="softcap"),
        _unit(((4, 2048), (1, 4096)), "causal", 96, (32, 32), train),
        _unit(((2, 2048), (1, 4096), (1, 16384)), "causal", 192, (32, 32), width_v=128),
        _unit(((2, 2048), (1, 8192)), "causal", 192, (16, 16), train, width_v=128),
        _unit(((8, 512), (2, 2048), (1, 8192)), "causal", 512, (8, 4)),
        _unit(((4, 1024), (1, 4096)), "causal", 512, _GEMMA, train),
        _unit(((4, 1024), (1, 4096)), "causal", 320, _GEMMA),
        _unit(((4, 1024), (1, 2048), (1, 8192)), "causal", 128, (32, 32), extra="alibi"),
        _unit(((8, 512), (16, 1024), (4, 4096)), "pad_left_causal", 128, _LLAMA),
        _unit(((8, 512), (16, 1024), (4, 4096)), "pad_left_causal", 128, _LLAMA, memory="contiguous"),
        _unit(((8, 512), (4, 2048)), "pad_left_causal", 64, _BERT, train),
        _unit(((2, 8000), (8, 8192)), "thd_causal", 64, _SMALL, extra="sink"),
        _unit(((2, 2048), (1, 4096), (1, 16384)), "prefix", 128, (16, 16)),
        _unit(((4, 1024), (1, 4096)), "prefix", 64, (16, 16), train),
        _unit(((1, 64), (2, 32), (1, 128)), "causal", 64, (8, 8), memory="contiguous"),
        _unit(((1, 64), (4, 128)), "causal", 64, (8, 8), train, memory="contiguous"),
    ]


def _encoders() -> list[list[SweepCall]]:
    train = "training"
    return [
        _unit(((32, 128), (16, 512), (64, 384)), "pad_right", 64, _BERT, train),
        _unit(((8, 512), (16, 1024), (4, 4096)), "pad_right", 64, (16, 16)),
        _unit(((8, 512), (16, 1024)), "pad_right", 64, (16, 16), memory="contiguous"),
        _unit(((1, 4096), (1, 8192), (1, 16384)), "documents_full", 64, _BERT, train),
        _unit(((1, 4096), (1, 16384)), "documents_many", 64, (16, 16), memory="contiguous"),
        _unit(((16, 4096), (32, 16384)), "thd_full", 64, _BERT, train),
        _unit(((4, 1024), (8, 2048), (1, 4096)), "bool_causal", 64, (16, 16), train, memory="contiguous"),
        _unit(((4, 1024), (1, 2048), (1, 8192)), "bool_causal", 128, _LLAMA),
        _unit(((1, 2048), (2, 4096)), "bool_random", 64, (16, 16)),
        _unit(((16, 512), (8, 1024)), "bool_batch", 64, _BERT, train),
        _unit(((8, 512), (4, 2048)), "bool_batch", 128, _LLAMA),
        _unit(((1, 1024), (4, 512), (2, 2048)), "none", 64, (16, 16), memory="contiguous", extra="bias"),
        _unit(((16, 256), (8, 512), (4, 1024)), "none", 64, _BERT, train, extra="bias_grad"),
        _unit(
            ((128, 128), (256, 64), (64, 256)), "none", 32, (8, 8), train, memory="contiguous", extra="bias"
        ),
        _unit(((512, 49), (128, 64)), "none", 32, (6, 6), train, extra="bias_grad"),
        _unit(((8, 1500), (2, 1500)), "none", 64, (20, 20)),
    ]


def _images() -> list[list[SweepCall]]:
    train = "training"
    return [
        _unit(((64, 197), (32, 577), (16, 1024)), "none", 64, (16, 16), train),
        _unit(((64, 197), (8, 1370), (16, 729)), "none", 64, _BERT),
        _unit(((8, 729), (16, 1024)), "none", 72, (16, 16), train),
        _unit(((8, 729), (4, 4096)), "none", 72, (16, 16)),
        _unit(((16, 257), (8, 1024)), "none", 80, (16, 16)),
        _unit(((4, 256), (8, 1024), (2, 4096)), "none", 40, (8, 8)),
        _unit(((4, 1024), (2, 4096), (2, 9216)), "none", 64, (10, 10)),
        _unit(((2, 1024), (2, 4096)), "none", 64, (10, 10), dtype="f16", memory="contiguous"),
        _unit(((2, 1024, 77), (8, 4096, 77), (2, 9216, 77)), "none", 64, (10, 10)),
        _unit(((4, 1024, 77), (8, 4096, 77)), "none", 40, (8, 8), train),
        _unit(((1, 2304), (2, 4608), (1, 16384)), "none", 128, (24, 24)),
        _unit(((1, 8192), (1, 20000), (1, 33000)), "none", 128, (40, 40)),
        _unit(((1, 10240), (2, 5000), (1, 16384)), "pad_right", 128, (24, 24), memory="contiguous"),
        _unit(((1, 8192), (2, 5000)), "pad_right", 128, (24, 24)),
        _unit(((1, 4096, 512), (1, 32768, 512)), "pad_right", 128, (12, 12)),
    ]


def _decoding() -> list[list[SweepCall]]:
    kept = "contiguous"
    return [
        _unit(((16, 1, 2048), (32, 1, 4096), (4, 1, 16384)), "none", 128, _LLAMA, memory=kept),
        _unit(((64, 1, 1024), (1, 1, 8192), (8, 1, 30000)), "none", 128, _LLAMA),
        _unit(((8, 1, 1024), (32, 1, 2048), (1, 1, 4096)), "none", 64, _BERT, memory=kept),
        _unit(((8, 1, 1024), (16, 1, 4096), (64, 1, 2048)), "pad_right", 128, _LLAMA, memory=kept),
        _unit(((8, 1, 1024), (32, 1, 2048)), "pad_left_causal", 128, _LLAMA, memory=kept),
        _unit(((8, 4, 8192), (32, 16, 2048), (1, 8, 16384)), "causal_br", 128, _LLAMA, memory=kept),
        _unit(((1, 512, 8192), (4, 256, 4096), (1, 4096, 16384)), "causal_br", 128, _LLAMA, memory=kept),
        _unit(((8, 1, 2048), (32, 1, 8192), (1, 1, 16384)), "none", 576, (16, 1), width_v=512, memory=kept),
        _unit(((8, 1, 4096), (1, 1, 16384)), "window_large", 128, _LLAMA, memory=kept),
        _unit(((8, 1, 2048), (1, 1, 8192)), "none", 64, _SMALL, extra="sink", memory=kept),
    ]


def _rare() -> list[list[SweepCall]]:
    return [
        _unit(((2, 2048), (1, 8192)), "window_sides", 64, _BERT),
        _unit(((1, 4096), (1, 8192)), "function", 128, (16, 16)),
        _unit(((4, 1024), (1, 4096)), "causal", 128, (64, 1)),
        _unit(((8, 4096), (4, 8192)), "thd_window", 128, _LLAMA),
        _unit(((2, 1024), (1, 4096)), "none", 320, (8, 8)),
    ]
