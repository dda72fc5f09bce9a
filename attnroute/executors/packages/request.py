"""One call of a packaged kernel as a flat record, whose fields are arguments of a custom operator."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor  # noqa: TC002 - a NamedTuple's fields are read at run time

from attnroute.executors import ragged

if TYPE_CHECKING:
    from attnroute.executors.protocol import Inputs, Plan

TENSORS: Final = 8
"""The leading fields of `Request`, which are tensors."""


class Request(NamedTuple):
    """One call, batches padded or ragged.

    A ragged batch has `cu_seqlens_q`, and its tensors have no batch dimension: (total, num_heads, head_dim).

    Attributes:
        query: (batch, seqlen_q, num_heads_q, head_dim_qk) or (total_q, num_heads_q, head_dim_qk).
        key: (batch, seqlen_kv, num_heads_kv, head_dim_qk) or (total_kv, num_heads_kv, head_dim_qk).
        value: As key, with head_dim_v.
        cu_seqlens_q: (sequences + 1,) int32 prefix sums on the device, None for padded batches.
        cu_seqlens_kv: The same of the keys.
        used_kv: (sequences,) int32, how many keys of each sequence exist; None = all.
        sink: (num_heads_q,), float, or None.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q), float32, or None.
        max_seqlen_q: Upper bound of a sequence's queries; seqlen_q of padded batches.
        max_seqlen_kv: Upper bound of a sequence's keys.
        scale: Factor on QK^T.
        left: How many keys before the diagonal that ends with the last query and key; None = all.
        right: How many keys after it; None = all, 0 is causal. May be negative, as `left` may.
        softcap: 0.0 = off.
        dropout_p: Probability of dropping an attention weight.
        deterministic: Only deterministic algorithms.
        training: A backward will follow.
        fallback: Who may replace a kernel that refuses to start: "none", the "caller" (another backend, for
            the forward) or, in a compiled graph, the operator "inside" (chunked). Either lets chunked's
            backward go on with what the forward made.
        options: Options of the kernel from table rows, as ``name=value`` joined by commas.
        heads_first: The tensors of a padded batch are (batch, num_heads, seqlen, head_dim) instead.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    used_kv: Tensor | None
    sink: Tensor | None
    alibi_slopes: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    scale: float
    left: int | None
    right: int | None
    softcap: float
    dropout_p: float
    deterministic: bool
    training: bool
    fallback: str
    options: str
    heads_first: bool

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Everything but tensors, hashable: under it kernels keep what they make of it."""
        return self[TENSORS:]

    @property
    def is_ragged(self) -> bool:
        """Sequences lie one behind the other, without a batch dimension."""
        return self.cu_seqlens_q is not None

    @property
    def is_causal(self) -> bool:
        """The band is causal and nothing else."""
        return self.left is None and self.right == 0

    @property
    def is_banded(self) -> bool:
        """The band rules something out that causal alone does not."""
        return not self.is_causal and (self.left is not None or self.right is not None)

    @property
    def offset(self) -> int:
        """Keys beyond queries of a padded batch: counted from the top left a window has `right + offset`."""
        return 0 if self.is_ragged else self.max_seqlen_kv - self.max_seqlen_q

    @property
    def may_leave_rows_empty(self) -> bool:
        """Some query may attend no key: the first ones lie before all keys, or the last ones behind them.

        Sequences whose queries and keys are the same tokens are as square batches: each token attends itself
        where the band has the diagonal.
        """
        if self.is_ragged and not (self.cu_seqlens_q is self.cu_seqlens_kv and self.used_kv is None):
            return True
        before = self.right is not None and self.offset + self.right < 0
        behind = self.left is not None and self.left < 0
        return before or behind or self.max_seqlen_kv == 0

    def option(self, name: str) -> str | None:
        """Return one option's value as text."""
        pairs = (part.partition("=") for part in self.options.split(",") if part)
        return next((value for key, _, value in pairs if key == name), None)


SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? used_kv,"
    " Tensor? sink, Tensor? alibi_slopes, SymInt max_seqlen_q, SymInt max_seqlen_kv, float scale,"
    " SymInt? left, SymInt? right, float softcap, float dropout_p, bool deterministic, bool training,"
    " str fallback, str options, bool heads_first"
)
"""The fields of `Request` as an operator's arguments."""


class Launched(NamedTuple):
    """What a forward launch returns.

    Attributes:
        out: As the query, with head_dim_v.
        lse: (batch, num_heads_q, seqlen_q), ragged (num_heads_q, total_q); natural log, float32. A row with
            no key may have -inf or +inf.
        state: The state of dropout, int64 (2,), None without dropout.
    """

    out: Tensor
    lse: Tensor
    state: Tensor | None = None


