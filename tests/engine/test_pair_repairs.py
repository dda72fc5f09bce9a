"""A backward from elsewhere, on plain data: which calls a kernel with a forward only trains, and why not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import calls, hosts

from attnroute.engine.classes import class_of
from attnroute.engine.decide import decide, judge
from attnroute.engine.repairs import ORDER, apply
from attnroute.question.call import Call, Context, Strides
from attnroute.question.host import Host
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
)
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.folders import Tables
from attnroute.tables.load import load
from attnroute.tables.read import shipped_folder
from attnroute.tables.rows import RuleRow
from attnroute.tables.schema import Evidence, Rule
from attnroute.vocabulary import SPLITS

PAIR = "backward_from_chunked"
ROW = "sm_90/cudnn_fe/backward-wide-heads"
VERSIONS = {
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": "9.19.0",
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
}
H100 = Host(arch="sm_90", versions=VERSIONS)
CALL = Call(
    dtype="bfloat16",
    batch=2,
    num_heads_q=8,
    num_heads_kv=8,
    seqlen_q=512,
    seqlen_kv=512,
    head_dim_qk=512,
    head_dim_v=512,
    phase="training",
)
LSE_BYTES = 4 * 2 * 8 * 512
CAUSAL = CausalNode()
AT_END = CausalNode(alignment="bottom_right")
DOCUMENTS = DocumentsNode(lengths=(200, 312))


def verdict_of(call, tables=None):
    return judge(call, H100, tables or load(), "cudnn_fe", Policy())


# What it changes and costs.

GIVEN = {
    "nothing else": {},
    "a log-sum-exp that is returned": {"return_lse": True},
    "known gradients": {"qkv_requires_grad": True},
    "only something else trains": {"qkv_requires_grad": False},
    "causal": {"mask": (AT_END,)},
    "a window": {"mask": (WindowNode(left=4, right=0),)},
    "documents and a band": {"mask": (DOCUMENTS, CAUSAL)},
    "documents by ids": {"mask": (DocumentsNode(contiguous=False),)},
    "padding": {"mask": (KeyPaddingNode(side="any"), CAUSAL)},
    "fixed slopes": {"bias": AlibiBias()},
    "a softcap": {"softcap": 30.0},
    "a sink": {"sink": True},
    "a ragged batch": {"layout": "thd", "batch": 1, "mask": (DocumentsNode(cross=True), AT_END)},
    "fewer key heads": {"num_heads_kv": 2},
    "a negative scale": {"scale": "negative", "deterministic": True},
    "a graph": {"context": Context(compiled=True, dynamic=("batch",))},
    "strange strides": {"strides": Strides(last_dim_contiguous=False, aligned_16=False)},
}


@pytest.mark.parametrize("case", GIVEN)
def test_the_call_becomes_one_without_gradients(case):
    call = CALL.with_(seqlen_q=100, **GIVEN[case])
    changes = {"phase": "inference", "return_lse": True, "qkv_requires_grad": None}
    assert apply(PAIR, call) == (call.with_(**changes), 4 * call.batch * 8 * 100)


REFUSED = {
    "inference": {"phase": "inference"},
    "inference with a log-sum-exp": {"phase": "inference", "return_lse": True},
    "dropout": {"dropout_p": 0.1},
    "a dense mask": {"mask": (DenseNode(shape=(512, 512)),)},
    "a dense mask beside a band": {"mask": (CAUSAL, DenseNode(shape=(512, 512)))},
    "a dense mask that is known": {"mask": (DenseNode(shape=(512, 512), recognized=(CAUSAL,)),)},
    "a prefix": {"mask": (PrefixNode(),)},
    "a function": {"mask": (FunctionNode(),)},
    "a disjunction": {"mask": (AnyNode(parts=((CAUSAL,), (DOCUMENTS,))),)},
    "a negation": {"mask": (NotNode(part=(CAUSAL,)),)},
    "a dense bias": {"bias": DenseBias(dtype="bfloat16", shape=(512, 512))},
    "a trained dense bias": {"bias": DenseBias(dtype="bfloat16", shape=(512, 512), requires_grad=True)},
    "a score function": {"bias": FunctionBias()},
    "trained slopes": {"bias": AlibiBias(requires_grad=True)},
    "a second derivative": {"context": Context(transform="double_backward")},
    "forward mode": {"context": Context(transform="forward_ad")},
    "vmap": {"context": Context(transform="vmap")},
    "export": {"context": Context(transform="export")},
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_it_cannot_be_made_or_has_nothing_to_do(case):
    assert apply(PAIR, CALL.with_(**REFUSED[case])) is None


@given(calls())
@settings(max_examples=100)
def test_nothing_but_the_phase_changes(call):
    change = apply(PAIR, call)
    if change is None:
        return
    changed, size = change
    assert (changed.phase, changed.return_lse, changed.qkv_requires_grad) == ("inference", True, None)
    back = {n: getattr(call, n) for n in ("phase", "return_lse", "qkv_requires_grad")}
    assert (call.phase, changed.with_(**back)) == ("training", call)
    assert size == 4 * call.batch * call.num_heads_q * call.seqlen_q
    assert apply(PAIR, changed) is None


# The wide heads of an H100.

WIDE = {"320": (320, 320), "512": (512, 512), "512 and 320": (512, 320), "264": (264, 264)}
TRAINS = {
    "everything": ({}, ()),
    "causal": ({"mask": (CAUSAL,)}, ()),
    "causal from the bottom right": ({"mask": (AT_END,), "seqlen_q": 100}, ()),
    "a window": ({"mask": (WindowNode(left=127, right=0),)}, ()),
    "a window to both sides": ({"mask": (WindowNode(left=64, right=64),)}, ()),
    "fewer key heads": ({"num_heads_kv": 2, "mask": (CAUSAL,)}, ()),
    "one key head": ({"num_heads_kv": 1}, ()),
    "documents": ({"mask": (DOCUMENTS,)}, ("to_varlen",)),
    "causal documents": ({"mask": (DOCUMENTS, CAUSAL), "num_heads_kv": 2}, ("to_varlen",)),
    "padding": ({"mask": (KeyPaddingNode(lengths=(100, 512)),)}, ("clear_left_out", "to_varlen")),
    "finite padding": ({"mask": (KeyPaddingNode(lengths=(100, 512), finite=True),)}, ("to_varlen",)),
    "causal padding at the left": (
        {"mask": (KeyPaddingNode(side="left"), CAUSAL)},
        ("clear_left_out", "to_varlen"),
    ),
    "a ragged batch": (
        {"layout": "thd", "batch": 1, "mask": (DocumentsNode(cross=True), AT_END)},
        ("to_varlen",),
    ),
    "a sink": ({"sink": True}, ()),
    "a known mask": (
        {"mask": (DenseNode(shape=(512, 512), recognized=(CAUSAL,), empty_rows="none"),)},
        ("recognize_mask",),
    ),
    "deterministic": ({"deterministic": True}, ()),
    "a log-sum-exp": ({"return_lse": True}, ()),
    "a graph": ({"context": Context(compiled=True)}, ()),
}


@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("case", TRAINS)
def test_wide_heads_train(case, dims):
    fields, before = TRAINS[case]
    qk, v = WIDE[dims]
    call = CALL.with_(head_dim_qk=qk, head_dim_v=v, **fields)
    found = verdict_of(call)
    assert (found.status, found.repairs) == ("eligible", (*before, PAIR))
    told = {f.rule: f for f in found.findings}
    assert (told[ROW].outcome, told[ROW].repaired_by) == ("fail", PAIR)


def test_it_costs_the_log_sum_exp():
    assert verdict_of(CALL).extra_bytes == LSE_BYTES
    copied = CALL.with_(head_dim_qk=300, head_dim_v=300)
    padding = verdict_of(copied.with_(phase="inference"))
    both = verdict_of(copied)
    assert both.repairs == (PAIR, "pad_head_dim")
    assert both.extra_bytes == padding.extra_bytes + LSE_BYTES


@pytest.mark.parametrize("fields", [{"phase": "inference"}, {"head_dim_qk": 256, "head_dim_v": 256}], ids=str)
def test_what_has_kernels_of_its_own_borrows_none(fields):
    found = verdict_of(CALL.with_(**fields))
    assert (found.status, found.repairs) == ("eligible", ())


@pytest.mark.parametrize(
    "sizes", [{"head_dim_v": 256}, {"head_dim_qk": 128}, {"head_dim_qk": 128, "head_dim_v": 320}]
)
def test_one_wide_head_is_enough(sizes):
    assert verdict_of(CALL.with_(**sizes)).repairs == (PAIR,)


SAID = {
    "dropout": "feature-dropout",
    "a dense mask": "feature-dense-mask",
    "a dense mask beside a band": "feature-dense-mask",
    "a prefix": "feature-prefix",
    "a function": "feature-function-mask",
    "a disjunction": "feature-combined-mask",
    "a negation": "feature-combined-mask",
    "a dense bias": "feature-dense-bias",
    "a trained dense bias": "feature-bias-grad",
    "a score function": "feature-function-bias",
    "trained slopes": "feature-bias-grad",
    "a second derivative": "feature-double-backward",
    "forward mode": "feature-forward-ad",
    "vmap": "feature-vmap",
    "export": None,
}


@pytest.mark.parametrize("case", SAID)
def test_what_does_not_train_is_told_why(case):
    found = verdict_of(CALL.with_(**REFUSED[case]))
    assert (found.status, found.repairs, found.extra_bytes) == ("rejected", (), 0)
    blocking = {f.rule: f for f in found.blocking}
    assert SAID[case] is None or f"any/cudnn_fe/{SAID[case]}" in blocking
    row = blocking[ROW]
    assert (row.outcome, row.repair, row.repaired_by) == ("fail", PAIR, None)
    assert "backward ends at 256" in row.because


def test_a_second_derivative_that_policy_announces_is_refused_too():
    decision = decide(CALL, H100, policy=Policy(transform="double_backward"))
    assert decision.verdict("cudnn_fe").status == "rejected"
    assert decide(CALL, H100).verdict("cudnn_fe").status == "eligible"


def test_an_explanation_names_it():
    text = str(decide(CALL, H100, policy=Policy(require="cudnn_fe")))
    assert PAIR in text


# Other backends, were they to have a forward only.


class ForwardOnly(Tables):
    """The shipped tables, with one backend that is said to have no backward."""

    def __init__(self, backend):
        super().__init__((shipped_folder(),))
        rule = Rule(
            name="added",
            phase="training",
            requires="never",
            repair=PAIR,
            because="of this test",
            evidence=[Evidence(kind="own", ref="this test")],
        )
        row = RuleRow(f"any/{backend}/added", rule, shipped_folder())
        object.__setattr__(self, "added", (backend, row))

    def rules(self, arch, backend):
        rows = load().rules(arch, backend)
        return (*rows, self.added[1]) if rows is not None and backend == self.added[0] else rows


NARROW = CALL.with_(head_dim_qk=64, head_dim_v=64)
FA2 = Host(arch="sm_90", versions=VERSIONS | {"flash-attn": "2.8.3"})


def of_fa2(fields):
    """Return the verdict on a kernel that takes slopes, a softcap and dropout, without and with the row."""
    call = NARROW.with_(**fields)
    return [judge(call, FA2, tables, "fa2", Policy()) for tables in (load(), ForwardOnly("fa2"))]


@pytest.mark.parametrize("fields", [{"bias": AlibiBias()}, {"softcap": 30.0}, {"mask": (CAUSAL,)}], ids=str)
def test_a_kernel_without_a_backward_trains_what_chunked_makes_again(fields):
    own, found = of_fa2(fields)
    assert (own.status, own.repairs) == ("eligible", ())
    assert (found.status, found.repairs) == ("eligible", (PAIR,))
    assert found.extra_bytes == LSE_BYTES


def test_dropped_weights_are_not_made_again():
    own, found = of_fa2({"dropout_p": 0.1})
    assert (own.status, found.status) == ("eligible", "rejected")
    assert [(f.rule, f.because) for f in found.blocking] == [("any/fa2/added", "of this test")]


@pytest.mark.parametrize("transform", ["double_backward", "forward_ad", "vmap", "export"])
def test_a_transform_goes_through_no_pair(transform):
    assert "any/fa2/added" in {f.rule for f in of_fa2({"context": Context(transform=transform)})[1].blocking}


def test_a_sink_comes_after_it():
    assert of_fa2({"sink": True})[1].repairs == (PAIR, "sink_from_lse")
    assert of_fa2({"sink": True, "mask": (DOCUMENTS,)})[1].repairs == ("to_varlen", PAIR, "sink_from_lse")


@given(calls(), hosts(), st.sampled_from(["flash", "efficient", "cudnn", "fa4", "flex", "chunked"]))
@settings(max_examples=60)
def test_with_it_a_backend_is_judged_as_for_inference(call, host, backend):
    """Nothing that a backend refuses at inference is lifted, and what a repair may do comes in its order."""
    found = judge(normalize(call), host, ForwardOnly(backend), backend, Policy())
    if found.status not in ("eligible", "unavailable"):
        return
    assert (PAIR in found.repairs) == (call.phase == "training")
    # A batch that is split may become a ragged one only then.
    made = [repair for repair in found.repairs if repair not in SPLITS]
    assert made == sorted(made, key=ORDER.index)
    repaired = call
    for repair in found.repairs:
        repaired, _ = apply(repair, normalize(repaired))
    assert repaired.phase == "inference"
    again = judge(normalize(repaired), host, load(), backend, Policy())
    assert (again.status, again.repairs) == (found.status, ())


@pytest.mark.parametrize("case", [c for c in REFUSED if "inference" not in c])
def test_what_it_refuses_is_another_class(case):
    one, other = (class_of(c, "sm_90", load()) for c in (CALL, CALL.with_(**REFUSED[case])))
    assert one != other


def test_trained_slopes_are_another_class():
    calls_of = (CALL.with_(bias=AlibiBias(requires_grad=trains)) for trains in (False, True))
    one, other = (class_of(c, "sm_90", load()) for c in calls_of)
    assert one != other
