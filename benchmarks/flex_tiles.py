"""Compile FlexAttention's kernels for any card, without a GPU: how much shared memory do their tiles take?

    pip install triton==3.6.0 torch==2.13.0
    python -m benchmarks.flex_tiles            # the tiles that rows of capability_tables name
    python -m benchmarks.flex_tiles sm_86 forward bf16 192/128 128,32,2,8 fp32

Templates are those of the installed torch, filled in as inductor fills them in: a bias is read by the score
function, and its gradient is added by atomics. The last numbers of tiles are stages and warps. On an H100
torch 2.11 asked for 245760 bytes (forward, head dim 64, float32 bias), 262144 (backward, 128, the same) and
262144 (forward, 512), which is what this prints for them.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

_LENGTH, _HEADS, _BATCH, _BLOCK = 4096, 8, 2, 128
_WIDTHS: Final = {"Q": "qk", "K": "qk", "DQ": "qk", "V": "v", "DO": "v", "DV": "v"}
_FORWARD: Final = (
    "Q K V LSE MAX KV_NUM_BLKS KV_IDX FULL_KV_NUM_BLKS FULL_KV_IDX",
    ("flex_attention", "utilities", "common"),
    ("BLOCK_M", "BLOCK_N"),
)
_BACKWARD: Final = (
    """Q K V LSE DELTA DO DQ DV KV_NUM_BLKS KV_IDX Q_NUM_BLKS Q_IDX FULL_KV_NUM_BLKS FULL_KV_IDX
    FULL_Q_NUM_BLKS FULL_Q_IDX""",
    ("flex_backwards", "utilities"),
    ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
)
_MORE: Final = ("BIAS", "DBIAS", "OUT")
_POINTERS: Final = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
_CASES: Final = """
sm_90 forward bf16 64/64 128,128,3,4 fp32
sm_90 backward bf16 128/128 64,128,128,64,3,8 fp32
sm_90 backward fp32 128/128 64,128,128,64,2,8 fp32
sm_90 backward fp32 128/128 16,16,16,16,1,4 fp32
sm_90 forward bf16 512/512 64,32,3,4
sm_100 forward bf16 64/64 128,128,3,4 fp32
sm_100 forward bf16 64/64 128,64,2,4 fp32
sm_100 forward bf16 64/64 128,64,3,4 fp32
sm_100 forward bf16 128/128 128,64,3,8 fp32
sm_100 forward bf16 128/128 128,128,2,8 fp32
sm_100 backward bf16 64/64 64,128,128,64,3,4 fp32
sm_100 backward bf16 128/128 64,128,128,64,3,4 fp32
sm_100 backward bf16 128/128 64,128,128,64,2,8 fp32
sm_80 forward fp32 128/128 128,32,3,4 fp32
sm_80 forward bf16 256/256 32,64,3,4 fp32
sm_86 forward bf16 64/64 128,64,3,4 bf16
sm_86 forward bf16 64/64 64,32,2,4 fp32
sm_86 forward bf16 128/128 64,32,2,4 fp32
sm_86 forward bf16 192/128 128,32,2,8 bf16
sm_86 forward bf16 192/128 128,32,2,8 fp32
sm_86 forward fp32 64/64 128,32,3,4 fp32
sm_86 backward bf16 128/128 64,64,64,64,3,4 bf16
"""


class Case(NamedTuple):
    """One kernel: a card, forward or backward, a dtype, head dims, tiles, a bias's dtype ("" for none)."""

    card: str
    way: str
    dtype: str
    dims: tuple[int, int]
    tiles: tuple[int, ...]
    bias: str

    @classmethod
    def of(cls, line: str) -> Case:
        """Read a line of words."""
        card, way, dtype, dims, tiles, *bias = line.split()
        qk, v = map(int, dims.split("/"))
        return cls(card, way, dtype, (qk, v), tuple(map(int, tiles.split(","))), "".join(bias))


