"""Hints: each is a change after which `decide` really selects what the hint says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from strategies import calls, hosts

from attnroute.call import Call, CausalNode, DenseNode
from attnroute.engine.decide import decide
from attnroute.engine.decision import Hint
from attnroute.engine.what_if import ANY_VERSION
from attnroute.host import Host
from attnroute.policy import Policy
from attnroute.tables.load import load
from attnroute.tables.versions import contains

H100 = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"})
CALL = Call(
    dtype="bfloat16",
    batch=2,
    num_heads_q=8,
    num_heads_kv=8,
    seqlen_q=1024,
    seqlen_kv=1024,
    head_dim_qk=128,
    head_dim_v=128,
)
DENSE = DenseNode(shape=(1024, 1024))


def changed(hint, call, host):
    """Make the change that a hint names, written down anew from its words."""
    if hint.kind == "install":
        return call, host.with_versions({hint.change: hint.version or ANY_VERSION})
    if hint.kind == "mask_object":
        rest = [node for node in call.mask if not isinstance(node, DenseNode)]
        return call.with_(mask=(*rest, CausalNode())), host
    if hint.kind == "pad_seqlen":
        length = int(hint.change.removeprefix("seqlen = "))
        return call.with_(seqlen_q=length, seqlen_kv=length), host
    fields = {"dropout": {"dropout_p": 0.0}, "deterministic": {"deterministic": False}}
    return call.with_(**fields[hint.kind]), host


@given(calls(), hosts())
@settings(max_examples=150)
def test_a_hint_selects_what_it_says_and_something_else(call, host):
    decision = decide(call, host, advise=True)
    for hint in decision.hints:
        other_call, other_host = changed(hint, decision.call, host)
        assert (other_call, other_host) != (decision.call, host)
        assert decide(other_call, other_host).selected == hint.selects
        assert hint.selects != decision.selected


@given(calls(), hosts())
@settings(max_examples=30)
def test_advice_changes_nothing_else(call, host):
    advised = decide(call, host, advise=True)
    assert advised.model_copy(update={"hints": (), "stock": None}) == decide(call, host)
    assert advised.stock is not None


def hints(call, host=H100, **policy):
    return decide(call, host, policy=Policy(**policy), advise=True).hints


def test_a_dense_mask_is_hinted_to_be_said_as_an_object():
    hint = Hint(kind="mask_object", change="causal", selects="flash")
    assert hint in hints(CALL.with_(mask=(DENSE,)), ban=("cudnn",))


def test_no_object_is_hinted_for_a_mask_that_was_recognised():
    seen = DENSE.model_copy(update={"recognized": (CausalNode(),)})
    assert "mask_object" not in {h.kind for h in hints(CALL.with_(mask=(seen,)), ban=("cudnn",))}


def test_what_is_not_installed_is_hinted_with_a_version_that_would_do():
    without = H100.with_versions({"cudnn": None})
    (hint,) = [h for h in hints(CALL.with_(mask=(CausalNode(),)), without) if h.kind == "install"]
    assert (hint.change, hint.selects) == ("cudnn", "cudnn")
    assert contains(load().backends["cudnn"].versions_known["cudnn"], "cudnn", hint.version)


def test_what_no_row_asks_a_version_of_is_hinted_without_one():
    (hint,) = [h for h in hints(CALL.with_(softcap=30.0)) if h.kind == "install"]
    assert hint == Hint(kind="install", change="triton", version=None, selects="flex")


def test_nobody_is_told_to_install_a_processor():
    bias = CALL.with_(dtype="float32", bias={"kind": "function"})
    for have in ({}, {"c++": "13.2.0"}):
        host = Host(arch="cpu", versions={"torch": "2.13.0", **have})
        assert decide(bias, host).verdict("flex").missing
        assert hints(bias, host, ban=("chunked",)) == ()
    host = Host(arch="cpu", versions={"torch": "2.13.0", "avx2": "present"})
    hint = Hint(kind="install", change="c++", version=None, selects="flex")
    assert hints(bias, host, ban=("chunked",)) == (hint,)


def test_dropout_and_determinism_are_hinted_where_they_decide():
    dropout = hints(
        CALL.with_(dropout_p=0.1, phase="training"), Host(arch="cpu", versions={"torch": "2.13.0"})
    )
    assert dropout == (Hint(kind="dropout", change="dropout_p = 0", selects="flash"),)


def test_padding_is_hinted_where_a_length_is_what_a_row_is_about():
    call = CALL.with_(seqlen_q=1088, seqlen_kv=1088, phase="training")
    hint = Hint(kind="pad_seqlen", change="seqlen = 1152", selects="cudnn")
    assert hint in hints(call)
    assert "pad_seqlen" not in {h.kind for h in hints(call.with_(mask=(DenseNode(shape=(1088, 1088)),)))}


@pytest.mark.parametrize("kind", ["ban", "require"])
def test_hints_stay_within_the_wishes(kind):
    call = CALL.with_(seqlen_q=1088, seqlen_kv=1088, phase="training")
    wishes = {"ban": {"ban": ("cudnn",)}, "require": {"require": "flash"}}[kind]
    assert "cudnn" not in {hint.selects for hint in hints(call, **wishes)}


def test_without_advice_there_are_no_hints():
    assert decide(CALL.with_(mask=(DENSE,)), H100).hints == ()
