"""Ask a release of TransformerEngine which kernel its own module picks.

A process of its own, as `te_release`: a line of JSON per question, and the name of a path per answer.
Questions are in the words of the release. It is told what is installed, and cuDNN's word, which is
compiled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from attnroute.audit.standins import answer_all, problem_of
from attnroute.audit.te_release import Release
from attnroute.audit.tensors import DTYPES, Tensor

CHECK_FILE: Final = "fa4_check.py"
"""The check of head dims of a flash-attn-4, beside the release."""
CHECK: Final = "_validate_head_dims"
_SINCE: Final = (
    "plus",
    "1_plus",
    "3_plus",
    "4_plus",
    "4_1_plus",
    "5_plus",
    "5_7_plus",
    "6_0_plus",
    "7_0_plus",
)
"""What the release says of a flash-attn 2.8: at least 2, 2.1, ..."""


class Choosing(Release):
    """One release, whose order and filters run here."""

    def __init__(self, folder: Path) -> None:
        """Run the file with the filters, and the check of flash-attn-4."""
        super().__init__(folder)
        names: dict[str, Any] = {}
        exec((folder / CHECK_FILE).read_text(encoding="utf-8"), names)  # noqa: S102 - one function of a release
        self._known = self._filters.FlashAttentionUtils
        self._known.v4_validate_head_dims = staticmethod(names[CHECK])
        self._known.fa3_supports_softcap = True
        self._known.version, self._known.fa3_version, self._known.fa4_version = (
            "flash-2",
            "flash-3",
            "flash-4",
        )
        for name in _SINCE:
            setattr(self._known, f"v2_{name}", True)

    def answer(self, call: dict[str, Any]) -> str:
        """Return the path that the release picks."""
        self._arch, self._cudnn = divmod(call["arch"], 10), tuple(call["cudnn"])
        for name, path in (("", "flash-2"), ("v3_", "flash-3"), ("v4_", "flash-4")):
            setattr(self._known, f"{name}is_installed", path in call["installed"])
        backends = self._filters.FusedAttnBackend
        taken = backends["F16_arbitrary_seqlen" if call["cudnn_takes"] else "No_Backend"]
        self._filters.tex.get_fused_attn_backend = lambda *_, **__: (taken, "")
        for name in [name for name in os.environ if name.startswith("NVTE_")]:
            del os.environ[name]
        os.environ.update(dict.fromkeys(call["off"], "0"))
        try:
            flash, version, fused, _, unfused, _ = self._filters.get_attention_backend(self._asked(call))
        except Exception as error:  # noqa: BLE001 - code of the package
            return problem_of(error)
        if flash:
            return str(version)
        return "fused" if fused else "unfused" if unfused else "none"

    def _asked(self, call: dict[str, Any]) -> Any:
        """Return the record that the release takes; what the question leaves out is as its module has it."""
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in call["params"].items()}
        given |= {"qkv_type": Tensor, "qkv_dtype": DTYPES[call["dtype"]]}
        return self._filters.AttentionParams(**given)


if __name__ == "__main__":
    answer_all(Choosing(Path(sys.argv[1])).answer)
