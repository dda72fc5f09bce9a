"""The calls and the architectures that releases are asked about."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from attnroute.question.line import parse
from attnroute.question.normalize import normalize

if TYPE_CHECKING:
    from attnroute.question.call import Call
    from attnroute.tables.folders import Tables

_HEAD_DIMS: Final = (
    4,
    *range(8, 137, 8),
    *range(160, 265, 8),
    12,
    20,
    36,
    68,
    100,
    132,
    250,
    300,
    320,
    384,
    512,
    576,
)
_PAIRS: Final = (
    "64", "128", "96", "80", "8", "72", "104", "136", "160", "192", "256", "192/128", "64/128", "128/64",
    "128/96", "64/192", "64/512", "256/128", "512",
)  # fmt: skip
_HEADS: Final = ("hq8", "hq8 hkv2", "hq8 hkv1", "hq24 hkv8")
_LENGTHS: Final = ("sq512", "sq1 skv512", "sq0 skv512", "sq512 skv0", "sq300 skv700", "sq700 skv300")
_DTYPES: Final = ("bf16", "fp16", "fp32", "fp8e4")
_FEATURES: Final = (
    "", "causal", "window=128,0", "window=64,64", "softcap=30", "sink", "deterministic", "lse", "thd",
    "thd causal", "thd softcap=30", "thd sink", "thd deterministic", "thd window=128,0", "causal softcap=30",
    "causal sink", "causal deterministic", "window=128,0 sink", "softcap=30 sink", "bshd",
    "window=128,0 softcap=30 deterministic",
)  # fmt: skip
_PHASES: Final = ("", "train")


@cache
def grid() -> tuple[Call, ...]:
    """Return the calls that every release is asked about: pairs of head dims, features of some of them."""
    heads = product(_PHASES, ("hq8", "hq8 hkv2"), _HEAD_DIMS, _HEAD_DIMS)
    lines = [f"bf16 b2 {count} sq512 d{qk}/{v} {phase}" for phase, count, qk, v in heads]
    features = product(_PHASES, _HEADS, _PAIRS, _FEATURES)
    lines += [f"bf16 b2 {count} sq512 d{pair} {words} {phase}" for phase, count, pair, words in features]
    kinds = product(
        _PHASES, _DTYPES, _LENGTHS, ("64", "128", "192/128", "256"), ("", "causal=bottom_right", "bshd")
    )
    lines += [
        f"{dtype} b2 hq8 {lengths} d{pair} {words} {phase}" for phase, dtype, lengths, pair, words in kinds
    ]
    long = product(
        _PHASES, ("sq16384", "sq131072"), ("64", "128", "192/128"), ("", "thd deterministic", "lse")
    )
    lines += [f"bf16 b2 hq32 hkv8 {n} d{pair} causal {words} {phase}" for phase, n, pair, words in long]
    return tuple(dict.fromkeys(normalize(parse(line)) for line in lines))


class Card(NamedTuple):
    """An architecture's number, 90 for 9.0, and the bytes of shared memory that a block may have."""

    number: int
    shared_memory: int


def cards(tables: Tables) -> dict[str, Card]:
    """Return every architecture that may be asked about."""
    found = {}
    for name in tables.arch_names:
        table = tables.arch(name)
        capability, memory = table.compute_capability, table.shared_memory_per_block
        if capability is not None and memory is not None:
            found[name] = Card(10 * capability[0] + capability[1], memory)
    return found
