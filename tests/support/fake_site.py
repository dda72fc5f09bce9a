"""A folder of installed distributions of our own, written as an installer writes them, and removed so too."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]
FLASH_ATTN = {
    "flash_attn/__init__.py": "",
    "flash_attn/flash_attn_interface.py": "",
    f"flash_attn_2_cuda{EXTENSION}": "",
}
OLD_CUTE = {"flash_attn/cute/__init__.py": "", "flash_attn/cute/interface.py": "import cutlass\n"}
"""What flash-attn 2.8 carries of an early FA4."""
NEW_CUTE = {
    "flash_attn/cute/__init__.py": '__version__ = "0.0.0"\n',
    "flash_attn/cute/interface.py": "import flash_attn.cute.cache_utils\n",
    "flash_attn/cute/cache_utils.py": "",
}
"""What flash-attn-4 carries: no flash_attn/__init__.py, and a version that is always the same."""


class Site:
    """One folder on the path."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def install(self, name, version, files=None, *, info="dist-info", metadata=None, record=True):
        """Write files and metadata; what others installed under the same names is replaced."""
        written = {**(files or {})}
        place = f"{name.replace('-', '_')}-{version}.{info}"
        said = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if metadata is None else metadata
        written[f"{place}/{'METADATA' if info == 'dist-info' else 'PKG-INFO'}"] = said
        if record:
            names = [*written, f"{place}/RECORD"]
            written[f"{place}/RECORD"] = "".join(f"{n},,\n" for n in names)
        for path, text in written.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()

    def uninstall(self, name):
        """Remove every file of a distribution's RECORD, whoever wrote it last."""
        (record,) = self.folder.glob(f"{name.replace('-', '_')}-*.dist-info/RECORD")
        for line in record.read_text(encoding="utf-8").splitlines():
            path = self.folder / line.partition(",")[0]
            path.unlink(missing_ok=True)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()
        importlib.invalidate_caches()


def path_of(*folders):
    """Return a path with these folders first and nothing that is really installed."""
    rest = [p for p in sys.path if not {"site-packages", "dist-packages"} & set(Path(p).parts)]
    return [*map(str, folders), *rest]
