"""Preparations on plain data: what each changes and costs, when it cannot be made, how `decide` uses it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import calls, hosts

from attnroute.engine.decide import decide
from attnroute.engine.repairs import ORDER, apply, broadcast
from attnroute.question.call import Call, Context, Strides
from attnroute.question.facts import empty_rows_of
from attnroute.question.host import Host
from attnroute.question.nodes import (
    AlibiBias,
    AnyNode,
    CausalNode,
    DenseBias,
    DenseNode,
    DocumentsNode,
    FunctionNode,
    KeyPaddingNode,
    NotNode,
    WindowNode,
)
from attnroute.question.normalize import normalize
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.tables.rows import RuleRow
from attnroute.tables.schema import Evidence, Rule
from attnroute.vocabulary import REPAIRS

CALL = Call(
    dtype="bfloat16",
    batch=2,
    num_heads_q=8,
    num_heads_kv=4,
    seqlen_q=16,
    seqlen_kv=32,
    head_dim_qk=20,
    head_dim_v=24,
)
SQUARE = CALL.with_(seqlen_q=32)
MAY_CHANGE = {
    "recognize_mask": {"mask"},
    "clear_left_out": {"mask"},
    "from_varlen": {"mask", "layout"},
    "to_varlen": {"mask", "layout"},
    "backward_from_chunked": {"phase", "return_lse", "qkv_requires_grad"},
    "sink_from_lse": {"sink", "return_lse"},
    "materialize_alibi": {"bias"},
    "materialize_mask": {"mask"},
    "expand_kv": {"num_heads_kv", "strides"},
    "pad_head_dim": {"head_dim_qk", "head_dim_v", "strides"},
    "contiguous": {"strides"},
    "cast_mask": {"mask", "bias"},
    "cast_bias": {"bias"},
    "align_bias": {"bias"},
    "zero_empty_rows": {"mask", "bias"},
    "split_batch": {"batch"},
    "split_heads": {"num_heads_q", "num_heads_kv"},
}
ANY_REPAIR = st.sampled_from(ORDER)
CPU = Host(arch="cpu", versions={"torch": "2.13.0+cpu"})
H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"})
STREWN = Strides(last_dim_contiguous=False, packed=False, aligned_16=False)


def test_every_repair_of_the_vocabulary_is_one_that_can_be_made():
    assert sorted(ORDER) == sorted(REPAIRS) == sorted(MAY_CHANGE)


@given(calls(), ANY_REPAIR)
def test_a_repair_changes_its_own_fields_and_costs_no_less_than_nothing(call, repair):
    change = apply(repair, call)
    if change is None:
        return
    changed, size = change
    fields = {name for name in Call.model_fields if getattr(changed, name) != getattr(call, name)}
    assert fields
    assert fields <= MAY_CHANGE[repair]
    assert isinstance(size, int)
    assert size >= 0
    assert Call.model_validate_json(changed.model_dump_json()) == changed


@given(calls(), ANY_REPAIR)
def test_a_repair_that_was_made_has_nothing_left_to_do(call, repair):
    change = apply(repair, call)
    if change is not None:
        assert apply(repair, change[0]) is None


@pytest.mark.parametrize(
    ("repair", "call", "changes", "size"),
    [
        ("expand_kv", CALL, {"num_heads_kv": 8}, 2 * 8 * 32 * (20 + 24) * 2),
        ("pad_head_dim", CALL, {"head_dim_qk": 24}, 2 * (8 * 16 + 4 * 32) * (24 + 24) * 2),
        (
            "contiguous",
            CALL.with_(strides=STREWN),
            {"strides": Strides(packed=False)},
            2 * (8 * 16 * 20 + 4 * 32 * 44) * 2,
        ),
        (
            "sink_from_lse",
            CALL.with_(sink=True),
            {"sink": False, "return_lse": True},
            2 * 8 * 16 * 24 * 2,
        ),
        (
            "materialize_mask",
            CALL.with_(mask=(FunctionNode(per_head=False),)),
            {"mask": (DenseNode(shape=(2, 1, 16, 32)),)},
            2 * 16 * 32,
        ),
        (
            "materialize_mask",
            CALL.with_(mask=(NotNode(part=(FunctionNode(per_batch=False),)),)),
            {"mask": (DenseNode(shape=(1, 8, 16, 32)),)},
            8 * 16 * 32,
        ),
        (
            "materialize_mask",
            CALL.with_(mask=(AnyNode(parts=((KeyPaddingNode(),), (DenseNode(shape=(8, 1, 1)),))),)),
            {"mask": (DenseNode(shape=(2, 8, 1, 32)),)},
            2 * 8 * 32,
        ),
        (
            "materialize_mask",
            CALL.with_(mask=(CausalNode(alignment="bottom_right"),)),
            {"mask": (DenseNode(shape=(1, 1, 16, 32), empty_rows="none"),)},
            16 * 32,
        ),
        (
            "materialize_mask",
            CALL.with_(mask=(KeyPaddingNode(lengths=(0, 3)),)),
            {"mask": (DenseNode(shape=(2, 1, 1, 32), empty_rows="some"),)},
            2 * 32,
        ),
        (
            "materialize_mask",
            CALL.with_(mask=(KeyPaddingNode(), DenseNode(shape=(8, 1, 32)), CausalNode())),
            {"mask": (DenseNode(shape=(2, 8, 16, 32)),)},
            2 * 8 * 16 * 32,
        ),
        (
            "materialize_alibi",
            CALL.with_(dtype="float32", bias=AlibiBias(), mask=(CausalNode(),)),
            {"bias": DenseBias(dtype="float32", shape=(1, 8, 16, 32), empty_rows="none")},
            8 * 16 * 32 * 4,
        ),
        (
            "materialize_alibi",
            CALL.with_(dtype="float64", bias=AlibiBias(per_batch=True)),
            {"bias": DenseBias(dtype="float64", shape=(2, 8, 16, 32), empty_rows="none")},
            2 * 8 * 16 * 32 * 8,
        ),
        (
            "cast_mask",
            CALL.with_(mask=(DenseNode(shape=(32,), empty_rows="none"), CausalNode())),
            {"mask": (CausalNode(),), "bias": DenseBias(dtype="bfloat16", shape=(32,))},
            32 * 2,
        ),
        (
            "cast_mask",
            CALL.with_(
                mask=(DenseNode(shape=(2, 1, 1, 32)),),
                bias=DenseBias(dtype="float32", shape=(8, 16, 1), requires_grad=True),
            ),
            {"mask": (), "bias": DenseBias(dtype="bfloat16", shape=(2, 8, 16, 32), requires_grad=True)},
            2 * 8 * 16 * 32 * 2,
        ),
        (
            "cast_bias",
            CALL.with_(
                bias=DenseBias(dtype="float32", shape=(16, 32), aligned=False, last_dim_contiguous=False)
            ),
            {"bias": DenseBias(dtype="bfloat16", shape=(16, 32))},
            16 * 32 * 2,
        ),
        (
            "align_bias",
            CALL.with_(
                bias=DenseBias(dtype="float32", shape=(16, 32), aligned=False, last_dim_contiguous=False)
            ),
            {"bias": DenseBias(dtype="float32", shape=(16, 32))},
            16 * 32 * 4,
        ),
        (
            "zero_empty_rows",
            CALL.with_(mask=(DenseNode(shape=(16, 32), empty_rows="some"),)),
            {"mask": (DenseNode(shape=(16, 32), empty_rows="none"),)},
            2 * 8 * 16 * 24 * 2,
        ),
        ("split_batch", CALL.with_(batch=70_000), {"batch": 65535}, 70_000 * 8 * 16 * 24 * 2),
        (
            "split_heads",
            CALL.with_(num_heads_q=80_000, num_heads_kv=20_000),
            {"num_heads_q": 65532, "num_heads_kv": 16383},
            2 * 80_000 * 16 * 24 * 2,
        ),
        (
            "recognize_mask",
            SQUARE.with_(mask=(DenseNode(shape=(32, 32), recognized=(CausalNode(),)), WindowNode(left=3))),
            {"mask": (CausalNode(), WindowNode(left=3))},
            0,
        ),
    ],
)
def test_what_a_repair_changes_and_costs(repair, call, changes, size):
    assert apply(repair, call) == (call.with_(**changes), size)


@pytest.mark.parametrize(
    ("repair", "call"),
    [
        ("expand_kv", CALL.with_(num_heads_kv=8)),
        ("pad_head_dim", CALL.with_(head_dim_qk=64, head_dim_v=8)),
        ("contiguous", CALL),
        ("contiguous", CALL.with_(strides=Strides(packed=False, kv_heads_expanded=True))),
        ("sink_from_lse", CALL),
        ("materialize_mask", CALL),
        ("materialize_mask", CALL.with_(mask=(DenseNode(shape=(16, 32)),))),
        ("materialize_mask", CALL.with_(mask=(CausalNode(),), context=Context(dynamic=("seqlen_kv",)))),
        ("materialize_alibi", CALL.with_(bias=AlibiBias())),
        ("materialize_alibi", CALL.with_(dtype="float32", bias=AlibiBias(requires_grad=True))),
        ("materialize_alibi", CALL.with_(dtype="float32", bias=AlibiBias(), seqlen_q=1449, seqlen_kv=1449)),
        (
            "materialize_alibi",
            CALL.with_(dtype="float32", bias=AlibiBias(), mask=(DocumentsNode(cross=True, lengths=(16,)),)),
        ),
        ("cast_mask", CALL.with_(mask=(CausalNode(),))),
        ("cast_mask", CALL.with_(mask=(DenseNode(shape=(16, 32)),), bias=AlibiBias())),
        ("cast_bias", CALL),
        ("cast_bias", CALL.with_(bias=AlibiBias())),
        ("cast_bias", CALL.with_(bias=DenseBias(dtype="bfloat16", shape=(16, 32)))),
        ("align_bias", CALL.with_(bias=DenseBias(dtype="float32", shape=(16, 32)))),
        ("zero_empty_rows", CALL),
        ("zero_empty_rows", CALL.with_(mask=(KeyPaddingNode(lengths=(0, 0)),))),
        ("split_batch", CALL.with_(batch=65535)),
        ("split_heads", CALL.with_(num_heads_q=65535, num_heads_kv=65535)),
        ("split_heads", CALL.with_(num_heads_q=140_000, num_heads_kv=2)),
        ("recognize_mask", CALL.with_(mask=(DenseNode(shape=(16, 32)), CausalNode()))),
    ],
)
def test_a_repair_that_cannot_be_made_or_has_nothing_to_do(repair, call):
    assert apply(repair, call) is None


def test_padding_one_head_dim_copies_only_what_has_it():
    strewn = CALL.with_(strides=STREWN)
    assert apply("pad_head_dim", strewn)[0].strides == STREWN
    both = strewn.with_(head_dim_v=20)
    assert apply("pad_head_dim", both)[0].strides == Strides()


def test_an_expanded_head_stays_expanded_until_it_is_copied():
    shared = CALL.with_(strides=Strides(kv_heads_expanded=True, aligned_16=False))
    assert apply("contiguous", shared)[0].strides == Strides(kv_heads_expanded=True)
    assert apply("expand_kv", shared)[0].strides == Strides(aligned_16=False)
    assert apply("expand_kv", shared.with_(num_heads_kv=8))[0].strides == Strides(aligned_16=False)


@given(calls())
def test_zeroing_empty_rows_settles_what_one_tensor_says(call):
    one = call.with_(mask=(DenseNode(shape=(1, 1, call.seqlen_q, call.seqlen_kv)),), bias=None)
    if call.seqlen_kv:
        assert empty_rows_of(apply("zero_empty_rows", one)[0]) == "none"


@pytest.mark.parametrize(
    ("left", "right", "both"),
    [
        ([], (3, 4), [3, 4]),
        ([1, 4], (3, 1), [3, 4]),
        ([4], (2, 1, 1, 4), [2, 1, 1, 4]),
        ([2, 1, 0], (1, 1), [2, 1, 0]),
    ],
)
def test_shapes_broadcast(left, right, both):
    assert broadcast(left, right) == both


@given(calls(), hosts())
def test_a_verdict_with_repairs_is_that_of_the_repaired_call(call, host):
    """What a backend accepts after repairs it accepts as it is, when the call comes repaired."""
    for verdict in decide(call, host).verdicts:
        if verdict.status != "eligible" or not verdict.repairs:
            continue
        repaired, total = call, 0
        for repair in verdict.repairs:
            repaired, size = apply(repair, normalize(repaired))
            total += size
        assert total == verdict.extra_bytes
        again = decide(repaired, host).verdict(verdict.backend)
        assert (again.status, again.repairs) == ("eligible", ())


@given(calls(), hosts())
def test_repairs_are_in_their_order_and_only_with_what_may_run(call, host):
    for verdict in decide(call, host).verdicts:
        assert len(set(verdict.repairs)) == len(verdict.repairs)
        if verdict.status == "rejected":
            assert (verdict.repairs, verdict.extra_bytes) == ((), 0)
        if not verdict.repairs:
            assert verdict.extra_bytes == 0


def test_a_lifted_row_stays_in_the_verdict_with_its_repair():
    call = SQUARE.with_(mask=(WindowNode(left=3, right=0),), head_dim_qk=24)
    verdict = decide(call, CPU).verdict("flash")
    assert (verdict.status, verdict.repairs) == ("eligible", ("materialize_mask", "cast_mask"))
    lifted = {f.rule: f.repaired_by for f in verdict.findings if f.repaired_by is not None}
    assert lifted == {"cpu/flash/feature-window": "materialize_mask"}


def test_a_row_that_a_repair_broke_rejects():
    """Said as a tensor, the mask is one that ring attention does not pass on."""
    call = SQUARE.with_(
        mask=(KeyPaddingNode(),), head_dim_qk=24, context=Context(distributed="context_parallel")
    )
    verdict = decide(call, H100).verdict("efficient")
    assert verdict.status == "rejected"
    assert "any/efficient/context-parallel-without-tensor" in [f.rule for f in verdict.blocking]


def test_a_recognised_mask_needs_no_other_repair_where_its_objects_do():
    dense = DenseNode(shape=(32, 32), recognized=(CausalNode(),))
    verdict = decide(SQUARE.with_(mask=(dense,), head_dim_qk=24), CPU).verdict("flash")
    assert (verdict.status, verdict.repairs, verdict.extra_bytes) == ("eligible", ("recognize_mask",), 0)


def test_a_recognised_mask_is_left_a_tensor_where_only_that_is_accepted():
    """The CPU kernel has no argument for them: recognised, they would be made a tensor again."""
    for node in (CausalNode(alignment="bottom_right"), WindowNode(left=3, right=0), KeyPaddingNode()):
        dense = DenseNode(shape=(16, 32), recognized=(node,), empty_rows="none")
        verdict = decide(CALL.with_(mask=(dense,), head_dim_qk=24), CPU).verdict("flash")
        assert (verdict.status, verdict.repairs) == ("eligible", ("cast_mask",))


def test_a_recognised_mask_is_made_a_smaller_tensor_where_the_given_one_cannot_run():
    """A row of the mask for each query would lie too far from the first one."""
    sizes = {"seqlen_q": 70_000, "seqlen_kv": 70_000, "num_heads_kv": 8, "head_dim_qk": 24}
    padding = KeyPaddingNode(lengths=(60_000, 50_000))
    for recognized, status in ((None, "rejected"), ((padding,), "eligible")):
        dense = DenseNode(shape=(2, 1, 70_000, 70_000), recognized=recognized, empty_rows="none")
        verdict = decide(CALL.with_(mask=(dense,), **sizes), H100).verdict("efficient")
        assert verdict.status == status
    assert verdict.repairs == ("recognize_mask", "materialize_mask", "cast_mask")
    assert verdict.extra_bytes == 2 * 70_000 * (1 + 2)


class Added(Tables):
    """The shipped tables with one more row for flash."""

    def __init__(self, rule):
        super().__init__((shipped_folder(),))
        object.__setattr__(self, "added", RuleRow("any/flash/added", rule, shipped_folder()))

    def rules(self, arch, backend):
        rows = load().rules(arch, backend)
        return (*rows, self.added) if rows is not None and backend == "flash" else rows


def test_a_row_that_names_a_repair_may_help_where_the_repair_suits_another_row_too():
    """The one way in which a row makes a call acceptable: padding makes the head dims equal as well."""
    call = CALL.with_(head_dim_qk=20, head_dim_v=24)
    rule = Rule(
        name="added",
        requires={"head_dim_qk": "%8"},
        repair="pad_head_dim",
        because="of this test",
        evidence=[Evidence(kind="own", ref="this test")],
    )
    assert decide(call, CPU).verdict("flash").status == "rejected"
    verdict = decide(call, CPU, Added(rule)).verdict("flash")
    assert (verdict.status, verdict.repairs) == ("eligible", ("pad_head_dim",))
    lifted = {f.rule for f in verdict.findings if f.repaired_by == "pad_head_dim"}
    assert lifted == {"any/flash/added", "any/flash/head-dims-equal"}


def test_a_repair_that_cannot_be_made_leaves_the_backend_rejected():
    rule = Rule(
        name="added",
        requires={"num_heads_q": "<=4"},
        repair="split_heads",
        because="of this test",
        evidence=[Evidence(kind="own", ref="this test")],
    )
    verdict = decide(SQUARE.with_(head_dim_qk=24), CPU, Added(rule)).verdict("flash")
    assert verdict.status == "rejected"
    assert [f.rule for f in verdict.blocking] == ["any/flash/added"]
