"""The question as plain data: what one attention call is, without any tensor.

Everything that a rule may ask about a call is in `Call` or computed from it by `attnroute.question.facts`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from attnroute.question.fits import call_softcap, heads, probability
from attnroute.question.nodes import Bias, Count, MaskNode
from attnroute.question.plain import Plain, Record, raise_sentence
from attnroute.vocabulary import Distributed, Dtype, Layout, Phase, ScaleSign, Transform

Dynamic = Literal["batch", "seqlen_q", "seqlen_kv"]


class Strides(Record):
    """How query, key and value lie in memory, as far as a kernel cares.

    `tokens_contiguous`: they are contiguous as (batch, seqlen, num_heads, head_dim), or thd's (total,
    num_heads, head_dim). Without a mask it says nothing and stays true.
    """

    last_dim_contiguous: bool = True
    packed: bool = True
    tokens_contiguous: bool = True
    aligned_16: bool = True
    kv_heads_expanded: bool = False


class Context(Record):
    """What surrounds the call: compilation, capture, transforms, distribution.

    `dispatch_mode`: a TorchDispatchMode is active, which sees every operator and keeps torch.compile from
    compiling. `shapes_vary`: calls like it come with other lengths and batch sizes, as decoding steps do.
    """

    compiled: bool = False
    cuda_graph: bool = False
    dispatch_mode: bool = False
    shapes_vary: bool = False
    dynamic: tuple[Dynamic, ...] = ()
    transform: Transform | None = None
    distributed: Distributed | None = None


class Call(Plain):
    """One attention call.

    Lengths and head counts are Python ints. `mask` is a conjunction. `scale` is only the sign of the
    factor on QK^T: kernels care about nothing else. `qkv_requires_grad` tells a call that trains only
    its bias from one that trains its inputs; None means not known.
    """

    dtype: Dtype
    batch: Count
    num_heads_q: Count
    num_heads_kv: Count
    seqlen_q: Count
    seqlen_kv: Count
    head_dim_qk: Annotated[int, Field(ge=1)]
    head_dim_v: Annotated[int, Field(ge=1)]
    layout: Layout = "bhsd"
    phase: Phase = "inference"
    mask: tuple[MaskNode, ...] = ()
    bias: Bias | None = None
    scale: ScaleSign = "positive"
    softcap: Annotated[float, AfterValidator(call_softcap)] = 0.0
    sink: bool = False
    dropout_p: Annotated[float, AfterValidator(probability)] = 0.0
    deterministic: bool = False
    return_lse: bool = False
    qkv_requires_grad: bool | None = None
    strides: Strides = Strides()
    context: Context = Context()

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        # No head at all is refused where the call is asked about, as `attention()` refuses it.
        if self.num_heads_kv or self.num_heads_q:
            heads(self.num_heads_q, self.num_heads_kv)
        return self

    def with_(self, **changes: Any) -> Call:
        """Return a validated copy with the given fields replaced.

        Raises:
            ArgumentError: A field is unknown or wrong.
        """
        try:
            return Call.model_validate({**self.__dict__, **changes})
        except ValidationError as error:
            raise_sentence(Call, error)
