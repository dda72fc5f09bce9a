"""Predicts which kernel torch's own `scaled_dot_product_attention` runs, from the same rows in its order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, ConfigDict

from attnroute.engine import repairs
from attnroute.engine.evaluate import STOCK_SCOPES, Evaluation, Form, Prepared, prepared
from attnroute.engine.quadratic import score_bytes
from attnroute.question.call import Call, Context
from attnroute.question.host import Host
from attnroute.question.nodes import CausalNode, DenseBias, DenseNode, FunctionNode
from attnroute.question.normalize import normalize
from attnroute.tables.versions import contains, version_of

if TYPE_CHECKING:
    from attnroute.tables.archs import StockOrder
    from attnroute.tables.folders import Tables

MaskForm = Literal["none", "is_causal", "dense_mask", "dense_bias"]

NO_BACKEND: Final = "none"
"""Stock attention has no arguments for the call, or none of its backends takes it."""
UNKNOWN: Final = "unknown"
"""The host names no torch, or the tables do not cover a version that matters."""


class Stock(BaseModel):
    """The prediction.

    Attributes:
        backend: flash, cudnn, efficient or math; "none" where stock attention has no arguments for the
            call or nothing takes it, "unknown" for a version that is not given or not covered by the tables.
        score_bytes: What `backend` allocates for a score matrix, in bytes; 0 for the fused ones.
        mask_form: How the mask and the bias are passed to stock attention.
        inexpressible: Parts of the call that stock attention has no argument for.
        order: The name of the declared order that was used, empty when none was needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    score_bytes: int = 0
    mask_form: MaskForm = "none"
    inexpressible: tuple[str, ...] = ()
    order: str = ""


def predict(call: Call, host: Host, tables: Tables) -> Stock:
    """Predict what `scaled_dot_product_attention(..., enable_gqa=True where heads differ)` runs.

    Args:
        call: The call. A mask is passed as is_causal where it is no more than that, else as one tensor.
        host: The machine.
        tables: The capability tables: rows of scope "call" and "stock", feature answers and `any/stock.toml`.

    Returns:
        The prediction; faults are set aside, because stock attention does not check for them.
    """
    inexpressible = _inexpressible(call)
    if inexpressible:
        return Stock(backend=NO_BACKEND, inexpressible=inexpressible)
    stock_call = stock_form(normalize(call))
    row = _order(host, tables)
    if row is None:
        return Stock(backend=UNKNOWN, mask_form=mask_form(stock_call))
    form, rows = Form(stock_call), prepared(tables, host, STOCK_SCOPES)
    answers = ((b, _accepts(form, rows[b])) for b in row.order)
    backend, answer = next(((b, a) for b, a in answers if a != "no"), (NO_BACKEND, "no"))
    if answer == "unknown":
        return Stock(backend=UNKNOWN, mask_form=mask_form(stock_call), order=row.name)
    quadratic = backend in tables.backends and tables.backends[backend].memory == "quadratic"
    return Stock(
        backend=backend,
        score_bytes=score_bytes(call) if quadratic else 0,
        mask_form=mask_form(stock_call),
        order=row.name,
    )


def stock_form(call: Call) -> Call:
    """Return the call as stock attention gets it: is_causal alone, or one tensor of masks and bias."""
    plain = Context(dynamic=call.context.dynamic)
    bare = call.changed(context=plain, return_lse=False)
    if _is_causal_alone(bare) or (not bare.mask) or (bare.bias is None and _is_one_tensor(bare)):
        return bare
    masked = _materialized(bare)
    return masked if masked.bias is None else _merged(masked)


def mask_form(call: Call) -> MaskForm:
    """Return how a call in stock form passes its mask."""
    if call.bias is not None:
        return "dense_bias"
    if not call.mask:
        return "none"
    return "is_causal" if _is_causal_alone(call) else "dense_mask"


def _inexpressible(call: Call) -> tuple[str, ...]:
    parts = {
        "softcap": call.softcap > 0,
        "sink": call.sink,
        "alibi": call.bias is not None and call.bias.kind == "alibi",
        "function_bias": call.bias is not None and call.bias.kind == "function",
        "function_mask": any(isinstance(n, FunctionNode) for n in call.mask),
        "varlen": call.layout == "thd",
        "return_lse": call.return_lse,
    }
    return tuple(name for name, there in parts.items() if there)


def _is_causal_alone(call: Call) -> bool:
    return call.mask == (CausalNode(),) and call.bias is None


def _is_one_tensor(call: Call) -> bool:
    return len(call.mask) == 1 and isinstance(call.mask[0], DenseNode)


def _materialized(call: Call) -> Call:
    """Merge all mask nodes into one bool tensor; open lengths count as those of the call."""
    static = call.changed(context=Context())
    change = repairs.apply("materialize_mask", static)
    return call if change is None else change[0].changed(context=call.context)


def _merged(call: Call) -> Call:
    """Merge mask and bias into one bias of the query's dtype, as a caller of stock attention must."""
    change = repairs.apply("cast_mask", call)
    merged = call if change is None else change[0]
    bias = merged.bias
    if not isinstance(bias, DenseBias):
        return merged
    return merged.changed(bias=bias.changed(dtype=call.dtype))


def _order(host: Host, tables: Tables) -> StockOrder | None:
    torch = version_of("torch", host.versions)
    if torch is None:
        return None
    return next((row for row in tables.stock if _applies(row, host)), None)


def _applies(row: StockOrder, host: Host) -> bool:
    if row.archs is not None and host.arch not in row.archs:
        return False
    for name, ranges in row.versions.items():
        version = version_of(name, host.versions)
        if version is None or not contains(ranges, name, version):
            return False
    return True


def _accepts(form: Form, rows: Prepared) -> Literal["yes", "no", "unknown"]:
    """Return torch's own answer: limits count, faults do not, because its selector checks no faults."""
    if any(version_of(name, rows.host.versions) is None for name in rows.info.needs):
        return "no"
    outcomes = {outcome for _, kind, outcome, _ in Evaluation(rows, form).blocking if kind == "limit"}
    if "fail" in outcomes:
        return "no"
    return "unknown" if "unknown" in outcomes else "yes"