def shared_memory(case: Case, folder: Path) -> int:
    """Compile a kernel, and return the bytes of shared memory that a block asks for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    parts = _FORWARD if case.way == "forward" else _BACKWARD
    names = [*parts[0].split(), *_MORE]
    path = folder / f"kernel_{abs(hash(case))}.py"
    path.write_text(_source(case, parts, names), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {f"arg_{name}": _pointer(name, case) for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(names))}
    target = GPUTarget("cuda", int(case.card.removeprefix("sm_")), 32)
    stages, warps = case.tiles[-2:]
    made = triton.compile(
        ASTSource(module.kernel, signature, {}, aligned),
        target=target,
        options={"num_stages": stages, "num_warps": warps},
    )
    return int(made.metadata.shared)


def _pointer(name: str, case: Case) -> str:
    if name in ("LSE", "MAX", "DELTA", "DBIAS"):
        return "*fp32"
    if "BLKS" in name or "IDX" in name:
        return "*i32"
    return _POINTERS[(case.bias or case.dtype) if name == "BIAS" else case.dtype]


def _source(case: Case, parts: tuple[str, tuple[str, ...], tuple[str, ...]], names: list[str]) -> str:
    """Return the module that a template becomes."""
    import jinja2

    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "_inductor/kernel/flex/templates"
    text = "\n".join((folder / f"{name}.py.jinja").read_text(encoding="utf-8") for name in parts[1])
    settings = _settings(case, dict(zip(parts[2], case.tiles, strict=False)))
    lines = [f"{name} : tl.constexpr = {value}" for name, value in settings.items()]
    arguments = ", ".join(f"arg_{name}" for name in names)
    body = [*lines, *(f"{name} = arg_{name}" for name in names if name not in _MORE)]
    head = ["import triton", "import triton.language as tl", "", "@triton.jit", f"def kernel({arguments}):"]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, by: text.replace("\n", "\n" + 4 * by * " ")
    return environment.from_string(text).render(
        **settings,
        def_kernel=lambda *_: "\n".join([*head, *(f"    {line}" for line in body)]),
        gen_argdefs=lambda: arguments,
        gen_defines=lambda: "\n".join(lines),
        stride=partial(_stride, case),
        size=partial(_size, case),
        modification=partial(_modification, case),
        store_output=partial(_store, case),
    )


def _settings(case: Case, tiles: dict[str, int]) -> dict[str, Any]:
    widths = [1 << (dim - 1).bit_length() for dim in case.dims]
    return {
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
        "IS_DIVISIBLE": True,
        "HAS_FULL_BLOCKS": True,
        "USE_TMA": False,
        "SM_SCALE": 0.125,
        "GQA_SHARED_HEADS": 1,
        "FLOAT32_PRECISION": "'ieee'",
        "INDEX_DTYPE": "tl.int32",
        "SAFE_HEAD_DIM": tuple(widths) == case.dims,
        "QK_HEAD_DIM": case.dims[0],
        "QK_HEAD_DIM_ROUNDED": widths[0],
        "V_HEAD_DIM": case.dims[1],
        "V_HEAD_DIM_ROUNDED": widths[1],
        "SPARSE_Q_BLOCK_SIZE": _BLOCK,
        "SPARSE_KV_BLOCK_SIZE": _BLOCK,
        **tiles,
    }


def _width(case: Case, name: str) -> int:
    return case.dims[0] if _WIDTHS[name] == "qk" else case.dims[1]


def _stride(case: Case, name: str, place: int | None = None) -> str:
    blocks = _LENGTH // _BLOCK
    if name in _WIDTHS:
        row = _width(case, name)
        strides = (_HEADS * _LENGTH * row, _LENGTH * row, row, 1)
    else:
        strides = (blocks, blocks, 1, 1) if name.endswith("BLKS") else (blocks**2, blocks**2, blocks, 1)
    return ", ".join(map(str, strides)) if place is None else str(strides[place])


def _size(case: Case, name: str, place: int) -> str:
    blocks = _LENGTH // _BLOCK
    if name in _WIDTHS:
        return str((_BATCH, _HEADS, _LENGTH, _width(case, name))[place])
    return str((1, 1, blocks, blocks)[place])


def _modification(case: Case, subgraph_number: int, output_name: str | None, **given: Any) -> str:
    """Return what inductor writes for the score function, its gradient, the mask, or the bias's gradient."""
    place = f"({given['h']}) * {_LENGTH**2} + ({given['m']}) * {_LENGTH} + ({given['n']})"
    if subgraph_number == 0:
        bias = f" + tl.load(arg_BIAS + {place}).to(tl.float32)" if case.bias else ""
        return f"{output_name} = {given['score']}{bias}"
    if subgraph_number == (1 if case.way == "forward" else 2):
        return f"{output_name} = ({given['m']}) >= ({given['n']})"
    if output_name is not None:
        return f"{output_name} = {given['grad_score_mod']}"
    if case.bias != "fp32":
        return "pass"
    return (
        f"tl.atomic_add(arg_DBIAS + {place}, {given['grad_score_mod']}, mask={given['mask']}, sem='relaxed')"
    )


def _store(
    case: Case, places: tuple[str, ...], value: str, mask: str, indent_width: int = 4, **_: object
) -> str:
    row = case.dims[1] if case.way == "forward" else case.dims[0]
    batch, head, query, element = places
    where = (
        f"({batch}) * {_HEADS * _LENGTH * row} + ({head}) * {_LENGTH * row} + ({query}) * {row} + ({element})"
    )
    return f"xindex = {where}\n{indent_width * ' '}tl.store(arg_OUT + xindex, {value}, {mask})"


def main() -> None:
    """Print one line for each case."""
    lines = [" ".join(sys.argv[1:])] if sys.argv[1:] else _CASES.strip().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        for line in lines:
            print(f"{line}: {shared_memory(Case.of(line), Path(folder))} bytes", flush=True)


if __name__ == "__main__":
    main()
