"""Predicts what TransformerEngine's own module would run, and which variables bring it to our choice."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict

from attnroute.engine import repairs
from attnroute.engine.evaluate import Evaluation, Form, prepared
from attnroute.question.call import Call, Context
from attnroute.question.facts import Facts
from attnroute.question.facts.masks import alignment
from attnroute.question.nodes import CausalNode, DocumentsNode, FunctionBias, KeyPaddingNode, WindowNode
from attnroute.question.normalize import normalize
from attnroute.tables.versions import contains, version_of

if TYPE_CHECKING:
    from attnroute.question.host import Host
    from attnroute.tables.folders import Tables
    from attnroute.tables.te_choice import Filter, Path, TeChoiceTable

NO_PATH: Final = "none"
"""The module has no arguments for the call, or no path of it runs here."""
_PACKAGES: Final = ("transformer-engine", "transformer-engine-torch")
_FUSED: Final = "te"
"""The backend whose rows say what cuDNN takes of TransformerEngine."""


class PathAnswer(BaseModel):
    """What keeps one path from a call.

    Attributes:
        path: Its name.
        title: The name that the module gives it.
        reasons: Why it does not run, none where it could.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    title: str
    reasons: tuple[str, ...] = ()


class TeChoice(BaseModel):
    """The prediction.

    Attributes:
        release: The release of TransformerEngine whose order and filters were asked.
        path: What runs, "none" where nothing does.
        answers: Every path, in the module's order.
        inexpressible: Parts of the call that the module has no argument for.
        ours: The backend that attnroute selects, "none" without one.
        same: Paths that run kernels of `ours`.
        environment: The fewest variables that, set to 0, bring the module to one of them; none where it is
            there already or where no variable does.
        brought: The path that it is brought to, "" where none is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: str
    path: str
    answers: tuple[PathAnswer, ...] = ()
    inexpressible: tuple[str, ...] = ()
    ours: str = NO_PATH
    same: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    brought: str = ""


def predict(call: Call, host: Host, tables: Tables, ours: str | None) -> TeChoice:
    """Predict what `DotProductAttention` runs for a call.

    Args:
        call: The call.
        host: The machine, with or without TransformerEngine; of other packages what it has.
        tables: The capability tables: `any/te_choice.toml`, and the rows of the backend te for cuDNN.
        ours: The backend that attnroute selects.

    Returns:
        The prediction, of the release that the tables name.
    """
    table, ours = tables.te_choice, ours or NO_PATH
    te_call, inexpressible = te_form(call)
    if inexpressible:
        return TeChoice(release=table.version, path=NO_PATH, inexpressible=inexpressible, ours=ours)
    refused = _cudnn_reasons(te_call, host, tables)
    answers = answer(te_call, host, table, refused)
    same = tuple(path.name for path in table.path if ours in path.runs)
    found = chosen(answers)
    environment = () if found in same else _environment(te_call, host, table, refused, same)
    brought = chosen(answer(te_call, host, table, refused, frozenset(environment))) if environment else ""
    return TeChoice(
        release=table.version,
        path=found,
        answers=answers,
        ours=ours,
        same=same,
        environment=environment,
        brought=brought,
    )


def te_form(call: Call) -> tuple[Call, tuple[str, ...]]:
    """Return a call as the module gets it, and the parts of it that it has no argument for.

    Documents become the sequences of a ragged batch, whose lengths count as the longest one's; a mask that is
    more than a band and padding at the right becomes one tensor.
    """
    parts = {
        "function_bias": isinstance(call.bias, FunctionBias),
        "fp8": call.dtype.startswith("float8"),
        "return_lse": call.return_lse,
        "transform": call.context.transform is not None,
        "distributed": call.context.distributed is not None,
    }
    bare = normalize(call).changed(context=Context())
    return _masked(bare), tuple(name for name, there in parts.items() if there)


def _masked(call: Call) -> Call:
    others = [node for node in call.mask if not isinstance(node, CausalNode | WindowNode)]
    if alignment(call) != "mixed":
        if not others:
            return call
        node = others[0]
        is_right = isinstance(node, KeyPaddingNode) and node.side == "right"
        if len(others) == 1 and is_right and call.layout != "thd":
            return call
        if len(others) == 1 and isinstance(node, DocumentsNode) and node.contiguous:
            return _ragged(call, node)
    padded = repairs.apply("from_varlen", call)
    tensor = repairs.apply("materialize_mask", call if padded is None else padded[0])
    return call if tensor is None else tensor[0]


def _ragged(call: Call, node: DocumentsNode) -> Call:
    mask = tuple(n for n in call.mask if n is not node)
    if node.lengths is None or node.cross:
        return call.changed(mask=mask, layout="thd")
    longest = max(node.lengths, default=0)
    sizes = {"batch": call.batch * len(node.lengths), "seqlen_q": longest, "seqlen_kv": longest}
    return call.changed(mask=mask, layout="thd", **sizes)


def answer(
    call: Call,
    host: Host,
    table: TeChoiceTable,
    refused: tuple[str, ...] = (),
    off: frozenset[str] = frozenset(),
) -> tuple[PathAnswer, ...]:
    """Ask every filter about a call.

    Args:
        call: The call, as `te_form` gives it.
        host: The machine.
        table: The filters.
        refused: Why cuDNN does not take the call, none where it does.
        off: Variables that are 0.

    Returns:
        Every path, in the module's order; the first one without a reason runs.
    """
    order = next(row for row in table.order if row.archs is None or host.arch in row.archs)
    by_name, facts = {path.name: path for path in table.path}, Facts(call)
    found = []
    for name in order.order:
        path = by_name[name]
        reasons = _absent(path, host, table, off)
        asked = [] if reasons else [row for row in table.filter if name in row.paths]
        reasons += [row.because for row in asked if _refuses(row, facts, host, table, off)]
        if name == table.path[0].name and not reasons:
            reasons += refused
        found.append(PathAnswer(path=name, title=path.title, reasons=tuple(reasons)))
    return tuple(found)


def chosen(answers: tuple[PathAnswer, ...]) -> str:
    """Return the path that runs, "none" where each has a reason."""
    return next((found.path for found in answers if not found.reasons), NO_PATH)


def _absent(path: Path, host: Host, table: TeChoiceTable, off: frozenset[str]) -> list[str]:
    """Why a path is not there, whatever the call is."""
    if host.arch == "cpu":
        return ["TransformerEngine runs on CUDA devices"]
    if path.archs is not None and host.arch not in path.archs:
        return [f"it does not run on {host.arch}"]
    switched = [row.name for row in table.switch if row.name in off and path.name in row.paths]
    missing = [name for name in path.needs if version_of(name, host.versions) is None]
    return [f"{name} is 0" for name in switched] + [f"{name} is not installed" for name in missing]


def _refuses(row: Filter, facts: Facts, host: Host, table: TeChoiceTable, off: frozenset[str]) -> bool:
    if row.archs is not None and host.arch not in row.archs:
        return False
    if row.phase not in (None, facts["phase"]):
        return False
    for name, ranges in row.versions.items():
        version = version_of(name, host.versions)
        if version is None or not contains(ranges, name, version):
            return False
    if row.beside is not None:
        other = next(path for path in table.path if path.name == row.beside)
        if _absent(other, host, table, off):
            return False
    return row.guard.answer(facts) == "true" and row.requirement.answer(facts) != "true"


def _cudnn_reasons(call: Call, host: Host, tables: Tables) -> tuple[str, ...]:
    """Why the compiled part gives cuDNN no such call: limits of the backend te, whose rows say it.

    They know sinks, biases, dropout and padding as the executor passes them on, which is otherwise than the
    module does: those are left out of the question. So are rows that refuse what is right there.
    """
    mask = tuple(node for node in call.mask if isinstance(node, CausalNode | WindowNode))
    bare = call.changed(mask=mask, sink=False, bias=None, dropout_p=0.0)
    release = tables.te_choice.version
    there = host.lasting.with_versions(dict.fromkeys(_PACKAGES, release))
    rows = prepared(tables, there)[_FUSED]
    if rows.rows is None:
        return (f"nobody looked at cuDNN's kernels on {host.arch}",)
    blocking = Evaluation(rows, Form(normalize(bare))).blocking
    failed = [name for name, kind, outcome, _ in blocking if kind == "limit" and outcome == "fail"]
    rules = {row.id: row.rule for row in rows.rows}
    counted = [name for name in failed if name not in rules or rules[name].argued is None]
    whys = [rules[name].because if name in rules else "cuDNN does not take it" for name in counted]
    return tuple(f"{why} [{name}]" for why, name in zip(whys, counted, strict=True))


def _environment(
    call: Call, host: Host, table: TeChoiceTable, refused: tuple[str, ...], targets: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the fewest variables that bring the module to one of some paths, none where no set does."""
    names = [row.name for row in table.switch]
    for count in range(1, len(names) + 1 if targets else 0):
        for off in combinations(names, count):
            if chosen(answer(call, host, table, refused, frozenset(off))) in targets:
                return off
    return ()
