"""Examples of each command, as its `--help` shows them; tests run them."""

from __future__ import annotations

from typing import Final

_LLAMA: Final = '"bf16 b1 hq32 hkv8 sq4096 d128 causal"'

EXAMPLES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "explain": (
        (f"explain {_LLAMA} --arch h100", "what an H100 runs, with the newest torch; no GPU is needed"),
        (f"explain {_LLAMA} --arch rtx5090 --with torch=2.11 -v", "with every reason of each backend"),
        (f"explain {_LLAMA} --with flash-attn-3=3.0.0 --arch h200", "were FlashAttention-3 installed"),
        (
            "explain --q 2,32,4096,128 --kv 8,4096 --mask causal,window=4095,0 --dtype bf16 --arch b200",
            "flags",
        ),
        (
            'explain "bf16 b4 hq32 hkv8 sq32768 d128 causal train" --mesh tp=2,cp=4 --arch h200',
            "on eight ranks: local calls, bytes moved, times",
        ),
        (f"explain {_LLAMA} --arch h100 --json", "for programs"),
    ),
    "why-not": (
        (f"why-not fa4 {_LLAMA} --arch h100", "what would make FlashAttention-4 run it"),
        (f"why-not flash {_LLAMA} --arch a100 --json", "for programs"),
    ),
    "rule": (
        ("rule any/flash/head-dims-equal", "a row by the id that `explain -v` prints in brackets"),
        ("rule any/flash/head-dims-equal --json", "for programs"),
    ),
    "matrix": (
        ("matrix --arch h100", "one card: what each backend makes of each call"),
        ("matrix", "every architecture: what each call gets"),
        ("matrix --arch l4 --with flash-attn=2.8.3 --format markdown", "a table for a page"),
    ),
    "tables": (
        ("tables lint", "check the tables in use"),
        ("tables schema", "the JSON schema of their files"),
    ),
    "probe": (("probe", "this machine, for --host and for bug reports"),),
    "demo": (("demo --device cpu", "without a GPU"),),
    "run": (
        ("run train.py", "route scaled_dot_product_attention in a script"),
        ("run --trace --no-route train.py", "which attention a script uses as it is"),
        ("run --out attnroute-calls.json -m train", "a module; write its calls for attnroute tune"),
    ),
    "tune": (
        ("tune --dry-run", "what would be measured of the calls that a run recorded"),
        ("tune --seconds 60", "begin no measurement after a minute"),
    ),
    "conformance": (
        ("conformance --rule any/flash/head-dims-equal --arch h100 --dry-run", "list the calls of one row"),
    ),
    "completion": (
        ("completion bash > ~/.local/share/bash-completion/completions/attnroute", "for bash"),
        ("completion fish > ~/.config/fish/completions/attnroute.fish", "for fish"),
    ),
}
"""Command to what is written behind `attnroute`, and what it is for."""


def examples(command: str) -> str:
    """Return the examples of a command as a part of its help; "" where it has none."""
    lines = [f"  attnroute {words}\n      {does}" for words, does in EXAMPLES.get(command, ())]
    return "\n".join(["examples:", *lines]) if lines else ""
