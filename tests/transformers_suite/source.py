"""transformers' `tests/test_modeling_common.py` as a module in which "sdpa" is attnroute's name.

The file is in no wheel. The session of noxfile.py takes it from the source archive of the release that is
installed, and names the folder in `TRANSFORMERS_TESTS`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

from attnroute.integrations.transformers import register

PACKAGE = "transformers_tests"
IMPLEMENTATION = os.environ.get("TRANSFORMERS_TESTS_IMPLEMENTATION", "attnroute")
"""With "sdpa" here the suite shows what fails with transformers' own implementation, too."""


def common_tests() -> ModuleType:
    """Return the module of the common tests."""
    folder = Path(os.environ["TRANSFORMERS_TESTS"])
    package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    path = folder / "test_modeling_common.py"
    text = path.read_text(encoding="utf-8")
    for place, name in re.findall(r"^from \.(\S+) import (\w+)$", text, flags=re.MULTILINE):
        if not (folder / f"{place.replace('.', '/')}.py").exists():
            _leave_out(place, name)
    text = text.replace('"sdpa"', f'"{IMPLEMENTATION}"')
    module = ModuleType(f"{PACKAGE}.test_modeling_common")
    module.__file__, module.__package__ = str(path), PACKAGE
    sys.modules[module.__name__] = module
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def _leave_out(place: str, name: str) -> None:
    """Put an empty class where the common tests inherit tests that the source archive does not have."""
    parts = place.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join([PACKAGE, *parts[:end]])
        if full not in sys.modules:
            sys.modules[full] = ModuleType(full)
            sys.modules[full].__path__ = []
    setattr(sys.modules[f"{PACKAGE}.{place}"], name, type(name, (), {}))


def route_by_default() -> None:
    """Let models that take "sdpa" by default, because nobody asked for it, take attnroute."""
    register()
    original = PreTrainedModel.get_correct_attn_implementation

    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        found = original(self, *args, **kwargs)
        asked = args[0] if args else kwargs.get("requested_attention")
        return original(self, IMPLEMENTATION) if found == "sdpa" and asked != "sdpa" else found

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
