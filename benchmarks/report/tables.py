"""Fills the tables of pages and of the README: each stands between two marks."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import get_args

from attnroute.question.host import sort_key
from attnroute.question.line import render
from benchmarks.kinds import KINDS
from benchmarks.public_figures import figures
from benchmarks.recorded import TORCH_ONLY, Part, Record
from benchmarks.replay import TOLERATED, Choice, Packages, choices, mean, summary
from benchmarks.report import data, spread

TITLES = {
    "dense_causal_4k": "causal mask given as a tensor, GQA 32/8, 4k tokens, forward",
    "window_4k_of_16k": "sliding window of 4k, GQA 32/8, 16k tokens, forward",
    "docs_8k_train": "packed documents, GQA 32/8, 8k tokens, training",
    "left_pad_causal_2k_b8": "causal, padded on the left, 8 x 2k tokens, forward",
    "hunyuan_video_pad_20k": "key padding, 20k video tokens, forward",
    "prefix_lm_8k": "common prefix of 2k, 8k tokens, forward",
    "alibi_8k": "causal with ALiBi, 8k tokens, forward",
    "d320_gqa_train_4k": "head dim 320, GQA 16/8, 4k tokens, causal, training",
    "gemma4_d512_prefill_4k": "head dim 512, GQA 8/4, 4k tokens, causal, forward",
    "gemma4_d512_train_8k": "head dim 512, GQA 16/8, 8k tokens, causal, training",
    "mla_192_128_prefill_8k": "head dims 192/128 (MLA), 8k tokens, causal, forward",
    "gemma3_d256_train_4k": "head dim 256, GQA 16/8, 4k tokens, causal, training",
    "llama8b_prefill_8k": "causal, GQA 32/8, 8k tokens, forward",
    "llama8b_train_4k_b2": "causal, GQA 32/8, 2 x 4k tokens, training",
    "flux_4608": "full attention, 24 heads, 4608 tokens, forward",
    "gpt2_train_1k_b16_d64": "causal, head dim 64, 16 x 1k tokens, training",
    "decode_b8_8k": "decoding, 8 x 8k keys, GQA 32/8",
    "spec_8_of_4k_b16": "8 queries of 4k keys, batch 16, GQA 32/8",
}
"""The calls that the README shows, by their names in the grid."""
STEPS = {
    "gemma3_train": "Gemma 3",
    "gpt_oss_train": "gpt-oss",
    "llama_d128_packed_train": "Llama on packed documents",
    "llama_d128_train": "Llama",
    "gpt2_train": "GPT-2",
}
"""The models of which the README shows a training step, by their names in the results."""
CHOICES = ("torch alone", "speed-up", "all packages", "speed-up")
MARKED = re.compile(r"(<!-- benchmarks: ([a-z ]+) -->)\n.*?(<!-- end -->)", re.DOTALL)
"""What this writes: everything between two comments, of which the first names a block."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are text and the others numbers."""
    marks = ["---" if at < left else "--:" for at in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, marks, *rows))


def number(value: float) -> str:
    """Return milliseconds with three digits that count."""
    return f"{value:#.3g}".rstrip(".") if value >= 0.1 else f"{value:.3f}"


def times(ratio: float) -> str:
    """Return how many times as fast."""
    return f"{ratio:.2f}x" if ratio < 9.95 else f"{ratio:.1f}x"


def software(record: Record) -> tuple[str, str]:
    """Return the versions of torch and its libraries, and of the packages beside it."""
    versions = record.host.versions
    beside = [f"{name} {v}" for name, v in versions.items() if name not in TORCH_ONLY]
    return ", ".join(f"{name} {versions[name]}" for name in TORCH_ONLY), ", ".join(beside) or "nothing"


def _stock_cell(record: Record) -> str:
    if record.stock is None:
        return "-"
    return number(record.stock.total_ms) + ("" if record.stock.is_right else ", wrong")


def _choice_cells(choice: Choice | None) -> tuple[str, str]:
    if choice is None:
        return "-", ""
    ratio = "" if choice.speed_up is None else times(choice.speed_up)
    return f"{number(choice.took_ms)} `{choice.selected}`", ratio


def filled(text: str) -> str:
    """Return a page with everything between its marks as the results say.

    Raises:
        KeyError: A mark names no block.
    """

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}"

    return MARKED.sub(block, text)


