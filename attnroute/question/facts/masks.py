"""Facts about mask and bias: which nodes they have, where diagonals lie, what their tensors look like."""

from __future__ import annotations

from typing import Final, get_args

from attnroute.question.call import Call
from attnroute.question.facts.empty import empty_rows_of
from attnroute.question.facts.registry import UNKNOWN, Unknown, fact
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionBias,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    PrefixNode,
    WindowNode,
    nested,
)
from attnroute.question.normalize import is_cross, lengths_vary
from attnroute.vocabulary import EmptyRows

_ALIGNED: Final = (CausalNode, WindowNode, PrefixNode)


@fact()
def masked(call: Call) -> bool:
    """The mask has a node of any kind."""
    return bool(call.mask)


@fact(feature="causal")
def causal(call: Call) -> bool:
    """The mask has a causal node; those inside a disjunction or a negation do not count."""
    return _has(call, CausalNode)


@fact(feature="window")
def window(call: Call) -> bool:
    """The mask has a window node; those inside a disjunction or a negation do not count."""
    return _has(call, WindowNode)


@fact()
def window_right_open(call: Call) -> bool:
    """The mask has a window node whose right side is open and no causal node."""
    return not causal(call) and None in [n.right for n in call.mask if isinstance(n, WindowNode)]


@fact()
def window_looks_ahead(call: Call) -> bool:
    """Queries attend keys behind the diagonal.

    The mask has a window node, no causal node, and the window's right side is open or above 0.
    """
    sides = [n.right for n in call.mask if isinstance(n, WindowNode)]
    return bool(sides) and 0 not in sides and not causal(call)


@fact(feature="documents")
def documents(call: Call) -> bool:
    """The mask has a documents node; those inside a disjunction or a negation do not count."""
    return _has(call, DocumentsNode)


@fact(feature="key_padding")
def key_padding(call: Call) -> bool:
    """The mask has a key padding node; those inside a disjunction or a negation do not count."""
    return _has(call, KeyPaddingNode)


@fact()
def left_out_finite(call: Call) -> bool:
    """What key padding nodes leave out holds no NaN and no infinity; true without one."""
    return False not in [n.finite for n in call.mask if isinstance(n, KeyPaddingNode)]


@fact(feature="prefix")
def prefix(call: Call) -> bool:
    """The mask has a prefix node; those inside a disjunction or a negation do not count."""
    return _has(call, PrefixNode)


@fact(feature="combined_mask")
def combined_mask(call: Call) -> bool:
    """The mask has a disjunction or a negation.

    A kernel that takes one evaluates the causal, window, documents, key padding and prefix nodes inside it.
    """
    return _has(call, (AnyNode, NotNode))


@fact(feature="dense_mask")
def dense_mask(call: Call) -> bool:
    """The mask has a bool tensor, or one inside a disjunction or a negation, which reads it."""
    return _has_inside(call, DenseNode)


@fact(feature="function_mask")
def function_mask(call: Call) -> bool:
    """The mask has a predicate, or one inside a disjunction or a negation, which calls it."""
    return _has_inside(call, FunctionNode)


@fact()
def documents_cross(call: Call) -> bool:
    """A ragged batch whose queries and keys have lengths of their own.

    Causal and window nodes have a diagonal in each document then.
    """
    return is_cross(call)


@fact()
def band_only(call: Call) -> bool:
    """The mask says no more than causal and window do."""
    return not [n for n in call.mask if not isinstance(n, CausalNode | WindowNode)]


@fact()
def only_causal(call: Call) -> bool:
    """The mask is causal and nothing else, and there is no bias."""
    return len(call.mask) == 1 and causal(call) and call.bias is None


@fact(words=("none", "square", "top_left", "bottom_right", "mixed"))
def alignment(call: Call) -> str:
    """Where the diagonal of causal, window and prefix nodes starts; "square" if both corners agree."""
    found = {n.alignment for n in call.mask if isinstance(n, _ALIGNED)} if call.mask else set()
    if not found:
        return "none"
    if call.seqlen_q == call.seqlen_kv and not lengths_vary(call) and not is_cross(call):
        return "square"
    return found.pop() if len(found) == 1 else "mixed"


@fact(words=get_args(EmptyRows))
def empty_rows(call: Call) -> EmptyRows:
    """Whether some query may attend no key: none, some or unknown."""
    return empty_rows_of(call)


@fact()
def mask_last_dim_contiguous(call: Call) -> bool:
    """The last stride of mask and bias tensors that a kernel is handed is 1."""
    return False not in [t.last_dim_contiguous for t in _tensors(call)]


@fact()
def mask_aligned(call: Call) -> bool:
    """Row, head and batch strides of mask and bias tensors are multiples of 8 elements."""
    return False not in [t.aligned for t in _tensors(call)]


@fact()
def mask_rank_2_or_4(call: Call) -> bool:
    """Every mask or bias tensor has 2 or 4 dimensions; true without one."""
    return {len(t.shape) for t in _tensors(call)} <= {2, 4}


@fact()
def mask_has_query_dim(call: Call) -> bool:
    """A mask or bias tensor has its own row for every query."""
    return bool([t for t in _tensors(call) if len(t.shape) >= 2 and t.shape[-2] > 1])


@fact(feature="dense_bias")
def dense_bias(call: Call) -> bool:
    """A float tensor is added to the scores."""
    return isinstance(call.bias, DenseBias)


@fact(feature="function_bias")
def function_bias(call: Call) -> bool:
    """A score_mod changes the scores."""
    return isinstance(call.bias, FunctionBias)


@fact(feature="alibi")
def alibi(call: Call) -> bool:
    """ALiBi slopes are given."""
    return isinstance(call.bias, AlibiBias)


@fact()
def bias_is_query_dtype(call: Call) -> bool:
    """There is no bias tensor, or its dtype is the query's."""
    return not isinstance(call.bias, DenseBias) or call.bias.dtype == call.dtype


@fact()
def bias_is_query_dtype_or_float32(call: Call) -> bool:
    """The same as bias_is_query_dtype, or the bias tensor is float32."""
    return bias_is_query_dtype(call) or (isinstance(call.bias, DenseBias) and call.bias.dtype == "float32")


@fact()
def bias_requires_grad(call: Call) -> bool:
    """The bias, the ALiBi slopes or a tensor that a score_mod reads require grad."""
    return call.bias is not None and call.bias.requires_grad


@fact()
def only_bias_requires_grad(call: Call) -> bool | Unknown:
    """The bias requires grad, query, key and value do not."""
    if not bias_requires_grad(call) or call.phase != "training":
        return False
    return UNKNOWN if call.qkv_requires_grad is None else not call.qkv_requires_grad


def _has(call: Call, kind: type | tuple[type, ...]) -> bool:
    # A loop costs no Python call for each node, as a generator does; a new class of calls pays for each.
    for node in call.mask:  # noqa: SIM110
        if isinstance(node, kind):
            return True
    return False


def _has_inside(call: Call, kind: type) -> bool:
    return bool(call.mask) and any(isinstance(node, kind) for node in nested(call.mask))


def _tensors(call: Call) -> list[DenseNode | DenseBias]:
    """Return what a kernel is handed; a tensor inside a disjunction is read element by element."""
    found: list[DenseNode | DenseBias] = []
    found += [n for n in call.mask if isinstance(n, DenseNode)] if call.mask else ()
    if isinstance(call.bias, DenseBias):
        found.append(call.bias)
    return found
