"""Tables of two backends and a few architectures, as small as the loading of tables needs."""

from __future__ import annotations

EVIDENCE = 'evidence = [{ kind = "own", ref = "this test" }]'
BACKEND = """
[backend]
title = "A backend"
provider = "torch"
needs = ["torch"]
versions_known = { torch = ">=2.5" }
operators = ["aten::mm"]
module = "attnroute.executors.aten.math"
memory = "linear"
"""


def rule(name, requires="head_dim_qk = 8"):
    return f'[[rule]]\nname = "{name}"\nrequires = {{ {requires} }}\nbecause = "of this test"\n{EVIDENCE}\n'


def feature(name, value):
    return f"[features.{name}]\nvalue = {value}\n{EVIDENCE}\n"


def arch(*, inherits="", backends="[]", prefer="default"):
    parent = f'inherits = "{inherits}"\n' if inherits else ""
    head = f'cards = ["a card"]\nbackends = {backends}\n{parent}{EVIDENCE}\n'
    return f'{head}[[prefer]]\nname = "{prefer}"\nfirst = ["fast"]\nbecause = "of this test"\n{EVIDENCE}\n'


def write(folder, files):
    for name, text in files.items():
        path = folder / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def small_tables(folder):
    """Write the tables of two backends and four architectures."""
    files = {
        "any/fast": BACKEND + feature("causal", "true") + feature("window", '"unknown"') + rule("everywhere"),
        "any/other": BACKEND,
        "sm_80/arch": arch(backends='["other"]'),
        "sm_80/fast": feature("window", "false") + rule("ampere"),
        "sm_86/arch": arch(inherits="sm_80"),
        "sm_89/arch": arch(inherits="sm_86"),
        "sm_89/fast": rule("ada"),
        "sm_90/arch": arch(),
    }
    return write(folder / "base", files)


def ids(tables, name, backend="fast"):
    rows = tables.rules(name, backend)
    return None if rows is None else [row.id for row in rows]
