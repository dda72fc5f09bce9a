"""Ask a release of the cuDNN frontend what it takes: its operators run up to where cuDNN itself would look.

A process of its own: `python -m attnroute.audit.cudnn_release FOLDER` reads one call in JSON per line and
writes one answer in JSON per line, "" where nothing refuses it. The Python of the operators runs, and what it
imports are stand-ins; graphs are validated by the checks in the release's own headers. Whether cuDNN has a
kernel for a graph that is valid is not asked: that takes its library and a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from attnroute.audit.cpp import Function
from attnroute.audit.graphs import Attributes, GraphTensor, Map, Names
from attnroute.audit.standins import answer_all, install, problem_of
from attnroute.audit.tensors import DTYPES, Tensor, empty, torch_names

OPERATORS: Final = "cudnn/sdpa/fwd/torch_op.py"
_NODES: Final = "include/cudnn_frontend/node"
SURFACE: Final = f"{_NODES}/sdpa_support_surface.h"
NODES: Final = f"{_NODES}/scaled_dot_product_flash_attention.h"
_OPEN: Final = -1


class _ValidGraph(Exception):  # noqa: N818 - it ends a call whose graph is built
    """A graph is valid."""


class _InvalidGraphError(Exception):
    """A graph is not valid."""


class _Graph:
    """The package's graph, with one node."""

    def __init__(self, release: Release, **_: object) -> None:
        self._release = release
        self._validate: Any = None

    def tensor(self, dim: list[int], stride: list[int], **_: object) -> GraphTensor:
        return GraphTensor(dim, stride)

    def sdpa(
        self, q: GraphTensor, k: GraphTensor, v: GraphTensor, **given: Any
    ) -> tuple[GraphTensor, GraphTensor]:
        out, stats = GraphTensor(), GraphTensor()
        inputs = Map(Q=q, K=k, V=v, **_lengths(given), SINK_TOKEN=given["sink_token"])
        outputs = Map(O=out, Stats=stats if given["generate_stats"] else None)
        self._validate = partial(self._release.forward, Attributes(inputs, outputs, given))
        return out, stats

    def sdpa_backward(self, **given: Any) -> tuple[GraphTensor, ...]:
        made = GraphTensor(), GraphTensor(), GraphTensor()
        names = {"q": "Q", "k": "K", "v": "V", "o": "O", "dO": "dO", "stats": "Stats"}
        inputs = Map(**{name: given[key] for key, name in names.items()}, **_lengths(given))
        outputs = Map(zip(("dQ", "dK", "dV"), made, strict=True))
        self._validate = partial(self._release.backward, Attributes(inputs, outputs, given))
        return made

    def validate(self) -> None:
        said = self._validate()
        if said:
            raise _InvalidGraphError(said)
        raise _ValidGraph


def _lengths(given: dict[str, Any]) -> dict[str, Any]:
    return {"SEQ_LEN_Q": given["seq_len_q"], "SEQ_LEN_KV": given["seq_len_kv"]}