def _summary() -> str:
    """Say how much faster the choices are for calls of known models, and on what machine."""
    rows = data.rows_of_models()
    environment = data.environment(rows[0].record.source)
    dates = " and ".join(sorted({data.environment(row.record.source)["date"] for row in rows}))
    made = {p: [c for row in rows if (c := row.choice(p)) and c.speed_up] for p in get_args(Packages)}
    faster = {
        packages: times(mean(c.speed_up for c in each if c.speed_up)) for packages, each in made.items()
    }
    torch, beside = software(rows[0].record)
    text = (
        f"{environment['card']}, driver {environment['driver']}; {torch}; beside it {beside}; "
        f"{dates}, median milliseconds. Of {len(rows)} calls of known models stock runs "
        f"{len(made['everything'])} correctly; there attnroute is {faster['everything']} as fast "
        f"with all packages and {faster['torch alone']} with torch alone (geometric means)."
    )
    return textwrap.fill(text, 130, break_on_hyphens=False)


def _gains() -> str:
    """Say what training steps of whole models took, with all packages and with torch alone."""
    results, alone = (data.models()[f"h200-torch2.11-whole-models{part}"] for part in ("", "-torch-alone"))
    environment = results["environment"]
    head = (
        f"A training step of transformers models with random weights, {environment['card']}, torch "
        f"{environment['torch']}, transformers {environment['transformers']}, {environment['date']}:"
    )
    steps = []
    for name, title in STEPS.items():
        found = results["models"][name]
        other = next(n for n in ("sdpa", "eager") if n in found)
        ours, theirs, kernels = (
            found["attnroute"]["ms"],
            found[other]["ms"],
            1 / alone["models"][name]["ratio"],
        )
        took = f"{number(ours)} ms in place of {number(theirs)} with {other}"
        steps.append(f"* {title}: {took}, {times(theirs / ours)} ({times(kernels)} with torch alone)")
    return "\n".join([textwrap.fill(head, 130), "", *steps])


def _titled() -> str:
    found = {row.record.name: row for row in data.rows_of_models()}
    lines = [
        (title, _stock_cell(row.record), *_choice_cells(row.alone), *_choice_cells(row.everything))
        for name, title in TITLES.items()
        for row in (found[name],)
    ]
    return table(("call", "stock", *CHOICES), lines)


def _kinds() -> str:
    lines = []
    for kind in KINDS:
        rows = [row for row in data.rows() if row.kind == kind]
        cells: list[str] = [kind, str(len(rows))]
        for packages in get_args(Packages):
            made = [c for row in rows if (c := row.choice(packages))]
            ratios = [c.speed_up for c in made if c.speed_up]
            cells.append(times(mean(ratios)) if ratios else "-")
        lines.append(cells)
    return table(("kind", "calls", "speed-up, all packages", "speed-up, torch alone"), lines)


def _calls() -> str:
    lines = []
    for row in data.rows_of_models():
        choice = row.everything
        best = "-" if choice is None else f"{number(data.best_ms(choice))} `{choice.best}`"
        lines.append(
            (
                f"`{render(row.record.call)}`",
                _stock_cell(row.record),
                *_choice_cells(row.alone),
                *_choice_cells(choice),
                best,
            )
        )
    return table(("call", "stock", *CHOICES, "best"), lines)


def _models() -> str:
    """Return a table of whole models for each file of `models.py`."""
    found = []
    for source, results in data.models().items():
        lines = []
        for name, each in results["models"].items():
            other = next((n for n in ("sdpa", "eager") if n in each), None)
            if other:
                took = (number(each[other]["ms"]), number(each["attnroute"]["ms"]))
                lines.append((name, other, *took, f"{each['ratio']:.3f}"))
        environment = results["environment"]
        names = ("card", "torch", "transformers", "date", "commit")
        said = ", ".join(f"{name} {environment[name]}" for name in names)
        head = ("model", "beside", "its ms", "attnroute", "ratio")
        found += [f"`{source}`: {said}.", table(head, lines, left=2)]
    return "\n\n".join(found) or "Not measured with this version yet."


def _said(environment: dict[str, str]) -> str:
    return ", ".join(f"{name} {environment[name]}" for name in ("card", "torch", "date", "commit"))


def _hosts() -> str:
    """Return the host times of tiny calls beside stock, in microseconds."""
    results, lines = data.host_times(), []
    for name, row in results["us"].items():
        stock, ours = row["stock"], row["attention"]
        over = f"{ours['median'] - stock['median']:+.1f} ({ours['least'] - stock['least']:+.1f})"
        same = next((its for run, its in row.items() if run.startswith("stock, ")), None)
        beside = "" if same is None else f"{ours['median'] - same['median']:+.1f}"
        lines.append((name, f"{stock['median']:.1f}", f"{ours['median']:.1f}", over, beside))
    head = ("call", "stock", "attention()", "over stock (least)", "over stock, sink as a key")
    return f"{_said(results['environment'])}.\n\n{table(head, lines)}"


