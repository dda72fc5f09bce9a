"""What TransformerEngine's own module picks, asked of its release, beside what `any/te_choice.toml` says."""

from __future__ import annotations

import ast
import json
import tempfile
import zipfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attnroute.audit import packages, recordings
from attnroute.audit.asking import ask
from attnroute.audit.compare import Comparison, Difference
from attnroute.audit.grid import cards
from attnroute.audit.record import SOURCES
from attnroute.audit.standins import UNDECIDED
from attnroute.audit.te_choice_release import CHECK, CHECK_FILE
from attnroute.audit.te_release import FILE
from attnroute.engine.te_choice import answer, chosen, te_form
from attnroute.errors import ArgumentError
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.nodes import AlibiBias, CausalNode, DenseBias, DenseNode, KeyPaddingNode, WindowNode
from attnroute.tables.read import shipped_folder

if TYPE_CHECKING:
    from attnroute.tables.folders import Tables

RECORD: Final = "tests/tables/data/te_choice.json.gz"
_PACKAGE: Final = "transformer-engine"
_FA4: Final = "4.0.0b36"
_INSTALLED: Final[tuple[dict[str, str], ...]] = (
    {"flash-attn": "2.8.3"},
    {"flash-attn-4": _FA4, "nvidia-cutlass-dsl": "4.8.1"},
    {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": _FA4, "nvidia-cutlass-dsl": "4.8.1"},
)
_PATHS: Final = {"flash-attn": "flash-2", "flash-attn-3": "flash-3", "flash-attn-4": "flash-4"}
_CUDNN: Final = ("9.14.0", "9.19.0")
_PAIRS: Final = ("64", "128", "256", "192/128")
_MORE_PAIRS: Final = ("64/512", "128/96", "136/128", "200", "100", "512", "120/128", "128/120")
_FEATURES: Final = (
    "", "causal", "window=64,0", "softcap=30", "deterministic", "dropout=0.1", "sink", "alibi",
    "bias=bf16:1x8x512x512", "bias=bf16:2x1x512x512:grad", "dense=1x1x512x512", "keys=300,512", "thd",
    "thd causal", "thd sink", "thd window=64,64", "deterministic sink", "thd deterministic",
    "window=64,64 dropout=0.1", "softcap=30 dropout=0.1", "deterministic bias=bf16:1x8x512x512:grad",
    "causal alibi", "softcap=30 causal",
)  # fmt: skip
_FEW: Final = 5
"""How many of them are asked about with more head dims."""
_LENGTHS: Final = (
    "sq1 skv512 causal=bottom_right", "sq1 skv512", "sq300 skv512 causal=top_left",
    "sq300 skv512 window=64,0,bottom_right", "sq300 skv512 window=64,64,top_left",
    "sq512 skv300 window=64,64,bottom_right", "sq512 skv300 causal=bottom_right",
    "sq300 skv512 causal=top_left keys=512,100", "sq16384 thd causal deterministic",
    "sq8192 thd causal deterministic",
)  # fmt: skip
_PHASES: Final = ("", "train")


class Situation(NamedTuple):
    """Where calls are asked about: a machine, variables that are 0, and whether cuDNN takes every call."""

    host: Host
    off: tuple[str, ...]
    cudnn_takes: bool


def calls() -> tuple[Call, ...]:
    """Return the calls that are asked about."""
    pairs = [*product(_PAIRS, _FEATURES), *product(_MORE_PAIRS, _FEATURES[:_FEW])]
    lines = [f"bf16 b2 hq8 hkv4 sq512 d{d} {words} {phase}" for (d, words), phase in product(pairs, _PHASES)]
    lines += [f"bf16 b2 hq8 {n} d{d} {phase}" for n, d, phase in product(_LENGTHS, ("64", "256"), _PHASES)]
    lines += ["fp32 b2 hq8 sq512 d64 causal", "fp16 b2 hq8 sq512 d64 causal train"]
    return tuple(te_form(parse(line))[0] for line in dict.fromkeys(lines))


def situations(tables: Tables) -> Iterator[Situation]:
    """Give every situation."""
    states = (
        ((), True),
        ((), False),
        (("NVTE_FUSED_ATTN",), True),
        (("NVTE_FLASH_ATTN_V3", "NVTE_FUSED_ATTN"), True),
    )
    for arch, installed, cudnn in product(cards(tables), _INSTALLED, _CUDNN):
        host = Host(arch=arch, versions={"cudnn": cudnn, **installed})
        yield from (Situation(host, off, takes) for off, takes in states)


def predicted(tables: Tables, situation: Situation, asked: tuple[Call, ...]) -> list[str]:
    """Return the path that the table says for each call."""
    refused = () if situation.cudnn_takes else ("refused",)
    off = frozenset(situation.off)
    return [chosen(answer(call, situation.host, tables.te_choice, refused, off)) for call in asked]


class Audit:
    """The table beside the release that it is about."""

    package = _PACKAGE

    def __init__(self, tables: Tables) -> None:
        """Take the tables."""
        self._tables = tables

    def versions(self) -> list[str]:
        """Return the one release that the table is about."""
        return [self._tables.te_choice.version]

    def release(self, version: str) -> Comparison:
        """Compare the table with a release.

        Raises:
            PackageError: Its wheel cannot be had, or its code does not run with stand-ins.
        """
        asked, comparison = calls(), Comparison()
        for situation, picked in picks(self._tables, version):
            for call, ours, theirs in zip(
                asked, predicted(self._tables, situation, asked), picked, strict=True
            ):
                if theirs.startswith(UNDECIDED):
                    comparison.undecided[theirs.removeprefix(UNDECIDED)] += 1
                elif ours == theirs:
                    comparison.agree += 1
                else:
                    said = f"it picks {theirs}, and the table says {ours} ({_words(situation)})"
                    comparison.loose.append(Difference(situation.host.arch, call, (), said))
        return comparison


def _words(situation: Situation) -> str:
    versions = [f"{name} {version}" for name, version in situation.host.versions.items()]
    off = [f"{name}=0" for name in situation.off]
    return ", ".join([*versions, *off, *([] if situation.cudnn_takes else ["cuDNN refuses"])])


def picks(tables: Tables, version: str) -> Iterator[tuple[Situation, list[str]]]:
    """Ask a release about every call in every situation.

    Raises:
        PackageError: A wheel cannot be had, or the code does not run with stand-ins.
    """
    asked, found, numbers = calls(), list(situations(tables)), cards(tables)
    words = [_question(call, one, numbers[one.host.arch].number) for one in found for call in asked]
    with tempfile.TemporaryDirectory() as folder:
        sources = packages.sources_of(packages.wheel(_PACKAGE, version), Path(folder))
        (sources / CHECK_FILE).write_text(_check(), encoding="utf-8")
        answers = iter(ask("te_choice_release", sources, words))
    for one in found:
        yield one, [next(answers) for _ in asked]


def _check() -> str:
    """Return the check of head dims of a release of flash-attn-4, alone."""
    with zipfile.ZipFile(packages.wheel("flash-attn-4", _FA4)) as archive:
        text = archive.read(SOURCES["fa4"].file).decode("utf-8")
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    check = next(node for node in functions if node.name == CHECK)
    check.decorator_list = []
    return ast.unparse(check)


def _question(call: Call, situation: Situation, arch: int) -> dict[str, Any]:
    installed = [path for name, path in _PATHS.items() if name in situation.host.versions]
    return {
        "arch": arch,
        "cudnn": [int(part) for part in situation.host.versions["cudnn"].split(".")],
        "installed": installed,
        "off": situation.off,
        "cudnn_takes": situation.cudnn_takes,
        "dtype": call.dtype,
        "params": _params(call),
    }


def _params(call: Call) -> dict[str, Any]:
    """Say a call in the words of the module: as a user of it would."""
    ragged, bias = call.layout == "thd", call.bias
    band = next((n for n in call.mask if isinstance(n, CausalNode | WindowNode)), None)
    shape = (1,) * (4 - len(bias.shape)) + bias.shape if isinstance(bias, DenseBias) else None
    kind = "alibi" if isinstance(bias, AlibiBias) else "no_bias" if shape is None else "post_scale_bias"
    padded = ragged or any(isinstance(n, KeyPaddingNode) for n in call.mask)
    at_the_end = band is None or band.alignment == "bottom_right"
    return {
        "qkv_layout": "_".join(["thd" if ragged else "bshd"] * 3),
        "batch_size": call.batch,
        "num_heads": call.num_heads_q,
        "num_gqa_groups": call.num_heads_kv,
        "max_seqlen_q": call.seqlen_q,
        "max_seqlen_kv": call.seqlen_kv,
        "num_tokens_q": call.batch * call.seqlen_q if ragged else 0,
        "num_tokens_kv": call.batch * call.seqlen_kv if ragged else 0,
        "head_dim_qk": call.head_dim_qk,
        "head_dim_v": call.head_dim_v,
        "attn_mask_type": _mask_type(call, band, padded),
        "window_size": _window(call, band),
        "bottom_right_diagonal": at_the_end,
        "softcap": call.softcap,
        "alibi_slopes_shape": (call.num_heads_q,) if kind == "alibi" else None,
        "core_attention_bias_type": kind,
        "core_attention_bias_shape": shape,
        "core_attention_bias_requires_grad": bool(shape and bias is not None and bias.requires_grad),
        "attention_dropout": call.dropout_p,
        "deterministic": call.deterministic,
        "is_training": call.phase == "training",
        "softmax_type": "learnable" if call.sink else "vanilla",
    }


def _mask_type(call: Call, band: CausalNode | WindowNode | None, padded: bool) -> str:
    if any(isinstance(node, DenseNode) for node in call.mask):
        return "arbitrary"
    causal = isinstance(band, CausalNode) or (band is not None and band.right == 0)
    parts = ["padding"] if padded else []
    parts += ["causal"] if causal else []
    parts += ["bottom_right"] if causal and band is not None and band.alignment == "bottom_right" else []
    return "_".join(parts) or "no_mask"


def _window(call: Call, band: CausalNode | WindowNode | None) -> tuple[int, int]:
    """Return the sides of a window; one that is open reaches over every key."""
    if not isinstance(band, WindowNode):
        return (-1, 0) if band is not None else (-1, -1)
    sides = [call.seqlen_kv if side is None else side for side in (band.left, band.right)]
    return sides[0], sides[1]


def record(tables: Tables) -> list[str]:
    """Write what the release picks into this checkout.

    Raises:
        ArgumentError: This is no checkout.
        PackageError: A wheel cannot be had, or the code does not run with stand-ins.
    """
    path, version = shipped_folder().parent / RECORD, tables.te_choice.version
    if not path.parent.is_dir():
        raise ArgumentError(f"record requires a checkout of attnroute; got no {path.parent}; run it there.")
    rows = [
        {
            "arch": one.host.arch,
            "versions": one.host.versions,
            "off": one.off,
            "cudnn_takes": one.cudnn_takes,
            "picked": picked,
        }
        for one, picked in picks(tables, version)
    ]
    recordings.write(path, json.dumps({"release": version, "rows": rows}))
    return [f"{RECORD}: what {FILE.rpartition('/')[2]} of {version} picks in {len(rows)} situations"]


def recorded() -> Iterator[tuple[Situation, list[str]]]:
    """Give what was recorded.

    Raises:
        ArgumentError: This is no checkout.
    """
    for row in json.loads(recordings.read(shipped_folder().parent / RECORD))["rows"]:
        host = Host(arch=row["arch"], versions=row["versions"])
        yield Situation(host, tuple(row["off"]), row["cudnn_takes"]), row["picked"]
