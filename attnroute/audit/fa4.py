"""Releases of flash-attn-4, asked about a whole grid of calls, beside the tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnroute.audit import packages
from attnroute.audit.asking import ask
from attnroute.audit.compare import Comparison, Judge, Opinion
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.nodes import CausalNode, WindowNode
from attnroute.question.normalize import normalize
from attnroute.tables.folders import Tables

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE: Final = "flash-attn-4"
_COMPILER: Final = "nvidia-cutlass-dsl"
_TORCH: Final = "2.11.0+cu130"
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
    return tuple(dict.fromkeys(normalize(parse(line)) for line in lines))


def archs(tables: Tables) -> dict[str, tuple[int, int]]:
    """Return every architecture that may be asked about, with its number and the shared memory of a block."""
    found = {}
    for name in tables.arch_names:
        table = tables.arch(name)
        capability, memory = table.compute_capability, table.shared_memory_per_block
        if capability is not None and memory is not None:
            found[name] = (10 * capability[0] + capability[1], memory)
    return found


class Audit:
    """The tables beside releases of flash-attn-4, on every architecture."""

    def __init__(self, tables: Tables) -> None:
        """Prepare the grid."""
        self._tables = tables
        self._archs = archs(tables)
        self._judge = Judge(tables, "fa4", grid())

    def versions(self) -> list[str]:
        """Return the published releases that the tables know, the newest first."""
        return packages.released(PACKAGE, self._tables.backends["fa4"].versions_known[PACKAGE])

    def release(self, version: str) -> Comparison:
        """Compare one release.

        Raises:
            PackageError: Its wheel cannot be had, or its code does not run with stand-ins.
        """
        archive = packages.wheel(PACKAGE, version)
        opinions = list(self._opinions(version, packages.requirements(archive)))
        comparison = Comparison()
        with tempfile.TemporaryDirectory() as folder:
            questions = [question(opinion.call, *self._archs[arch]) for arch, opinion in opinions]
            answers = ask("fa4_release", packages.python_of(archive, Path(folder)), questions)
        for (arch, opinion), answer in zip(opinions, answers, strict=True):
            comparison.add(arch, opinion, answer)
        return comparison

    def _opinions(self, version: str, needs: dict[str, Requirement]) -> Iterator[tuple[str, Opinion]]:
        """Give what the tables say, with the oldest compiler that the release asks for."""
        compilers = [
            term.version for term in needs[_COMPILER].specifier if term.operator in (">=", "==", "~=")
        ]
        versions = {"torch": _TORCH, PACKAGE: version, _COMPILER: compilers[0]}
        for arch in self._archs:
            for opinion in self._judge.opinions(Host(arch=arch, versions=versions)):
                yield arch, opinion


def question(call: Call, arch: int, shared_memory: int) -> dict[str, Any]:
    """Return a call as the process asks the release's functions."""
    band = next((node for node in call.mask if isinstance(node, CausalNode | WindowNode)), None)
    return {
        "arch": arch,
        "shared_memory": shared_memory,
        "dtype": call.dtype,
        "b": call.batch,
        "hq": call.num_heads_q,
        "hkv": call.num_heads_kv,
        "sq": call.seqlen_q,
        "skv": call.seqlen_kv,
        "d": call.head_dim_qk,
        "dv": call.head_dim_v,
        "ragged": call.layout == "thd",
        "training": call.phase == "training",
        "causal": isinstance(band, CausalNode),
        "window_size_left": band.left if isinstance(band, WindowNode) else None,
        "window_size_right": band.right if isinstance(band, WindowNode) else None,
        "softcap": call.softcap,
        "sink": call.sink,
        "deterministic": call.deterministic,
    }
