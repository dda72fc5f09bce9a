"""Which options of the tables a kernel is given for one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attnroute.engine.evaluate import certainly_holds
from attnroute.question.facts import facts_of

if TYPE_CHECKING:
    from attnroute.question.call import Call
    from attnroute.question.host import Host
    from attnroute.tables.load import Tables
    from attnroute.tables.schema import OptionValue


class Options(NamedTuple):
    """What a kernel is given.

    Attributes:
        values: Names with their values, by name.
        rows: The id of the row that each value comes from, in the same order.
    """

    values: tuple[tuple[str, OptionValue], ...] = ()
    rows: tuple[str, ...] = ()


def options_for(call: Call, host: Host, tables: Tables, backend: str) -> Options:
    """Merge every row of options that certainly applies, later rows over earlier ones.

    Args:
        call: The call as the kernel gets it, after its repairs.
        host: The machine.
        tables: The capability tables.
        backend: The name of the backend.

    Returns:
        No values where no row applies: the kernel then chooses for itself.
    """
    rows = tables.options(host.arch, backend)
    if not rows:
        return Options()
    facts = facts_of(call)
    said: dict[str, tuple[OptionValue, str]] = {}
    for row in rows:
        if certainly_holds(row.option, call, facts, host):
            said |= {name: (value, row.id) for name, value in row.option.set.items()}
    names = sorted(said)
    return Options(tuple((name, said[name][0]) for name in names), tuple(said[name][1] for name in names))
