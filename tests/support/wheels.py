"""Wheels as the cache of audits has them, made by tests."""

from __future__ import annotations

import zipfile

from attnroute.audit import packages


def put_wheel(monkeypatch, folder, name, version, files, needs=()):
    """Write a wheel into a cache of its own, where pip is not needed for it."""
    monkeypatch.setattr(packages, "cache", lambda: folder)
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / "wheels" / f"{stem}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        for file, text in files.items():
            archive.writestr(file, text)
    return path
