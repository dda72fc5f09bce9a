"""Hold the tables against what the checks of a release take, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attnroute.audit.standins import UNDECIDED
from attnroute.engine.evaluate import Form, Prepared, prepared, versions_known_id
from attnroute.engine.select import Judgement
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.line import render
from attnroute.question.nodes import CausalNode, WindowNode
from attnroute.question.policy import Policy
from attnroute.tables.folders import Tables


class Opinion(NamedTuple):
    """What the tables say of one call.

    Attributes:
        rows: The rows that keep the backend from running it.
        call: The call as the kernel would get it, repaired where rows name repairs.
    """

    rows: tuple[str, ...]
    call: Call


class Difference(NamedTuple):
    """A call about which tables and release disagree.

    Attributes:
        arch: The architecture.
        call: The call.
        rows: The rows that refuse it; none where the tables accept it.
        said: Why the release refuses it, "" where it does not.
    """

    arch: str
    call: Call
    rows: tuple[str, ...]
    said: str

    def __str__(self) -> str:
        return f"{self.arch}: {render(self.call)}"


@dataclass
class Comparison:
    """What was found about one release.

    Attributes:
        agree: How many answers are the same.
        loose: What the tables accept and the release refuses.
        strict: What the tables refuse and the release takes.
        undecided: What the release's code could not say without a GPU, with counts.
    """

    agree: int = 0
    loose: list[Difference] = field(default_factory=list)
    strict: list[Difference] = field(default_factory=list)
    undecided: Counter[str] = field(default_factory=Counter)

    def add(self, arch: str, opinion: Opinion, said: str) -> None:
        """Take one more answer in; `said` is why the release refuses, "" where it does not."""
        if said.startswith(UNDECIDED):
            self.undecided[said.removeprefix(UNDECIDED)] += 1
        elif bool(said) == bool(opinion.rows):
            self.agree += 1
        else:
            found = Difference(arch, opinion.call, opinion.rows, said)
            (self.loose if said else self.strict).append(found)


class Judge:
    """Asks the tables about the same calls on many hosts, once for hosts for which the same rows hold."""

    def __init__(self, tables: Tables, backend: str, calls: Iterable[Call]) -> None:
        """Take the calls, as decisions see them."""
        self._tables = tables
        self._backend = backend
        self._forms = [Form(call) for call in calls]
        self._known: dict[tuple[object, ...], tuple[Opinion, ...]] = {}

    def opinions(self, host: Host) -> tuple[Opinion, ...]:
        """Return what the tables say of each call, versions that nobody looked at taken for known."""
        rows = prepared(self._tables, host)[self._backend]
        key = (host.arch, *((row.place, row.is_certain) for row in rows.active))
        if key not in self._known:
            self._known[key] = tuple(self._opinion(rows, form) for form in self._forms)
        return self._known[key]

    def _opinion(self, rows: Prepared, form: Form) -> Opinion:
        final = Judgement(rows, form, Policy()).final
        outside = versions_known_id(self._backend)
        refusing = tuple(row for row, *_ in final.blocking if row != outside)
        return Opinion(refusing, form.call if refusing else final.form.call)


def question(call: Call) -> dict[str, Any]:
    """Return a call in the words of the processes that ask releases."""
    band = next((node for node in call.mask if isinstance(node, CausalNode | WindowNode)), None)
    return {
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
        "bottom_right": band is not None and band.alignment == "bottom_right",
        "softcap": call.softcap,
        "sink": call.sink,
        "deterministic": call.deterministic,
    }
