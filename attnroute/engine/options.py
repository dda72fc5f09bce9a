"""Which options of the tables a kernel is given for one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attnroute.engine.evaluate import Form, Prepared, certainly_holds

if TYPE_CHECKING:
    from attnroute.tables.schema import OptionValue


class Options(NamedTuple):
    """What a kernel is given.

    Attributes:
        values: Names with their values, by name.
        rows: The id of the row that each value comes from, in the same order.
    """

    values: tuple[tuple[str, OptionValue], ...] = ()
    rows: tuple[str, ...] = ()


def options_for(form: Form, rows: Prepared) -> Options:
    """Merge every row of options that certainly applies, later rows over earlier ones.

    Args:
        form: The call as the kernel gets it, after its repairs.
        rows: The rows of the backend.

    Returns:
        No values where no row applies: the kernel then chooses for itself.
    """
    if not rows.options:
        return Options()
    stated: dict[str, tuple[OptionValue, str]] = {}
    for row in rows.options:
        if certainly_holds(row.option, form.facts, rows.host):
            stated |= {name: (value, row.id) for name, value in row.option.set.items()}
    names = sorted(stated)
    return Options(tuple((name, stated[name][0]) for name in names), tuple(stated[name][1] for name in names))
