"""What a decision asks about lengths: where the answers stay, so does what runs, and few part lengths."""

from __future__ import annotations

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from support.open_lengths import graph_of, graphs_for
from support.strategies import calls, hosts

from attnroute.engine.decide import decide
from attnroute.engine.dependence import OPEN, open_rows
from attnroute.question import fits
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.load import load

TORCHS = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "triton": "3.6.0"}
EVERYTHING = {
    **TORCHS,
    "flash-attn": "2.8.3",
    "flash-attn-4": "4.0.0b36",
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "xformers": "0.0.34",
}
ARCHS = tuple(arch for arch in load().arch_names if arch != "cpu")
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Making a call smaller decides it hundreds of times, which takes minutes."""
LENGTHS = (2, 3, 63, 64, 100, 127, 128, 129, 192, 256, 320, 704, 1024, 1088, 2000, 4096, 8192, 16384, 65536)
LINES = (
    "bf16 b2 hq4 hkv2 sq130 d64 causal",
    "bf16 b1 hq32 hkv8 sq130 d128 causal",
    "bf16 b2 hq4 sq130 d64",
    "bf16 b2 hq8 hkv2 sq130 d72 causal",
    "bf16 b2 hq8 hkv2 sq130 d256",
    "bf16 b2 hq8 hkv2 sq130 d192/128 causal",
    "bf16 b2 hq8 hkv4 sq130 d320 causal",
    "bf16 b1 hq8 hkv4 sq130 d512 causal",
    "bf16 b2 hq4 hkv2 sq130 d64 window=1,0",
    "bf16 b2 hq4 hkv2 sq130 d64 documents",
    "bf16 b2 hq4 hkv2 sq130 d64 keys causal",
    "bf16 b2 hq4 hkv2 sq130 d64 causal=bottom_right",
    "bf16 b2 hq4 hkv2 sq130 d64 any(causal|prefix)",
    "bf16 b2 hq4 hkv2 sq130 d64 causal softcap=20.0",
    "bf16 b2 hq4 hkv2 sq130 d64 causal sink",
    "fp32 b2 hq4 hkv2 sq130 d64 causal",
)


def what_runs(decision):
    """Return what a graph has of a decision."""
    if decision.selected is None:
        return None
    verdict = decision.verdict(decision.selected)
    return verdict.backend, verdict.repairs, verdict.options


def masked_alike(call, other):
    """A window or a prefix that reaches past the lengths is dropped, which the lowering of the mask asks."""
    kinds = [tuple(n.kind for n in normalize(c).mask) for c in (call, other)]
    return kinds[0] == kinds[1]


def host(arch, versions):
    return Host(arch=arch, versions=versions)


@pytest.mark.usefixtures("unmeasured")
@settings(max_examples=80, deadline=None, phases=NO_SHRINK)
@given(
    st.sampled_from(LINES),
    st.sampled_from(["", " train"]),
    st.sampled_from(ARCHS),
    st.sampled_from([TORCHS, EVERYTHING]),
    st.sampled_from([1, 2, 64]),
    st.tuples(*[st.sampled_from(LENGTHS)] * 4),
)
def test_where_the_answers_stay_the_same_runs(line, phase, arch, versions, batch, lengths):
    tables, machine = load(), host(arch, versions)
    # Documents have as many queries as keys.
    pairs = [(n, n) for n in lengths[::2]] if "documents" in line else (lengths[:2], lengths[2:])
    first, second = (sorted(pair) for pair in pairs)
    call = parse(line + phase).with_(seqlen_q=first[0], seqlen_kv=first[1])
    graph = graph_of(call, machine, tables)
    sizes = (batch, *second)
    other = call.with_(batch=batch, seqlen_q=second[0], seqlen_kv=second[1])
    if graph.decision.selected is not None and masked_alike(call, other) and graph.holds(sizes):
        assert what_runs(decide(other, machine, tables)) == what_runs(graph.decision)


@pytest.mark.usefixtures("unmeasured")
@settings(max_examples=60, deadline=None, phases=NO_SHRINK)
@given(calls(), hosts(), st.sampled_from([2, 64]), st.sampled_from(LENGTHS), st.booleans())
def test_the_same_holds_for_any_call(call, machine, batch, length, longer):
    assume(min(call.seqlen_q, call.seqlen_kv, call.batch) > 1 and call.seqlen_q <= call.seqlen_kv)
    tables = load()
    try:
        other = call.with_(batch=batch, seqlen_q=length, seqlen_kv=length * (1 + longer))
        fits.check(other)
    except ValueError:
        return
    assume(masked_alike(call, other))
    graph = graph_of(call, machine, tables)
    if graph.decision.selected is not None and graph.holds((batch, length, length * (1 + longer))):
        assert what_runs(decide(other, machine, tables)) == what_runs(graph.decision)


@settings(max_examples=60, deadline=None, phases=NO_SHRINK)
@given(
    st.sampled_from(LINES),
    st.sampled_from(["", " train"]),
    st.sampled_from([TORCHS, EVERYTHING]),
    st.sampled_from(LENGTHS),
    st.sampled_from(LENGTHS),
)
def test_what_was_fastest_at_the_traced_lengths_may_run_wherever_the_answers_hold(
    line, phase, versions, first, second
):
    """Times are no guards: at other lengths another one may be faster, and this one is as right."""
    tables, machine = load(), host("sm_90", versions)
    call = parse(line + phase).with_(seqlen_q=first, seqlen_kv=first)
    graph, other = graph_of(call, machine, tables), call.with_(seqlen_q=second, seqlen_kv=second)
    if masked_alike(call, other) and graph.holds((call.batch, second, second)):
        backend, repairs, options = what_runs(graph.decision)
        found = decide(other, machine, tables)
        verdict = found.verdict(backend)
        assert backend in found.order
        assert (verdict.repairs, verdict.options) == (repairs, options)


@pytest.mark.parametrize("versions", [TORCHS, EVERYTHING], ids=["torch", "everything"])
@pytest.mark.parametrize("phase", ["", " train"], ids=["inference", "training"])
@pytest.mark.parametrize("line", LINES)
def test_few_graphs_serve_many_lengths(line, phase, versions):
    """dynamo gives up at eight graphs of one function; a length that no row asks about needs none."""
    tables = load()
    sizes = [(2, n, n) for n in range(130, 8192, 170)]
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        graphs = graphs_for(parse(line + phase), sizes, host(arch, versions), tables)
        chosen = [graph.decision.selected for graph in graphs]
        assert len(graphs) <= 3, f"{arch}: {chosen}"


def test_a_backend_behind_the_selected_one_is_not_asked():
    """cuDNN's rows ask about lengths modulo 128; where flash runs, they cannot change that."""
    machine, tables = host("sm_90", TORCHS), load()
    call = normalize(parse("bf16 b2 hq4 hkv2 sq130 d64 window=100,0 train"))
    decision = decide(call, machine, tables)
    assert decision.selected == "flash"
    read = {field for field, _ in _conditions(open_rows(decision, tables, OPEN))}
    assert not read & {"seqlen_q_mod_128", "seqlen_kv_mod_128"}


