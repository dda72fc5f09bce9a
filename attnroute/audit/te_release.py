"""Ask a release of TransformerEngine whether its own filters leave its fused attention.

A process of its own: `python -m attnroute.audit.te_release FOLDER` reads one call in JSON per line and writes
one answer in JSON per line. The one file with the filters runs, and what it imports are stand-ins, the rest
of TransformerEngine too: its compiled part, which has the last word, is taken to accept.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

from attnroute.audit.standins import UNDECIDED, answer_all, install, problem_of
from attnroute.audit.tensors import DTYPES, Tensor, torch_names

FILE: Final = "transformer_engine/pytorch/attention/dot_product_attention/utils.py"
_RUN: Final = "F16_arbitrary_seqlen"
"""The backend that is taken to accept, which the executor runs."""
_NUMBERS: Final = {_RUN: 1, "No_Backend": -1}
_OTHER: Final = 2
_REFUSALS: Final = ("Disabling FusedAttention", "Disabling all backends")


class _Backend(int):
    """One of the package's fused backends; its name does not matter beside "none"."""

    @property
    def value(self) -> int:
        """The number."""
        return int(self)

    def __iter__(self) -> Iterator[object]:
        """Give what newer releases unpack: the backend, and why there is none."""
        return iter((self, ""))


class _Backends:
    """The package's enumeration of them, which releases ask by attribute, by item or with a number."""

    def __getattr__(self, name: str) -> _Backend:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> _Backend:
        return _Backend(_NUMBERS.get(name.removeprefix("NVTE_"), _OTHER))


class Release:
    """One release, whose filters run here."""

    def __init__(self, folder: Path) -> None:
        """Run the file."""
        self._arch = (0, 0)
        self._cudnn = (0, 0, 0)
        self._said: list[str] = []
        install(folder, "", self._decided())
        spec = spec_from_file_location("te_filters", folder / FILE)
        assert spec is not None
        assert spec.loader is not None
        self._filters: Any = module_from_spec(spec)
        sys.modules[spec.name] = self._filters
        spec.loader.exec_module(self._filters)
        self._filters.AttentionLogging._log_level = logging.DEBUG
        handler = logging.Handler()
        handler.emit = lambda record: self._said.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("DotProductAttention")
        logger.addHandler(handler)
        logger.propagate = False

    def _decided(self) -> dict[str, object]:
        utils = "transformer_engine.pytorch.utils"
        backends = _Backends()
        names = {
            f"{utils}.get_device_compute_capability": lambda *_: self._arch,
            f"{utils}.get_cudnn_version": lambda *_: self._cudnn,
            "transformer_engine_torch.get_fused_attn_backend": lambda *_, **__: backends[_RUN],
            "transformer_engine_torch.NVTE_Fused_Attn_Backend": backends,
            "transformer_engine.__version__": "0",
        }
        fused = "transformer_engine.pytorch.cpp_extensions.fused_attn"
        return {**torch_names(), **names, f"{fused}.FusedAttnBackend": backends}

    def answer(self, call: dict[str, Any]) -> str:
        """Return why the release does not run its fused attention, "" where it does."""
        self._arch, self._cudnn = divmod(call["arch"], 10), tuple(call["cudnn"])
        self._said.clear()
        try:
            *_, (_, is_fused, _) = self._filters.get_attention_backend(self._params(call))
        except Exception as error:  # noqa: BLE001 - code of the package
            return problem_of(error)
        if is_fused:
            return ""
        reasons = (text for text in self._said if text.startswith(_REFUSALS))
        return next(reasons, f"{UNDECIDED}not fused, and no word why")

    def _params(self, call: dict[str, Any]) -> Any:
        layout = "thd" if call["ragged"] else "bshd"
        causal = call["causal"] or call["window_size_right"] == 0
        mask = ("causal_bottom_right" if call["bottom_right"] else "causal") if causal else ""
        window = tuple(
            -1 if call[side] is None else call[side] for side in ("window_size_left", "window_size_right")
        )
        given = {
            "qkv_type": Tensor,
            "qkv_dtype": DTYPES[call["dtype"]],
            "qkv_layout": "_".join([layout] * 3),
            "batch_size": call["b"],
            "num_heads": call["hq"],
            "num_gqa_groups": call["hkv"],
            "max_seqlen_q": call["sq"],
            "max_seqlen_kv": call["skv"],
            "num_tokens_q": call["b"] * call["sq"],
            "num_tokens_kv": call["b"] * call["skv"],
            "head_dim_qk": call["d"],
            "head_dim_v": call["dv"],
            "attn_mask_type": "_".join(filter(None, ["padding" if call["ragged"] else "", mask]))
            or "no_mask",
            "window_size": (-1, 0) if call["causal"] else window,
            "bottom_right_diagonal": call["bottom_right"],
            "softcap": call["softcap"],
            "core_attention_bias_requires_grad": False,
            "deterministic": call["deterministic"],
            "is_training": call["training"],
        }
        known = self._filters.AttentionParams.__dataclass_fields__
        return self._filters.AttentionParams(
            **{name: value for name, value in given.items() if name in known}
        )


if __name__ == "__main__":
    answer_all(Release(Path(sys.argv[1])).answer)
