"""Make up the CUDA libraries of a torch wheel: its checks can then be asked about every card, without a GPU.

    pip download --no-deps torch==2.11.0 && unzip -q torch-2.11.0-*.whl -d wheel
    python benchmarks/made_up_cards.py --wheel wheel --out cards
    LD_LIBRARY_PATH=cards PYTHONPATH=wheel:. MADE_UP_CUDNN=91900 python -m attnroute tables record acceptance

No kernel runs there: what torch's selector accepts can be asked, never a number. It takes Linux, gcc, nm and
readelf.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

_CUDA = re.compile(r"cu|nccl|nvrtc|nvtx|nvshmem|__cuda|nvJit|nvml|CUPTI|_ZN?\d*nvshmem|nvl|gdr")
_OF_THE_SYSTEM = re.compile(
    r"lib(c|m)\.so|lib(dl|rt|pthread|stdc|gcc_s|gomp|gfortran|quadmath|arm|torch|c10|shm|caffe2)|ld-linux"
)
_NEEDED = re.compile(r"NEEDED\).*\[(.*)\]")
_DEFINES = re.compile(r"^(?:static )?(?:int|size_t|const char \*)\s*(\w+)\(", re.MULTILINE)


def main() -> None:
    """Read the wheel, and write a library for each one that it needs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True, help="the folder of an unpacked wheel")
    parser.add_argument("--out", type=Path, required=True, help="where the libraries go")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    libraries = [*args.wheel.glob("torch/lib/lib*.so"), *args.wheel.glob("torch/_C*.so")]
    written = Path(__file__).with_suffix(".c").read_text(encoding="utf-8")
    others = sorted(name for name in _wanted(libraries) if _CUDA.match(name))
    others = [name for name in others if name not in _DEFINES.findall(written)]
    everything = written + "".join(f"long {name}(void) {{ return 0; }}\n" for name in others)
    _compile(everything, args.out / "libmadeup.so")
    for name in _needed(libraries):
        links = (
            f"-Wl,-soname,{name}",
            "-Wl,--no-as-needed",
            f"-L{args.out}",
            "-lmadeup",
            "-Wl,-rpath,$ORIGIN",
        )
        _compile("", args.out / name, *links)
    print(f"{len(others)} functions that do nothing, for {len(libraries)} libraries of torch, in {args.out}")


def _wanted(libraries: list[Path]) -> set[str]:
    """Return the symbols that no library of torch has."""
    lines = [line.split() for one in libraries for line in _said("nm", "-D", one).splitlines()]
    wanted = {words[1].partition("@")[0] for words in lines if len(words) == 2 and words[0] in "Uw"}
    return wanted - {words[2] for words in lines if len(words) == 3}


def _needed(libraries: list[Path]) -> set[str]:
    """Return the libraries that torch's are linked with and neither torch nor the system has."""
    found = {name for one in libraries for name in _NEEDED.findall(_said("readelf", "-d", one))}
    return {name for name in found if not _OF_THE_SYSTEM.match(name)}


def _said(program: str, option: str, file: Path) -> str:
    return subprocess.run([program, option, file], capture_output=True, text=True, check=True).stdout


def _compile(text: str, to: Path, *links: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write(text)
        source.flush()
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", to, source.name, *links], check=True)


if __name__ == "__main__":
    main()
