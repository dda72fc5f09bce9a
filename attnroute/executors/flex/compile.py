"""One compiled `flex_attention` per structure of mask and scores, that can never run uncompiled.

Uncompiled, FlexAttention computes all scores at once. Two guards keep that from happening: each structure has
a code object of its own, so that none of them reaches dynamo's recompile limit because of the others, and the
function refuses to run as plain Python.
"""

from __future__ import annotations

import inspect
import linecache
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from attnroute.errors import NotCompiledError
from attnroute.executors import first_call
from attnroute.executors.launch import before_launch
from attnroute.memory import Memory

if TYPE_CHECKING:
    from attnroute.executors.flex.program import Blocked, Part, Settings

Result = tuple[Tensor, Tensor | None]
_COMPILER_ERRORS: Final = ("BackendCompilerFailed", "InductorError")
_DONATED: Final = "bw_donated_idxs"
"""Where torch lists the tensors of a forward that its backward may write over."""
_NO_RECOMPILE: Final = "fail_on_recompile"
"""The stance under which torch raises where it would compile; its error has no class of its own."""
_LIMIT_ERRORS: Final = ("FailOnRecompileLimitHit", "RecompileLimitExceeded", "CacheLimitExceeded")


@dataclass(slots=True)
class Compiled:
    """One structure.

    Attributes:
        name: What it is, for people.
        backend: Whose structure it is.
        call: The compiled function.
        seconds: How long each compilation took, in seconds; lengths that change cost a second one.
    """

    name: str
    backend: str = "flex"
    call: Callable[..., Result] = field(init=False)
    seconds: list[float] = field(default_factory=list)


STRUCTURES_KEPT: Final = 512
"""Structures whose code is kept; each took seconds to compile, and a model has a handful."""

_COMPILED: Memory[Hashable, Compiled] = Memory(
    STRUCTURES_KEPT, f"{__name__}._COMPILED", "with torch.compiler.reset()"
)
# dynamo remembers which lengths varied under the name of a function, so no name comes twice.
_NUMBERS: Final = count(1)


def compiled(structure: Hashable) -> Compiled | None:
    """Return what was compiled for a structure, if anything was."""
    return _COMPILED.get(structure)


def entries() -> tuple[Compiled, ...]:
    """Return everything that was compiled."""
    return tuple(_COMPILED.values())


def need_compiler(backend: str) -> None:
    """Import dynamo, which fails where it cannot make folders for its caches, and then for good.

    Raises:
        KernelRefusedError: It cannot be imported; the text is that of the first attempt.
    """
    with before_launch(backend, key=lambda: "torch.compile"):
        import_module("torch._dynamo")


def entry(key: Hashable, mask: Part, score: Part, settings: Settings) -> Compiled:
    """Return the entry of a structure; its function is compiled at its first call."""
    found = _COMPILED.get(key)
    return _COMPILED.keep(key, lambda: _made(mask, score, settings)) if found is None else found


def _made(mask: Part, score: Part, settings: Settings) -> Compiled:
    name = ", ".join(t for t in (mask.text, score.text) if t) or "no mask"
    found = Compiled(name, settings.backend)
    function = _function(f"flex_{next(_NUMBERS)}", mask, score, settings)
    with before_launch(settings.backend):
        found.call = torch.compile(function, backend=_measured(found), fullgraph=True)
    return found


def run(found: Compiled, qkv: tuple[Tensor, Tensor, Tensor], mask: Blocked, score: Part) -> Result:
    """Call the compiled function.

    Raises:
        NotCompiledError: It would run uncompiled, or cannot be compiled.
        KernelRefusedError: FlashAttention-4, which compiles when it is first launched, refused the call.
    """
    try:
        out, lse = found.call(
            *qkv, mask.blocks, mask.part.tensors, mask.part.functions, score.tensors, score.functions
        )
    except NotCompiledError:
        _drop(found)
        raise
    except Exception as error:
        names = {cls.__name__ for cls in type(error).__mro__}
        if names.intersection(_LIMIT_ERRORS):
            raise NotCompiledError(_limit_message(found)) from error
        if names.intersection(_COMPILER_ERRORS):
            raise NotCompiledError(_failure_message(found, error)) from error
        if _NO_RECOMPILE in str(error):
            raise _not_here(found.backend, f'torch.compiler.set_stance("{_NO_RECOMPILE}")') from error
        # Where an interrupt met the import of dynamo, that has gaps for the rest of the process.
        has_gaps = isinstance(error, AttributeError | ImportError) and not found.seconds
        if found.backend == "flex" and not has_gaps:
            raise
        with before_launch(found.backend):
            raise
    _allow_second_backward(out)
    return out, lse


def _allow_second_backward(out: Tensor) -> None:
    """Let a backward run again, as every kernel of torch lets it.

    The compiled backward refuses that where it was given buffers to write over, and takes the absence of a
    list for such buffers too (torch 2.6 to 2.13, _aot_autograd/runtime_wrappers.py). Ours is given none.
    """
    metadata = getattr(getattr(out.grad_fn, "_forward_cls", None), "metadata", None)
    if metadata is not None and getattr(metadata, _DONATED, []) is None:
        setattr(metadata, _DONATED, [])


def _drop(found: Compiled) -> None:
    """Forget a structure that may refuse for ever: never compiled, or met while dynamo is switched off.

    dynamo skips the code of what it met then, also where it compiled that before.
    """
    _COMPILED.drop(lambda known: known is found and (not found.seconds or torch._dynamo.config.disable))