def _packages() -> str:
    """Return the host times of packages' calls over those of their own functions by hand."""
    results, lines = data.package_host(), []
    for backend, cases in results["backends"].items():
        for name, case in cases.items():
            host, hand = case["host_us"], case["host_us"]["by_hand"]
            alone = host.get("attention_one_thread")
            ratios = ["" if us is None else f"{us / hand:.2f}" for us in (host["attention"], alone)]
            device = case["device_ms"]["attention"] / case["device_ms"]["by_hand"]
            lines.append((f"`{backend}`", name, f"{hand:.0f}", *ratios, f"{device:.2f}"))
    head = ("backend", "call", "by hand, us", "attention()", "in one thread", "device")
    return f"{_said(results['environment'])}.\n\n{table(head, lines, left=2)}"


def _replay() -> str:
    lines = []
    for packages in get_args(Packages):
        for part in get_args(Part):
            made = [
                c
                for row in data.rows()
                if (c := row.choice(packages)) and c.options > 1 and row.record.part == part
            ]
            calls, average, worst, slower, with_stock = summary(made)
            shown = "all packages" if packages == "everything" else packages
            lines.append(
                (shown, part, str(calls), f"{average:.3f}", f"{worst:.2f}", f"{slower} of {with_stock}")
            )
    head = ("installed", "part", "calls", "choice over best", "worst", f"over {TOLERATED} of stock")
    return table(head, lines, left=2)


def _files() -> str:
    lines = []
    for source, group in groupby(data.rows(), lambda row: row.record.source):
        found, environment = list(group), data.environment(source)
        said = (environment["date"], found[0].record.host.device_name, environment["driver"])
        lines.append((f"`{source}`", *said, *software(found[0].record), str(len(found))))
    head = ("file in `benchmarks/results`", "date", "card", "driver", "torch", "beside it", "calls")
    return table(head, lines, left=6)


def _public() -> str:
    """Return how far choices are from the best on cards that others measured, by card."""
    made: dict[tuple[str, str], list[Choice]] = defaultdict(list)
    for choice in choices("everything", figures()):
        host = choice.record.host
        made[host.arch, host.device_name].append(choice)
    lines = []
    for (arch, card), each in sorted(made.items(), key=lambda item: (sort_key(item[0][0]), item[0])):
        sources = ", ".join(f"`{source}`" for source in sorted({choice.record.source for choice in each}))
        said = summary(each)
        lines.append(
            (
                card or "not said",
                f"`{arch}`",
                sources,
                str(said.calls),
                f"{said.mean:.3f}",
                f"{said.worst:.2f}",
            )
        )
    return table(("card", "architecture", "source", "figures", "choice over best", "worst"), lines, left=3)


def _spread() -> str:
    """Tabulate the fastest mesh for each number of GPUs that has the memory."""
    parts = []
    for model, seqlen in spread.CASES:
        rows = [_spread_row(gpus, spread.best(model, seqlen, gpus)) for gpus in spread.GPUS]
        head = ("GPUs", "mesh", "tokens", "GiB", "products", "attention", "waiting", "tokens/s for each GPU")
        parts += [
            f"**{model.name}**, sequences of {seqlen:,} tokens, times in milliseconds:",
            table(head, rows, left=3),
        ]
    return "\n" + "\n\n".join(parts) + "\n"


def _spread_row(gpus: int, step: spread.Step | None) -> tuple[str, ...]:
    if step is None:
        return (str(gpus), "none has the memory", *[""] * 6)
    sizes = ", ".join(f"{name}={count}" for name, count in step.mesh if count > 1)
    times = (step.products_ms, step.attention_ms, step.waiting_ms)
    return (
        str(gpus),
        sizes,
        "whole" if step.way == "local" else step.way,
        f"{step.gib:.1f}",
        *(f"{ms:,.0f}" for ms in times),
        f"{step.tokens_per_second:,.0f}",
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "gains": _gains,
    "summary": _summary,
    "known calls": _titled,
    "kinds": _kinds,
    "calls": _calls,
    "models": _models,
    "hosts": _hosts,
    "packages": _packages,
    "replay": _replay,
    "public": _public,
    "files": _files,
    "spread": _spread,
}
"""What may stand between two marks, by name."""
