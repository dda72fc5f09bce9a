"""How predicted times order the backends that may run, and what stays in front of time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.costs import SOURCE, by_name, by_size, predicting
from support.strategies import calls, hosts

from attnroute.engine.classes import class_of
from attnroute.engine.decide import decide
from attnroute.engine.decision import Decision
from attnroute.engine.rounding import rounded, rounded_call, rounded_down
from attnroute.question.call import Context
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.policy import Policy
from attnroute.tables.load import load

BACKENDS = tuple(load().backends)
VERSIONS = {
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": "9.19.0",
    "triton": "3.6.0",
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.1",
}
H200 = Host(arch="sm_90", device_name="NVIDIA H200", versions=VERSIONS)
CAUSAL = parse("bf16 b2 hq32 hkv8 sq4096 d128 causal")
TIMES = st.dictionaries(st.sampled_from(BACKENDS), st.sampled_from([0.1, 0.2, 0.3, 5.0]), max_size=8)


def decided(times, call=CAUSAL, host=H200, policy=None):
    function = times if callable(times) else by_name(times)
    with predicting(function) as tables:
        return decide(call, host, tables, policy)


def preferred(call=CAUSAL, host=H200, policy=None):
    """The order that preferences alone make."""
    return decided({}, call, host, policy).order


def test_the_fastest_is_selected_whatever_preferences_say():
    before = preferred()
    order = decided({name: float(place) for place, name in enumerate(before[::-1])}).order
    assert order[:-1] == before[:-1][::-1]
    assert order[-1] == before[-1] == "math"


def test_what_has_no_time_keeps_its_place_among_the_others():
    before = preferred()
    first, second, third, fourth = before[:4]
    order = decided({first: 3.0, third: 2.0, fourth: 1.0}).order
    assert order == (fourth, second, third, first, *before[4:])


def test_times_of_another_architecture_are_shown_and_order_nothing():
    with predicting(by_name({"flash": 0.1, "cudnn": 0.2}), kind="inferred") as tables:
        found = decide(CAUSAL, H200, tables)
    assert (found.order, found.why_this_order) == (preferred(), decided({}).why_this_order)
    assert found.verdict("flash").predicted_ms == 0.1
    assert found.verdict("flash").prediction.kind == "inferred"


def test_equal_times_stay_as_preferences_have_them():
    assert decided(dict.fromkeys(["flash", "cudnn", "efficient"], 1.0)).order == preferred()


def test_the_larger_of_host_and_device_counts_and_in_a_cuda_graph_the_device():
    times = {"cudnn": (0.3, 0.05), "flash": (0.1, 0.4)}
    found = decided(lambda backend, *_: times.get(backend))
    assert found.order.index("cudnn") < found.order.index("flash")
    assert (found.verdict("flash").predicted_ms, found.verdict("cudnn").predicted_ms) == (0.4, 0.3)
    captured = decided(lambda backend, *_: times.get(backend), CAUSAL.with_(context=Context(cuda_graph=True)))
    assert captured.order.index("flash") < captured.order.index("cudnn")
    assert captured.verdict("flash").predicted_ms == 0.1


def with_versions(**changes):
    return H200.with_versions({name.replace("_", "-"): version for name, version in changes.items()})


def test_a_row_of_kind_slow_counts_only_without_a_time():
    call, host = parse("bf16 b1 hq8 sq4096 d512/256"), with_versions(nvidia_cudnn_frontend="1.32.0")
    others = set(BACKENDS) - {"cudnn_fe"}
    assert decided({}, call, host).verdict("cudnn_fe").is_slow
    assert decided(dict.fromkeys(others, 1.0), call, host).order.index("cudnn_fe") > 0
    assert decided({"cudnn_fe": 0.1, **dict.fromkeys(others, 1.0)}, call, host).selected == "cudnn_fe"


def test_of_versions_that_a_row_says_are_slow_no_time_is_predicted():
    call = parse("bf16 b1 hq8 sq4096 d256 causal train")
    times = {"fa4": 0.1, **dict.fromkeys(set(BACKENDS) - {"fa4"}, 1.0)}
    assert decided(times, call).selected == "fa4"
    before = decided(times, call, with_versions(flash_attn_4="4.0.0b30"))
    assert (before.verdict("fa4").status, before.verdict("fa4").predicted_ms) == ("eligible", None)
    assert before.selected != "fa4"


def test_compilation_is_shared_by_the_calls_that_are_expected():
    times = {"flex": 0.1, "cudnn": 0.2}
    allow = {"allow": None, "ban": tuple(set(BACKENDS) - {"flex", "cudnn"})}
    assert decided(times, policy=Policy(**allow)).order == ("flex", "cudnn")
    assert decided(times, policy=Policy(**allow, expected_calls=1000)).order == ("cudnn", "flex")


def test_the_order_says_where_its_times_come_from_and_what_placed_the_rest():
    before = preferred()
    every = decided(dict.fromkeys(BACKENDS, 1.0))
    assert every.why_this_order == f"predicted times, measured on {SOURCE}"
    some = decided(dict.fromkeys(before[:2], 1.0)).why_this_order
    assert some.startswith(f"predicted times, measured on {SOURCE}; for the rest sm_90/arch/")
    assert decided({before[0]: 1.0}).why_this_order == decided({}).why_this_order


def test_a_verdict_has_the_prediction_at_the_exact_lengths():
    def times(_backend, final, *_):
        return (final.seqlen_kv / 1000, 0.0)

    found = decided(times, parse("bf16 b1 hq8 sq1 skv4097 d128")).verdict("flash")
    assert (found.predicted_ms, found.prediction.kind, found.prediction.source) == (4.097, "measured", SOURCE)


def test_repairs_and_their_bytes_are_part_of_what_is_predicted():
    asked = {}

    def times(backend, final, repairs, sizes):
        asked.setdefault(backend, []).append((final, repairs, sizes))
        return (1.0, 0.0)

    found = decided(times, parse("bf16 b1 hq8 sq4000 d128 window=255,0"))
    verdict = found.verdict("cudnn")
    made = ("materialize_mask", "cast_mask")
    about, exact = asked["cudnn"]
    assert exact[1:] == (made, (4000 * 4000, 2 * 4000 * 4000))
    assert (verdict.repairs, verdict.extra_bytes) == (made, 3 * 4000 * 4000)
    assert about[1:] == (made, (4096 * 4096, 2 * 4096 * 4096))
    assert about[0].bias.shape == (1, 1, 4096, 4096)


def test_a_mask_counts_by_its_time_unless_it_takes_more_memory_than_the_call():
    fast = {"cudnn": 0.1, **dict.fromkeys(set(BACKENDS) - {"cudnn"}, 1.0)}
    few, many = (parse(f"bf16 b1 hq{heads} sq4096 d128 window=255,0") for heads in (8, 32))
    small, large = decided(fast, many), decided(fast, few)
    assert (small.selected, small.verdict("cudnn").quadratic_bytes) == ("cudnn", 3 * 4096 * 4096)
    assert small.verdict("cudnn").quadratic_bytes == large.verdict("cudnn").quadratic_bytes
    builds = [large.verdict(backend).quadratic_bytes > 0 for backend in large.order]
    assert builds == sorted(builds)


@given(calls(), hosts(), TIMES, st.booleans(), st.permutations(BACKENDS))
@settings(max_examples=80)
def test_times_never_decide_who_may_run(call, host, times, allow_unknown, names):
    policy = Policy(allow_unknown=allow_unknown, prefer=tuple(names[:1]))
    found, without = decided(times, call, host, policy), decided({}, call, host, policy)
    assert set(found.order) == set(without.order)
    tiers = [
        (
            backend not in policy.prefer,
            found.verdict(backend).status != "eligible",
            backend in load().slow_tier,
        )
        for backend in found.order
    ]
    assert tiers == sorted(tiers)
    assert Decision.model_validate_json(found.model_dump_json()) == found


@given(calls(), hosts(), TIMES, st.sampled_from(BACKENDS))
@settings(max_examples=80)
def test_a_faster_time_never_puts_a_backend_further_back(call, host, times, backend):
    before, after = (
        decided({**times, backend: 1.0}, call, host),
        decided({**times, backend: 0.05}, call, host),
    )
    assert set(before.order) == set(after.order)
    if backend in before.order:
        assert after.order.index(backend) <= before.order.index(backend)


@given(st.integers(0, 2**20))
def test_rounding_keeps_the_order_of_lengths_and_stays_near(number):
    near, below = rounded(number), rounded_down(number)
    assert below <= number
    assert abs(near - number) * 8 <= number
    assert near <= rounded(number + 1)
    assert rounded(near) == near


def test_a_decoding_loop_decides_some_tens_of_times():
    call = parse("bf16 b4 hq32 hkv8 sq1 skv1 d128")
    with predicting(by_size) as tables:
        classes = {class_of(call.changed(seqlen_kv=n), "sm_90", tables) for n in range(1, 8193)}
    assert 40 < len(classes) < 100


def test_lengths_inside_of_a_mask_are_rounded_with_those_of_the_call():
    line = "bf16 b2 hq8 sq4000 d128 dense=1x1x4000x4000:recognized=(causal+keys=3999,17) documents=3000,1000"
    found = rounded_call(parse(line))
    assert (found.seqlen_q, found.seqlen_kv) == (4096, 4096)
    dense, documents = found.mask
    assert dense.shape == (1, 1, 4096, 4096)
    assert dense.recognized[1].lengths is None
    assert (documents.lengths, documents.count) == (None, 2)


def test_times_of_16_bit_numbers_say_nothing_of_float32():
    for line, is_timed in (("bf16 b2 hq8 sq1024 d64", True), ("fp32 b2 hq8 sq1024 d64", False)):
        assert (decide(parse(line), H200).verdict("flex").predicted_ms is not None) is is_timed