class Release:
    """One release, whose operators run here."""

    def __init__(self, folder: Path) -> None:
        """Read its headers and run the file of the operators."""
        self._arch = 0
        self._cudnn = 0
        nodes, surface = ((folder / file).read_text(encoding="utf-8") for file in (NODES, SURFACE))
        self._surface = Function(surface, "SDPA_attributes::validate_sdpa_support_surface(")
        self._forward, self._backward = (
            Function(nodes[nodes.index(f"class {name}") :], "pre_validate_node()")
            for name in ("SDPANodeBase", "CompositeSDPABackwardNode")
        )
        context = SimpleNamespace(
            get_sm_version=lambda: self._arch,
            get_intermediate_data_type=lambda: "FLOAT",
            get_dynamic_shape_enabled=lambda: False,
        )
        versions = dict.fromkeys(("get_backend_version", "get_compiled_version"), lambda: self._cudnn)
        enumerations = ("input_names", "output_names", "DataType_t", "AttentionImplementation_t")
        self._names = {
            **{name: Names() for name in enumerations},
            "SDPA_attributes": SimpleNamespace(input_names=Names(), output_names=Names()),
            "detail": SimpleNamespace(**versions),
            "std": SimpleNamespace(to_string=str, string=str, min=min, max=max, make_shared=GraphTensor),
            "context": context,
            "this": SimpleNamespace(context=context),
        }
        install(folder, "", self._decided())
        spec = spec_from_file_location("operators", folder / OPERATORS)
        assert spec is not None
        assert spec.loader is not None
        self._operators: Any = module_from_spec(spec)
        spec.loader.exec_module(self._operators)

    def _decided(self) -> dict[str, object]:
        corners = {f"cudnn.diagonal_alignment.{name}": name for name in ("TOP_LEFT", "BOTTOM_RIGHT")}
        return {**torch_names(), **corners, "cudnn.pygraph": partial(_Graph, self)}

    def forward(self, attributes: Attributes) -> str:
        """Return why the headers refuse a forward."""
        attributes.surface = lambda names: self._surface({**self._names, **names})
        names = {"infer_s_kv": lambda: attributes.inputs["K"].get_dim()[2]}
        names |= dict.fromkeys(("is_paged_k", "is_paged_v", "is_mxfp8_scaling"), lambda: False)
        return self._forward({**self._names, **names, "attributes": attributes})

    def backward(self, attributes: Attributes) -> str:
        """Return why the headers refuse a backward."""
        return self._backward({**self._names, "attributes": attributes})

    def answer(self, call: dict[str, Any]) -> str:
        """Return why the release refuses a call, "" where it does not."""
        self._arch, self._cudnn = call["arch"], call["cudnn"]
        if call["softcap"]:
            return f"{Path(OPERATORS).name}: the operators have no softcap"
        query, key, value, more = _tensors(call)
        more |= _band(call)
        steps: list[Callable[[], Any]] = [
            lambda: self._operators._sdpa_fwd_impl(query, key, value, 1.0, **more, **_sink(call))
        ]
        if call["training"]:
            shape = (*query.shape[:-1], call["dv"])
            out = Tensor(shape, query.dtype)
            lse = empty(call["b"], call["hq"], call["sq"])
            deterministic = {"is_deterministic": call["deterministic"]}
            steps.append(
                lambda: self._operators._sdpa_bwd_impl(
                    out, query, key, value, out, lse, 1.0, **more, **deterministic
                )
            )
        for step in steps:
            try:
                step()
            except _ValidGraph:
                continue
            except _InvalidGraphError as error:
                return str(error)
            except Exception as error:  # noqa: BLE001 - code of the package
                return problem_of(error)
        return ""


def _sink(call: dict[str, Any]) -> dict[str, Any]:
    return {"sinks": empty(call["hq"])} if call["sink"] else {}


def _band(call: dict[str, Any]) -> dict[str, Any]:
    """Return the band as the executor gives it: from a corner without a negative side, a causal one first."""
    left, right = call["window_size_left"], 0 if call["causal"] else call["window_size_right"]
    if call["sq"] == 1:
        right = None
    if left is None and right is None:
        return {}
    shift = call["skv"] - call["sq"] if call["bottom_right"] else call["sq"] - call["skv"]
    corners = [(call["bottom_right"], left, right)]
    if call["ragged"]:
        corners = [(True, left, right)]
    else:
        corners.append((not call["bottom_right"], _moved(left, -shift), _moved(right, shift)))
    fitting = [corner for corner in corners if all(side is None or side >= 0 for side in corner[1:])]
    is_bottom_right, left, right = min(fitting or corners[:1], key=lambda corner: (corner[2] != 0, corner[0]))
    return {
        "is_causal": right == 0,
        "causal_bottom_right": is_bottom_right,
        "window_left": _OPEN if left is None else left + 1,
        "window_right": right or _OPEN,
    }


def _moved(side: int | None, by: int) -> int | None:
    return None if side is None else side + by


def _tensors(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    batch, dtype = call["b"], DTYPES[call["dtype"]]
    rows = (
        (call["hq"], call["sq"], call["d"]),
        (call["hkv"], call["skv"], call["d"]),
        (call["hkv"], call["skv"], call["dv"]),
    )
    if not call["ragged"]:
        query, key, value = (Tensor((batch, *row), dtype) for row in rows)
        return query, key, value, {}
    query, key, value = (Tensor((batch * length, heads, dim), dtype) for heads, length, dim in rows)
    sums = empty(batch + 1, dtype=DTYPES["int32"])
    lengths = {"max_seqlen_q": call["sq"], "max_seqlen_kv": call["skv"]}
    return query, key, value, {"cu_seqlens_q": sums, "cu_seqlens_kv": sums, **lengths}


if __name__ == "__main__":
    answer_all(Release(Path(sys.argv[1])).answer)
