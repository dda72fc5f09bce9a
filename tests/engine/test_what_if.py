"""Hints: each is a change after which `decide` really selects, or allows, what the hint says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from support.strategies import calls, hosts

from attnroute.engine.advice import other_versions, what_if
from attnroute.engine.advice.what_if import ANY_VERSION
from attnroute.engine.decide import decide
from attnroute.engine.decision import Hint
from attnroute.engine.select import select
from attnroute.question.call import Call
from attnroute.question.host import Host
from attnroute.question.nodes import CausalNode, DenseNode, KeyPaddingNode
from attnroute.question.policy import Policy
from attnroute.tables.load import load
from attnroute.tables.versions import contains

pytestmark = pytest.mark.usefixtures("unmeasured")

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
    if hint.kind in ("install", "upgrade"):
        packages = [(hint.change, hint.version), *((name, version) for name, version, _ in hint.also)]
        local = host.versions.get("torch", "").partition("+")[1:]
        changes = {name: (version or ANY_VERSION) for name, version in packages}
        if "torch" in changes and "torch" in host.versions:
            changes["torch"] += "".join(local)
        return call, host.with_versions(changes)
    if hint.kind == "mask_object":
        rest = [node for node in call.mask if not isinstance(node, DenseNode)]
        return call.with_(mask=(*rest, CausalNode())), host
    if hint.kind == "pad_seqlen":
        length = int(hint.change.removeprefix("seqlen = "))
        return call.with_(seqlen_q=length, seqlen_kv=length), host
    if hint.kind == "finite":
        nodes = [n.changed(finite=True) if isinstance(n, KeyPaddingNode) else n for n in call.mask]
        return call.with_(mask=tuple(nodes)), host
    fields = {"dropout": {"dropout_p": 0.0}, "deterministic": {"deterministic": False}}
    return call.with_(**fields[hint.kind]), host


@given(calls(), hosts())
@settings(max_examples=60)
def test_a_hint_selects_what_it_says_and_something_else(call, host):
    decision = decide(call, host, advise=True)
    assert len(set(decision.hints)) == len(decision.hints)
    for hint in decision.hints:
        other_call, other_host = changed(hint, decision.call, host)
        assert (other_call, other_host) != (decision.call, host)
        other = decide(other_call, other_host)
        assert other.selected == hint.selects
        if hint.then_ms is not None:
            assert hint.then_ms <= hint.now_ms * (1 - what_if.LEAST_GAIN)
        elif hint.allows is None:
            assert hint.selects != decision.selected
        else:
            assert hint.kind == "upgrade"
            assert hint.allows in set(other.order) - set(decision.order)


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
    (hint,) = [h for h in hints(CALL.with_(mask=(CausalNode(),)), without) if h.change == "cudnn"]
    assert (hint.kind, hint.selects) == ("install", "cudnn")
    assert contains(load().backends["cudnn"].versions_known["cudnn"], "cudnn", hint.version)


def test_what_no_row_asks_a_version_of_is_hinted_with_the_known_ones():
    (hint,) = [h for h in hints(CALL.with_(softcap=30.0)) if h.change == "triton"]
    known = load().backends["flex"].versions_known["triton"]
    assert (hint.kind, hint.selects, f">={hint.version}, <{hint.below}") == ("install", "flex", known)


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


def overlay(tmp_path, rows, name="flash", scope="sm_90"):
    """Return the tables with rows of our own on top."""
    folder = tmp_path / scope
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(rows, encoding="utf-8")
    return tmp_path


ROW = """
[[rule]]
name = "{name}"
versions = {{ {versions} }}
requires = "never"
because = "of the test"
evidence = [{{ kind = "own", ref = "this test" }}]
"""


def rows(*versions):
    return "".join(ROW.format(name=f"row-{i}", versions=text) for i, text in enumerate(versions))


def upgrade_hints(tmp_path, *versions, host=H100, call=CALL, **policy):
    """Return the upgrade hints where rows forbid flash some versions and it stands before all others."""
    folder = overlay(tmp_path, rows(*versions))
    found = hints(call, host, tables=folder, prefer=("flash",), **policy)
    return [hint for hint in found if hint.kind == "upgrade"]


def said(hint):
    return (hint.change, hint.version, hint.below, hint.selects, hint.allows)


@pytest.mark.parametrize(
    ("ranges", "version", "below"),
    [
        (['torch = "<2.13"'], "2.13", "2.16"),
        (['torch = "<=2.12.0"'], "2.12.1", "2.16"),
        (['torch = "<2.12"', 'torch = ">=2.11, <2.13"'], "2.13", "2.16"),
        # The newest stretch that would do, not one that a newer release breaks again.
        (['torch = "<2.12"', 'torch = ">=2.13, <2.14"'], "2.14", "2.16"),
        (['torch = "<2.12"', 'torch = ">=2.14"'], "2.12", "2.14"),
        (['torch = ["<2.12", ">=2.13, <2.15"]'], "2.15", "2.16"),
    ],
)
def test_an_upgrade_is_hinted_with_the_versions_that_would_do(tmp_path, ranges, version, below):
    (hint,) = upgrade_hints(tmp_path, *ranges)
    assert said(hint) == ("torch", version, below, "flash", None)


@pytest.mark.parametrize(
    "ranges",
    [
        ['torch = ">=2.11"'],
        ['torch = "==2.11.0"', 'torch = ">2.11.0"'],
        # Two distributions would have to change, or something that has no version.
        ['torch = "<2.13"', 'cudnn = "<9.30"'],
        ['torch = "<2.13"', 'cuda = "<14"'],
    ],
)
def test_no_upgrade_is_hinted_where_none_helps(tmp_path, ranges):
    assert upgrade_hints(tmp_path, *ranges) == []


def test_a_row_about_two_distributions_is_lifted_by_either(tmp_path):
    found = upgrade_hints(tmp_path, 'torch = "<2.13", cudnn = "<9.20"')
    assert [said(hint)[:4] for hint in found] == [
        ("torch", "2.13", "2.16", "flash"),
        ("cudnn", "9.20", None, "flash"),
    ]


def test_an_upgrade_that_only_makes_eligible_says_so(tmp_path):
    folder = overlay(tmp_path, rows('torch = "<2.13"'))
    found = hints(CALL, tables=folder)
    assert [said(h) for h in found if h.kind == "upgrade"] == [("torch", "2.13", "2.16", "cudnn", "flash")]


def test_an_upgrade_keeps_the_cuda_of_torch(tmp_path):
    shared = 'torch = ">=2.13", cuda = "<13"'
    host = Host(arch="sm_90", versions={"torch": "2.11.0+cu130", "cudnn": "9.19.0"})
    (hint,) = upgrade_hints(tmp_path, 'torch = "<2.13"', shared, host=host)
    assert said(hint)[:2] == ("torch", "2.13")
    older = host.with_versions({"torch": "2.11.0+cu126"})
    assert upgrade_hints(tmp_path, 'torch = "<2.13"', shared, host=older) == []


@pytest.mark.parametrize("policy", [{"ban": ("flash",)}, {"require": "math"}, {"allow": ("math",)}])
def test_no_upgrade_is_hinted_for_what_nobody_wants(tmp_path, policy):
    assert upgrade_hints(tmp_path, 'torch = "<2.13"', **policy) == []


def test_a_version_that_is_not_known_yet_is_no_upgrade(tmp_path):
    newest = H100.with_versions({"torch": "2.99.0"})
    assert decide(CALL, newest).verdict("flash").status == "unknown"
    assert "torch" not in {h.change for h in hints(CALL, newest) if h.kind == "upgrade"}


def test_a_version_that_is_too_old_to_be_known_is_upgraded():
    old = H100.with_versions({"torch": "2.11.0", "flash-attn": "2.1.0"})
    call = CALL.with_(mask=(CausalNode(),))
    (hint,) = [h for h in hints(call, old) if h.change == "flash-attn"]
    assert (hint.kind, hint.allows) == ("upgrade", "fa2")
    assert contains(load().backends["fa2"].versions_known["flash-attn"], "flash-attn", hint.version)


def test_what_only_makes_a_backend_slow_is_lifted_too(tmp_path):
    slow = rows('torch = "<2.13"').replace("because", 'kind = "slow"\nrecheck_after = 2099-01-01\nbecause')
    found = hints(CALL, tables=overlay(tmp_path, slow, name="cudnn"))
    assert decide(CALL, H100, policy=Policy(tables=tmp_path)).selected == "flash"
    (hint,) = [h for h in found if h.kind == "upgrade" and h.selects == "cudnn"]
    assert said(hint) == ("torch", "2.13", "2.16", "cudnn", None)


def test_two_packages_are_hinted_together():
    call = CALL.with_(seqlen_q=16384, seqlen_kv=16384, mask=(CausalNode(),))
    (hint,) = [h for h in hints(call) if h.selects == "fa4"]
    assert (hint.kind, hint.change) == ("install", "flash-attn-4")
    ((name, version, _),) = hint.also
    assert name == "nvidia-cutlass-dsl"
    both = H100.with_versions({"flash-attn-4": hint.version, name: version})
    assert decide(call, both).selected == "fa4"
    newest = H100.with_versions({"flash-attn-4": "4.0.0b36", name: version})
    assert decide(call, newest).verdict("fa4").status == "eligible"


def test_each_of_several_alternatives_is_a_hint_of_its_own():
    call = CALL.with_(seqlen_q=4096, seqlen_kv=4096, mask=(CausalNode(),))
    found = [h for h in hints(call) if h.selects == "fa3"]
    assert [h.change for h in found] == ["flash-attn-3", "xformers"]
    assert {h.also for h in found} == {()}


def test_what_is_broken_is_not_hinted_to_be_installed():
    call = CALL.with_(seqlen_q=4096, seqlen_kv=4096, mask=(CausalNode(),))
    broken = H100.model_copy(update={"broken": {"flash-attn-3": "no kernels", "flash-attn-4": "replaced"}})
    assert [h.change for h in hints(call, broken) if h.kind == "install"] == ["xformers"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("versions", [{}, {"flash-attn-4": "4.0.0b5", "nvidia-cutlass-dsl": "4.4.2"}])
def test_hints_ask_a_bounded_number_of_questions(arch, versions, monkeypatch):
    asked = {"select": 0, "Judgement": 0}

    def count(module, name):
        function = getattr(module, name)

        def ask(*args, **kwargs):
            asked[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, ask)

    count(what_if, "select")
    count(other_versions, "Judgement")
    host = Host(arch=arch, versions={**H100.versions, **versions})
    for call in (CALL.with_(mask=(CausalNode(),)), CALL.with_(head_dim_qk=512, head_dim_v=512)):
        asked.update(select=0, Judgement=0)
        what_if.hints(select(call, host, load(), Policy()))
        assert asked["select"] <= what_if.MOST_ASKED
        # One verdict costs a tenth of a decision.
        assert asked["Judgement"] <= 150


def test_without_advice_there_are_no_hints():
    assert decide(CALL.with_(mask=(DENSE,)), H100).hints == ()
