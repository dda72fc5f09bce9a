"""`attnroute run script.py`: run a script or module with its scaled_dot_product_attention routed."""

from __future__ import annotations

from attnroute.cli._parser import Parser
from attnroute.cli._program import program


def run(words: list[str]) -> int:
    """Run the script in this process inside of `route_sdpa()`; the exit code is the script's."""
    if words[:1] in (["-h"], ["--help"]):
        _parser().parse_args(words[:1])
    words = words[1:] if words[:1] == ["--"] else words
    asked = program("run", words, "`script.py ...` or `-m module ...`", "write it behind run")
    from attnroute.api.sdpa_block import route_sdpa

    return asked.run(route_sdpa())


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Run a Python script or module; its calls of scaled_dot_product_attention run on attnroute.",
        "It runs in this process. Threads and processes that it starts are not routed.",
    )
    parser.usage = "attnroute run SCRIPT [ARGUMENTS]\n       attnroute run -m MODULE [ARGUMENTS]"
    return parser
