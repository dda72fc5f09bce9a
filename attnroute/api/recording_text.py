"""A recording as a table: a row for each kernel in modules that are alike, below it what is worth knowing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Final

from attnroute.report.layout import WIDTH, wrapped
from attnroute.report.sentences import host_line, listed

if TYPE_CHECKING:
    from attnroute.api.recording import Place, Recording, TracedCall

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_SIZES: Final = re.compile(r"\b(b|sq|skv)(\d+)\b")
_WHOLE_FROM: Final = 100
"""Milliseconds of which nobody reads the decimals."""
_WIDE: Final = 100
"""Columns of a terminal from which on shares are shown too."""
_ROWS: Final = 40
"""Rows of the table; the file has all of them."""
_CLOCKS: Final = {"device": "events on the device", "host": "the clock of the host"}
_NOTHING: Final = (
    "no attention call was seen. Not seen are kernels that are called directly (flash-attn, xformers,"
    " FlexAttention), other processes, graphs that were made before the trace, and torch's own function in"
    " other threads."
)


@dataclass
class _Row:
    """Calls of one kernel in modules whose paths differ in numbers alone, at lengths that may differ."""

    traced: TracedCall
    is_stock: bool
    places: list[Place] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """What they took together."""
        return sum((p.forward_ms or 0.0) + (p.backward_ms or 0.0) for p in self.places)

    @property
    def count(self) -> int:
        """How many calls ran, as far as it is known."""
        return sum(place.count or 0 for place in self.places)


def render_recording(recording: Recording, width: int = WIDTH) -> str:
    """Return the table of a recording.

    Args:
        recording: What was recorded.
        width: Columns.
    """
    rows = _rows(recording)
    if not rows:
        return f"attnroute: {_NOTHING}"
    total = sum(row.ms for row in rows)
    lines = [*_title(recording, rows, total, width), _table(rows[:_ROWS], total, width)]
    for at, row in enumerate(rows[:_ROWS], 1):
        lines += _notes(at, row, width)
    if len(rows) > _ROWS:
        lines.append(f"and {len(rows) - _ROWS} more rows, which the file of the calls has")
    if recording.left_out:
        lines.append(f"{recording.left_out} calls of further kinds found no room in the trace")
    return "\n".join(lines)


def _rows(recording: Recording) -> list[_Row]:
    rows: dict[object, _Row] = {}
    for is_stock, calls in ((False, recording.calls), (True, recording.stock)):
        for traced in calls:
            for place in traced.places:
                kind = (
                    traced.backend,
                    traced.how,
                    traced.device,
                    traced.repairs,
                    _SIZES.sub(r"\1", traced.line),
                    traced.unread,
                )
                where = (place.model, _NUMBER.sub("*", place.module))
                row = rows.setdefault((is_stock, kind, where), _Row(traced, is_stock))
                row.places.append(place)
                if traced.line not in row.lines:
                    row.lines.append(traced.line)
    return sorted(rows.values(), key=lambda row: (-row.ms, -row.count))


def _title(recording: Recording, rows: list[_Row], total: float, width: int) -> list[str]:
    counts = [f"{count} calls"] if (count := sum(row.count for row in rows)) else []
    if in_graphs := sum(len(row.places) for row in rows if row.traced.how == "compiled"):
        counts.append(f"{in_graphs} in graphs of torch.compile, whose runs nobody counts")
    clocks = sorted({row.traced.clock for row in rows if row.traced.how == "eager"})
    time = f"; {_ms(total)} ms by {listed([_CLOCKS[clock] for clock in clocks])}" if clocks else ""
    lines = wrapped(f"{listed(counts)}{time}", "attention: ", " " * len("attention: "), width)
    for device, host in recording.hosts.items():
        lines += wrapped(host_line(host), f"{device}: ", " " * len(f"{device}: "), width)
    return lines


def _table(rows: list[_Row], total: float, width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", justify="right")
    table.add_column("module", overflow="fold", ratio=1)
    table.add_column("kernel", no_wrap=True)
    columns = ("calls", "ms each", "ms in all", "share")[: None if width >= _WIDE else -1]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    is_one_model = len({place.model for row in rows for place in row.places}) == 1
    for at, row in enumerate(rows, 1):
        table.add_row(
            str(at),
            _module(row, is_one_model=is_one_model),
            _kernel(row),
            *_times(row, total)[: len(columns)],
        )
    stream = StringIO()
    Console(file=stream, width=width, highlight=False, no_color=True, markup=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _module(row: _Row, *, is_one_model: bool) -> str:
    """Name modules whose paths differ in one number by its range: "layers.0-31.self_attn"."""
    paths = list(dict.fromkeys(place.module for place in row.places))
    model = row.places[0].model
    if not model:
        return "no module"
    numbers = [[int(n) for n in _NUMBER.findall(path)] for path in paths]
    ranges = iter([_range({found[at] for found in numbers}) for at in range(len(numbers[0]))])
    path = _NUMBER.sub(lambda _: next(ranges), paths[0])
    if not path:
        return model
    return path if is_one_model else f"{model}: {path}"


def _range(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]}-{ordered[-1]}"
    return f"{{{','.join(map(str, ordered))}}}"


def _kernel(row: _Row) -> str:
    return f"torch's {row.traced.backend}" if row.is_stock else row.traced.backend


def _ms(time: float) -> str:
    return f"{time:,.0f}" if time >= _WHOLE_FROM else f"{time:.3g}"


def _times(row: _Row, total: float) -> tuple[str, str, str, str]:
    if row.traced.how == "compiled":
        return f"{len(row.places)} in graphs", "", "", ""
    if row.traced.how == "captured":
        return f"{row.count} captured", "", "", ""
    forward = sum(p.forward_ms or 0.0 for p in row.places)
    backward, passes = sum(p.backward_ms or 0.0 for p in row.places), sum(p.backward for p in row.places)
    calls, each = [str(row.count)], [_ms(forward / row.count)]
    if passes:
        calls.append(f"{passes} bwd")
        each.append(_ms(backward / passes))
    share = f"{100 * row.ms / total:.0f} %" if total else ""
    return "\n".join(calls), "\n".join(each), _ms(row.ms), share


def _notes(at: int, row: _Row, width: int) -> list[str]:
    """What the calls of a row are, what was prepared, what is predicted to be faster."""
    traced = row.traced
    said = [_line(row.lines) if row.lines[0] else f"a call that attention() does not take: {traced.unread}"]
    again = sum(place.recomputed for place in row.places)
    if again:
        said.append(f"{again} of the calls made again by checkpoints")
    longest = max((place.longest_ms or 0.0 for place in row.places), default=0.0)
    if row.count > 2 and longest > row.ms / 2:
        said.append(f"{longest:.3g} ms of it in one call: the first of a kind may compile or plan its kernel")
    if traced.repairs:
        said.append(f"prepared: {listed(traced.repairs)}")
    if row.is_stock and traced.routed not in (None, traced.backend) and not traced.faster:
        said.append(f"routed, it would run on {traced.routed}")
    for found in traced.faster:
        time = f"predicted {found.predicted_ms:.3g} ms in place of {traced.predicted_ms or 0.0:.3g} ms"
        said.append(f"faster: {found.backend}, {time}; not taken: {found.why_not}")
        if found.change:
            said.append(f"  {found.change}")
    first, rest = f"{at:>3}  ", "     "
    return [
        line
        for n, text in enumerate(said)
        for line in wrapped(text, first if n == 0 else rest, f"{rest}  ", width)
    ]


def _line(lines: list[str]) -> str:
    """Say calls that differ in sizes alone as one, each size from its least to its most."""
    sizes = [dict(_SIZES.findall(line)) for line in lines]

    def among(found: re.Match[str]) -> str:
        numbers = sorted({int(of[found[1]]) for of in sizes})
        return f"{found[1]}{numbers[0]}" if len(numbers) == 1 else f"{found[1]}{numbers[0]}-{numbers[-1]}"

    return _SIZES.sub(among, lines[0])
