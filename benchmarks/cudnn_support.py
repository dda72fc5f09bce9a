"""Ask cuDNN without a GPU whether it has a kernel for calls, and hold the rows of cudnn_fe against it.

    pip install --no-deps --target site nvidia-cudnn-frontend==1.32.0 nvidia-cudnn-cu13==9.19.0.56
    mkdir cards && gcc -shared -fPIC -o cards/libcudart.so.13 benchmarks/made_up_cards.c
    LD_LIBRARY_PATH=cards:site/nvidia/cudnn/lib PYTHONPATH=site:. python -m benchmarks.cudnn_support sm_120

cuDNN plans for a card that is described to it in words, and its frontend asks the CUDA runtime for the rest,
which is made up here (`made_up_cards.py`). A plan that lacks nothing but the driver is one that would run: so
`check_support` says what no header does. Whether the numbers are right, it does not say.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections import Counter
from itertools import product
from typing import Any, Final, NamedTuple

from attnroute.audit.grid import cards
from attnroute.engine.evaluate import Evaluation, Form, prepared
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.normalize import normalize
from attnroute.tables.load import load

_ORDER: Final = (75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)
"""The cards of made_up_cards.c."""
_MULTIPROCESSORS: Final = 132
_LACKS_A_DRIVER: Final = {
    "CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING",
    "CUDNN_STATUS_NOT_SUPPORTED",
}
_STATUS: Final = re.compile(r"CUDNN_STATUS_\w+")
_DIMS: Final = (
    (64, 64), (128, 128), (72, 72), (8, 8), (136, 136), (192, 128), (192, 192), (256, 256), (64, 128),
    (128, 64), (264, 264), (512, 512), (64, 256),
)  # fmt: skip
_LENGTHS: Final = ((512, 512), (1, 512), (300, 700), (700, 300), (128, 1024))
_BANDS: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "causal": {"use_causal_mask": True},
    "causal=bottom_right": {"use_causal_mask_bottom_right": True},
    "window=64,0": {"use_causal_mask": True, "sliding_window_length": 65},
}
_KV_HEADS: Final = (8, 2)


class Asked(NamedTuple):
    """One call: its line, and what the frontend needs to build its graph."""

    line: str
    heads_kv: int
    lengths: tuple[int, int]
    dims: tuple[int, int]
    band: dict[str, Any]
    training: bool


def calls() -> list[Asked]:
    """Return every call that is asked about; where lengths differ a band says where its diagonal starts."""
    found = []
    for dims, lengths, words, heads, training in product(_DIMS, _LENGTHS, _BANDS, _KV_HEADS, (False, True)):
        square = lengths[0] == lengths[1]
        if words.endswith("bottom_right") and (square or lengths[0] == 1):
            continue  # No mask of its own.
        corner = {"causal": "causal=top_left", "window=64,0": "window=64,0,top_left"}
        said = words if square else corner.get(words, words)
        sizes = f"hkv{heads} sq{lengths[0]} skv{lengths[1]} d{dims[0]}/{dims[1]}"
        line = f"bf16 b2 hq8 {sizes} {said}{' train' if training else ''}"
        found.append(Asked(line, heads, lengths, dims, _BANDS[words], training))
    return found


class Card:
    """A card that cuDNN is told about."""

    def __init__(self, cudnn: Any, number: int, shared_memory: int) -> None:
        """Describe it."""
        self._cudnn = cudnn
        self._place = _ORDER.index(number)
        words = {
            "deviceName": f"made-up sm_{number}",
            "deviceVer": 10 * number,
            "driverVer": 13000,
            "runtimeVer": 13000,
            "cudaDeviceId": 0,
            "totalGlobalMem": 80 << 30,
            "maxGridSize": [2147483647, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "regsPerBlock": 65536,
            "multiProcessorCount": _MULTIPROCESSORS,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 48 << 10,
            "maxSharedMemoryPerBlockOptin": shared_memory,
            "reservedSharedMemoryPerBlock": 1024,
            "maxSharedMemoryPerSM": shared_memory + 1024,
            "sharedMemPerSM": shared_memory + 1024,
            "maxRegistersPerSM": 65536,
            "maxCtasPerSM": 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": 2048 if shared_memory > 128 << 10 else 1536,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "smClockRateKHz": 1980000,
            "memClockRateKHz": 2600000,
            "memBusWidth": 5120,
            "l2CacheSize": 50 << 20,
            "deviceId": 0,
            "computeMode": 0,
            "integrated": 0,
        }
        self._properties = cudnn.create_device_properties(json.dumps(words))
        self._runtime = ctypes.CDLL("libcudart.so.13")

    def answer(self, call: Asked) -> str:
        """Return why cuDNN has no kernel for a call, forward or backward, "" where it has."""
        self._runtime.cudaSetDevice(self._place)
        return self._ways(call, backward=False) or (self._ways(call, backward=True) if call.training else "")

    def _ways(self, call: Asked, *, backward: bool) -> str:
        cudnn = self._cudnn
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            device_property=self._properties,
        )
        try:
            (_backward if backward else _forward)(cudnn, graph, call)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A])
            graph.check_support()
        except Exception as error:  # noqa: BLE001 - the package's own
            said = str(error)
            lacks = set(_STATUS.findall(said))
            return "" if "libcuda" in said and lacks <= _LACKS_A_DRIVER else " ".join(said.split())
        return ""


def _shapes(call: Asked) -> dict[str, tuple[int, int, int]]:
    (queries, keys), (qk, v) = call.lengths, call.dims
    query, key = (8, queries), (call.heads_kv, keys)
    return {"q": (*query, qk), "k": (*key, qk), "v": (*key, v), "o": (*query, v)}


def _laid(tensor: Any, shape: tuple[int, int, int]) -> Any:
    heads, length, width = shape
    strides = [heads * length * width, width, heads * width, 1]
    return tensor.set_output(True).set_dim([2, heads, length, width]).set_stride(strides)


def _tensor(cudnn: Any, graph: Any, name: str, shape: tuple[int, int, int]) -> Any:
    heads, length, width = shape
    return graph.tensor(
        name=name,
        dim=[2, heads, length, width],
        stride=[heads * length * width, width, heads * width, 1],
        data_type=cudnn.data_type.BFLOAT16,
    )


def _forward(cudnn: Any, graph: Any, call: Asked) -> None:
    shapes = _shapes(call)
    given = {name: _tensor(cudnn, graph, name, shapes[name]) for name in "qkv"}
    output, stats = graph.sdpa(**given, generate_stats=True, attn_scale=0.125, **call.band)
    _laid(output, shapes["o"])
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)


def _backward(cudnn: Any, graph: Any, call: Asked) -> None:
    shapes = _shapes(call)
    given = {name: _tensor(cudnn, graph, name, shapes[name]) for name in "qkvo"}
    queries = call.lengths[0]
    stats = graph.tensor(
        name="stats",
        dim=[2, 8, queries, 1],
        stride=[8 * queries, queries, 1, 1],
        data_type=cudnn.data_type.FLOAT,
    )
    rest = {"dO": _tensor(cudnn, graph, "dO", shapes["o"]), "stats": stats, "attn_scale": 0.125, **call.band}
    for name, gradient in zip("qkv", graph.sdpa_backward(**given, **rest), strict=True):
        _laid(gradient, shapes[name])


def main() -> None:
    """Print what the rows accept and cuDNN refuses, and rows that refuse what it takes."""
    import cudnn

    tables, number = load(), cudnn.backend_version()
    release = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    versions = {"torch": "2.11.0+cu130", "nvidia-cudnn-frontend": cudnn.__version__, "cudnn": release}
    asked = calls()
    forms = [Form(normalize(parse(call.line))) for call in asked]
    for arch, card in cards(tables).items():
        if arch not in (sys.argv[1:] or [arch]) or tables.rules(arch, "cudnn_fe") is None:
            continue
        rows = prepared(tables, Host(arch=arch, versions=versions))["cudnn_fe"]
        made, alike, strict = Card(cudnn, *card), 0, Counter[str]()
        for call, form in zip(asked, forms, strict=True):
            refusing = [name for name, _, outcome, _ in Evaluation(rows, form).blocking if outcome == "fail"]
            said = made.answer(call)
            alike += bool(said) == bool(refusing)
            strict.update(refusing if not said else [])
            if said and not refusing:
                print(f"  too loose  {arch}: {call.line}: {said[:200]}")
        print(f"{arch}, cuDNN {release}: {alike} of {len(asked)} judged alike")
        for name, count in strict.most_common():
            print(f"  stricter  {name}: {count} calls")


if __name__ == "__main__":
    main()