@pytest.mark.usefixtures("unmeasured")
def test_only_a_preference_that_could_put_another_backend_first_is_asked():
    """Short calls go to cudnn, which is first anyway where nothing but torch is installed."""
    call = normalize(parse("bf16 b2 hq32 sq8192 d128"))
    for versions, selected in ((TORCHS, "cudnn"), (EVERYTHING, "fa4")):
        decision = decide(call, host("sm_90", versions), load())
        assert decision.selected == selected
        read = {field for field, _ in _conditions(open_rows(decision, load(), OPEN))}
        assert ("score_elements" in read) is (selected == "fa4")


def test_a_backend_that_is_preferred_or_required_is_asked_alone():
    machine, tables = host("sm_90", EVERYTHING), load()
    call = normalize(parse("bf16 b2 hq4 sq130 d64 train"))
    for policy in (Policy(require="cudnn"), Policy(prefer=("cudnn",))):
        decision = decide(call, machine, tables, policy)
        assert decision.selected == "cudnn"
        read = {field for field, _ in _conditions(open_rows(decision, tables, OPEN))}
        assert "seqlen_kv_mod_128" in read
        assert "score_elements" not in read


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "policy",
    [
        Policy(ban=("cudnn",)),
        Policy(allow=("flash", "efficient")),
        Policy(require="flash"),
        Policy(failed=(("cudnn", "it said no"),)),
    ],
    ids=["banned", "not allowed", "not required", "failed"],
)
def test_a_backend_that_policy_excludes_is_not_asked(policy):
    """On its own cuDNN comes first here and asks about lengths modulo 128."""
    machine, tables = host("sm_90", TORCHS), load()
    call = normalize(parse("bf16 b2 hq4 sq130 d64 train"))
    decision = decide(call, machine, tables, policy)
    assert decision.selected == "flash"
    read = {field for field, _ in _conditions(open_rows(decision, tables, OPEN))}
    assert not read & {"seqlen_q_mod_128", "seqlen_kv_mod_128"}


def _conditions(rows):
    boxes = (box for row in rows for box in (*row.when, *row.requires))
    return {(field, str(spec)) for box in boxes for field, spec in box.conditions}


def test_a_call_that_runs_in_pieces_holds_for_its_own_sizes():
    """What a piece may be is asked of the piece: at larger sizes it may be too large for the kernel."""
    call = parse("bf16 b2 hq160000 hkv40000 sq64 skv64 d128 train")
    graph = graph_of(call, host("sm_90", TORCHS), load())
    assert "split_heads" in graph.decision.verdict("flash").repairs
    assert graph.holds((2, 64, 64))
    assert not graph.holds((64, 2000, 2000))
