"""Table folders of one's own, laid over the shipped ones."""

from __future__ import annotations

from attnroute.tables.read import shipped_folder

EVIDENCE = 'evidence = [{ kind = "own", ref = "this test" }]'
ROW = f'[[rule]]\nname = "mine"\nrequires = {{ head_dim_qk = "<=1" }}\nbecause = "of this test"\n{EVIDENCE}\n'


def own_backend():
    """A backend of one's own: chunked under another name."""
    text = (shipped_folder() / "any" / "chunked.toml").read_text(encoding="utf-8")
    head, rest = text.split("[backend]", 1)
    lines = [line for line in rest.split("\n[[", 1)[0].splitlines() if not line.startswith("include")]
    return f"{head}[backend]\n" + "\n".join(lines)


def put(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def own_overlay(folder):
    """A folder that declares one backend."""
    return put(folder, {"any/ours.toml": own_backend(), "cpu/ours.toml": ""})