class Gradients(NamedTuple):
    """What a backward launch returns, each in the shape of what it belongs to."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None = None


def request_of(
    inputs: Inputs, plan: Plan, *, heads_first: bool = False, in_graph: bool = False, in_place: bool = False
) -> Request:
    """Return the request of one call: padded rows, or sequences where the plan has the repair `to_varlen`.

    Args:
        inputs: The call.
        plan: How it runs.
        heads_first: The kernel takes padded batches in layout bhsd.
        in_graph: The request is that of an operator in a graph.
        in_place: As for `ragged.rows_of`.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    repairs, slopes, sink, scale = plan.repairs, inputs.alibi_slopes, inputs.sink, inputs.scale
    left, right = ragged.window_sizes(inputs)
    if scale is None:
        scale = query.shape[3] ** -0.5
    sums_q = sums_kv = used = None
    longest_q, longest_kv = query.shape[2], key.shape[2]
    if "to_varlen" in repairs:
        found = ragged.rows_of(inputs, training=plan.training, in_place=in_place)
        (sums_q, sums_kv, used), longest_q, longest_kv, step = found
        query, key, value = tokens_of(query, key, value, step)
    elif not heads_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return Request(
        query,
        key,
        value,
        sums_q,
        sums_kv,
        used,
        None if sink is None or "sink_from_lse" in repairs else sink,
        None if slopes is None else slopes.float(),
        longest_q,
        longest_kv,
        scale,
        left,
        right,
        inputs.softcap,
        inputs.dropout_p,
        plan.deterministic,
        plan.training,
        ("inside" if in_graph else "caller") if plan.may_reroute else "none",
        ",".join([f"{name}={value}" for name, value in plan.options]) if plan.options else "",
        heads_first,
    )


class Like:
    """Makes requests that differ from one in query, key, value and sink alone, and keeps no tensor alive.

    Prefix sums stay with the mask that they were made from.
    """

    __slots__ = ("_heads_first", "_is_ragged", "_numbers", "_strides", "_sums", "_tokens")

    def __init__(self, request: Request, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take one request.

        Args:
            request: It has no slopes.
            query: Query, key and value in layout bhsd, of which it was made.
            key: As query.
            value: As query.
        """
        self._sums = [None if t is None else weakref.ref(t) for t in request[3:6]]
        self._numbers = request.numbers
        self._is_ragged, self._heads_first = request.is_ragged, request.heads_first
        given = (query, key, value)
        self._strides = tuple(t.stride() for t in given)
        self._tokens = tuple(map(ragged.tokens_like, given, request[:3])) if request.is_ragged else ()

    def fits(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether the prefix sums are still there, and tensors lie as those of the request do."""
        if not self._is_ragged:
            return True
        if any(ref is not None and ref() is None for ref in self._sums):
            return False
        return self._strides == (query.stride(), key.stride(), value.stride())

    def request_of(self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Request:
        """Return the request of tensors in layout bhsd."""
        if self._is_ragged:
            sums_q, sums_kv, used = (None if ref is None else ref() for ref in self._sums)
            of_query, of_key, of_value = self._tokens
            query, key, value = of_query(query), of_key(key), of_value(value)
            return Request(query, key, value, sums_q, sums_kv, used, sink, None, *self._numbers)
        if not self._heads_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return Request(query, key, value, None, None, None, sink, None, *self._numbers)


def tokens_of(query: Tensor, key: Tensor, value: Tensor, step: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of a ragged batch; `step` is that of `ragged.Ragged`."""
    return ragged.tokens_of(query), ragged.tokens_of(key, step), ragged.tokens_of(value, step)


def to_bhsd(request: Request, tensor: Tensor) -> Tensor:
    """Return a tensor of a padded batch in layout bhsd; this is its own inverse."""
    return tensor if request.heads_first else tensor.transpose(1, 2)


def padded(request: Request, out: Tensor, batch: int) -> Tensor:
    """Return the output of a request of so many rows in layout bhsd."""
    return _in_rows(out, batch) if request.is_ragged else to_bhsd(request, out)


def padded_lse(request: Request, lse: Tensor, query: Tensor) -> Tensor:
    """Return the log-sum-exp of a request as (batch, num_heads_q, seqlen_q)."""
    if not request.is_ragged:
        return lse
    rows: Tensor = lse.unflatten(1, (query.shape[0], query.shape[2]))
    return rows.transpose(0, 1)


def lay_out(request: Request, out: Tensor, batch: int) -> Tensor:
    """Return `padded` of an output that nobody else has, as no view: autograd lets nobody write into one."""
    if out._is_view():
        out = out.clone()
    if request.cu_seqlens_q is None:
        return out if request.heads_first else out.transpose_(1, 2)
    (total, heads, head_dim), (token, head, last) = out.shape, out.stride()
    seqlen = total // batch
    return out.as_strided_((batch, heads, seqlen, head_dim), (seqlen * token, head, token, last))


def packed(request: Request, out: Tensor) -> Tensor:
    """Undo `padded`."""
    if request.cu_seqlens_q is not None:
        return out.transpose(1, 2).flatten(0, 1)
    return out if request.heads_first else out.transpose(1, 2)


def packed_lse(request: Request, lse: Tensor) -> Tensor:
    """Undo `padded_lse`."""
    return lse.transpose(0, 1).flatten(1) if request.is_ragged else lse


def in_batch(request: Request, grads: Gradients, batch: int) -> Gradients:
    """Return gradients in layout bhsd."""
    query, key, value, sink = grads
    if request.cu_seqlens_q is not None:
        return Gradients(_in_rows(query, batch), _in_rows(key, batch), _in_rows(value, batch), sink)
    if request.heads_first:
        return grads
    return Gradients(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), sink)


def _in_rows(tensor: Tensor, batch: int) -> Tensor:
    """Return the tokens of all rows (total, num_heads, head_dim) as (batch, num_heads, seqlen, head_dim)."""
    rows: Tensor = tensor.view(batch, -1, *tensor.shape[1:])
    return rows.transpose(1, 2)