_TEMPLATE: Final = """
def {name}(query, key, value, blocks, mask_tensors, mask_functions, score_tensors, score_functions):
    if not is_compiling():
        refuse()
    {mask_names} = (*mask_tensors, *mask_functions)
    {score_names} = (*score_tensors, *score_functions)

    def mask_mod(b, h, i, j):
        return {mask}

    def score_mod(s, b, h, i, j):
        return {score}

    return attend(query, key, value, {score_mod}, {block_mask})
"""


def _function(name: str, mask: Part, score: Part, settings: Settings) -> Callable[..., Result]:
    """Write the function of a structure; it has a code object of its own, for which dynamo counts alone."""
    source = _TEMPLATE.format(
        name=name,
        mask_names=_names("m", mask),
        score_names=_names("s", score),
        mask=mask.text or "True",
        score=score.text or "s",
        score_mod="score_mod" if score.text else "None",
        block_mask="block_mask(query, key, blocks, mask_mod)" if mask.text else "None",
    )
    space: dict[str, Any] = {
        "torch": torch,
        "is_compiling": torch.compiler.is_compiling,
        "refuse": partial(_refuse, settings.backend),
        "attend": _attending(settings),
        "block_mask": _block_mask_maker(settings.size),
    }
    # dynamo wraps a function without a source file into one that all of them would share.
    file = f"{__file__.removesuffix('.py')}_{name}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    # The text is made of index names and numbers only; what the user gave is called, never pasted.
    exec(compile(source, file, "exec"), space)  # noqa: S102
    function: Callable[..., Result] = space[name]
    return function


def _names(prefix: str, part: Part) -> str:
    names = [f"{prefix}{n}" for n in range(len(part.tensors))]
    names += [f"{prefix}f{n}" for n in range(len(part.functions))]
    return f"({''.join(f'{name}, ' for name in names)})"


def _attending(settings: Settings) -> Callable[..., Result]:
    arguments: dict[str, Any] = {"scale": settings.scale, "enable_gqa": settings.enable_gqa}
    if settings.options:
        arguments["kernel_options"] = dict(settings.options)
    aux = {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}

    def attend(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any) -> Result:
        if not settings.return_lse:
            return flex.flex_attention(query, key, value, score_mod, block_mask, **arguments), None  # type: ignore[return-value]
        out, second = flex.flex_attention(query, key, value, score_mod, block_mask, **arguments, **aux)
        return out, second if isinstance(second, Tensor) else second.lse

    return attend


def _block_mask_maker(size: tuple[int, int]) -> Callable[..., flex.BlockMask]:
    has_lengths = "seq_lengths" in inspect.signature(flex.BlockMask.__init__).parameters

    def make(query: Tensor, key: Tensor, blocks: tuple[Any, ...], mask_mod: Any) -> flex.BlockMask:
        lengths: dict[str, Any] = {"seq_lengths": (query.shape[2], key.shape[2])} if has_lengths else {}
        return flex.BlockMask(
            kv_num_blocks=blocks[0],
            kv_indices=blocks[1],
            full_kv_num_blocks=blocks[2],
            full_kv_indices=blocks[3],
            q_num_blocks=blocks[4],
            q_indices=blocks[5],
            full_q_num_blocks=blocks[6],
            full_q_indices=blocks[7],
            BLOCK_SIZE=size,
            mask_mod=mask_mod,
            **lengths,
        )

    return make


def _refuse(backend: str) -> None:
    raise _not_here(backend, f"a plain call ({_why_plain()})")


def _not_here(backend: str, got: str) -> NotCompiledError:
    """Return the error of a call that is compiled as soon as what surrounds it is another."""
    error = NotCompiledError(
        f"backend {backend} requires torch.compile to compile its call, because uncompiled it computes all"
        f" scores at once; got {got}; remove that, or pass another backend."
    )
    error.lasts = False
    return error


def _why_plain() -> str:
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode is active"
    if torch._dynamo.config.disable:
        return "torch.compile is switched off, e.g. by TORCH_COMPILE_DISABLE"
    return "dynamo skipped it, e.g. because of torch.compiler.set_stance"


def _limit_message(found: Compiled) -> str:
    limit = torch._dynamo.config.recompile_limit
    return (
        f"backend {found.backend} requires at most {limit} compilations of one structure of mask and scores"
        f" ({found.name}); got one more; raise torch._dynamo.config.recompile_limit, or keep numbers that"
        " change in tensors."
    )


def _failure_message(found: Compiled, error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)
    text = str(inner).strip().partition("\n")[0]
    return (
        f"backend {found.backend} requires code that torch.compile can compile for a mask and its scores"
        f" ({found.name}); got {type(inner).__name__}: {text}; pass another backend, or keep this one away"
        f' with override(ban="{found.backend}").'
    )


def _buffers_of_its_own() -> AbstractContextManager[Any]:
    """Keep a compiled backward from writing over what its forward left; see `_allow_second_backward`."""
    # The option came with torch 2.6, and its module is loaded by torch.compile alone.
    from torch._functorch import config

    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else nullcontext()


def _measured(found: Compiled) -> Callable[..., Any]:
    """Return inductor as a backend of dynamo that reports to the listeners how long it took."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        first_call.tell(found.backend, found.name, None)
        start = time.perf_counter()
        with _buffers_of_its_own():
            result = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        found.seconds.append(time.perf_counter() - start)
        first_call.tell(found.backend, found.name, found.seconds[-1])
        return result

    return backend
