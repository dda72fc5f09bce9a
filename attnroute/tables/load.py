"""Load the shipped tables, those of plug-ins, and an overlay folder on top.

Files ship inside the wheel as `attnroute/_capability_tables`; an editable install has them as the sibling
folder `capability_tables`. Plug-ins and an overlay have folders of the same layout.
"""

from __future__ import annotations

from pathlib import Path

from attnroute.errors import TableError
from attnroute.memory import INSTALLED, cached
from attnroute.tables import plugins
from attnroute.tables.folders import Tables
from attnroute.tables.read import shipped_folder
from attnroute.tables.strays import check_overlay


def load(overlay: Path | None = None) -> Tables:
    """Return the shipped tables with those of plug-ins, and an overlay folder on top if one is given.

    Plug-ins are looked for and files are read once; `attnroute.reset()` lets that be done again.

    Raises:
        TableError: A folder or file is wrong, nothing reads a file, or two plug-ins have one name.

    Warns:
        PluginWarning: A plug-in is left out, because something in it is wrong.
    """
    return _load(None if overlay is None else overlay.absolute())


@cached(8, INSTALLED)
def _load(overlay: Path | None) -> Tables:
    installed = _installed()
    if overlay is None:
        return installed
    if not overlay.is_dir():
        msg = f"ATTNROUTE_TABLES requires a folder with the layout of capability_tables; got {overlay}."
        raise TableError(msg)
    tables = Tables((*installed.folders, overlay), installed.problems)
    check_overlay(overlay, tables)
    return tables


@cached(1, INSTALLED)
def _installed() -> Tables:
    """Return the shipped tables and those of plug-ins."""
    shipped = Tables((shipped_folder(),))
    folders, problems = plugins.usable(shipped, lambda folder: Tables((*shipped.folders, folder)))
    return Tables((*shipped.folders, *folders), problems)
