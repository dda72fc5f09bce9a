"""Predicted times: they grow with the work, scale with the card, and say where they come from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnroute.engine.costs import cost_of, rates_of, repairing_ms
from attnroute.engine.decide import decide
from attnroute.engine.evaluate import Form, prepared
from attnroute.engine.rounding import rounded
from attnroute.engine.select import Judgement
from attnroute.engine.work import steps_of, work_of
from attnroute.executors.chunked.plan import ACCELERATOR, Geometry, Limits, make_plan
from attnroute.question.host import Host
from attnroute.question.line import parse
from attnroute.question.normalize import normalize
from attnroute.question.policy import Policy
from attnroute.tables.cards import peak_of
from attnroute.tables.costs import costs_of
from attnroute.tables.load import load
from benchmarks import fit_costs, fit_kernels, recorded
from benchmarks.fit_hosts import Sample, hosts_of
from benchmarks.fit_repairs import Repaired, Repairing, refitted, start

TABLES = load()
H200 = Host(arch="sm_90", device_name="NVIDIA H200", versions=recorded.records()[0].host.versions)
TAKEN = {"cudnn": 20, "flash": 30, "fa3": 100}
MEASURED = [b for b in TABLES.backends if costs_of(TABLES, "sm_90", b) is not None]


def predicted(backend, line, host=H200):
    judgement = Judgement(prepared(TABLES, host)[backend], Form(normalize(parse(line))), Policy())
    stages, costs = judgement.stages, costs_of(TABLES, host.arch, backend)
    final = stages.evaluations[-1].form.call
    return cost_of(judgement.form.call, final, stages.repairs, stages.sizes, costs, peak_of(TABLES, host))


def work(line):
    call = normalize(parse(line))
    return work_of(call, call, (), ())


@pytest.mark.parametrize("backend", MEASURED)
@pytest.mark.parametrize("phase", ["", " train"])
@given(
    batch=st.sampled_from([1, 3, 16]),
    seqlen=st.integers(1, 20000),
    width=st.sampled_from([32, 64, 80, 128, 256]),
    mask=st.sampled_from(["", " causal", " window=127,0", " documents=x4"]),
)
def test_times_are_positive_and_finite(backend, phase, batch, seqlen, width, mask):
    line = f"bf16 b{batch} hq8 hkv2 sq{seqlen} skv{seqlen} d{width}{mask}{phase}"
    cost = predicted(backend, line)
    if cost is not None:
        assert 0 < cost.device_ms < math.inf
        assert 0 < cost.host_ms < math.inf
        assert cost.kind == "measured"
        assert "H200" in cost.source


@pytest.mark.parametrize("backend", MEASURED)
def test_twice_the_batch_of_a_large_call_takes_about_twice_as_long(backend):
    one, two = (predicted(backend, f"bf16 b{b} hq32 hkv8 sq4096 skv4096 d128 causal") for b in (4, 8))
    assert 1.8 < two.device_ms / one.device_ms < 2.1


@pytest.mark.parametrize("backend", ["fa3", "fa4", "flash", "flex"])
def test_a_narrow_window_takes_a_fraction_of_causal(backend):
    causal, window = (
        predicted(backend, f"bf16 b1 hq32 hkv8 sq16384 skv16384 d128 {mask}")
        for mask in ("causal", "window=127,0")
    )
    assert window.device_ms < 0.2 * causal.device_ms


def test_a_mask_that_is_built_costs_what_it_writes_and_reads():
    plain, masked = (
        predicted("cudnn", f"bf16 b1 hq8 hkv8 sq8192 skv8192 d128{mask}") for mask in ("", " prefix")
    )
    assert masked.device_ms > 1.3 * plain.device_ms


def test_each_repair_takes_its_bytes_at_its_own_rate():
    call = normalize(parse("bf16 b4 hq32 hkv32 sq1 skv4096 d128"))
    table, peak = costs_of(TABLES, "sm_90", "efficient").table, peak_of(TABLES, H200)
    rates = table.forward_few.repair_gbs
    assert rates["materialize_mask"] > 2 * rates["expand_kv"]
    for repair in ("expand_kv", "materialize_mask", "recognize_mask"):
        done = work_of(call, call, (repair,), (2**30,))
        assert done.repair_bytes == {repair: 2**30}
        took = repairing_ms(done, rates_of(table.forward_few, done, table.peak, peak).repair_gbs)
        assert took == pytest.approx(2**30 / rates[repair] / 1e6 if repair in rates else 0.0)


def test_what_repairs_take_is_found_from_calls_of_all_backends():
    known = Repairing({"expand_kv": 900.0, "to_varlen": 400.0}, 5.0)
    sizes = [("expand_kv", 2**28), ("expand_kv", 2**30), ("to_varlen", 2**28), ("to_varlen", 2**29)] * 3
    calls = [
        Repaired(rest, {name: size}, 1, rest + size / known.gbs[name] / 1e6 + known.us / 1e3, 1.0)
        for rest, (name, size) in zip([0.02, 0.1, 0.5] * 4, sizes, strict=True)
    ]
    found = refitted(calls, start(known.gbs), fit_kernels.softened, fit_kernels.minimized)
    assert found.gbs == pytest.approx(known.gbs, rel=0.05)


def test_what_a_call_took_longer_on_all_backends_is_half_taken_out():
    done = work("bf16 b1 hq8 hkv8 sq64 skv64 d64")
    keys = [(backend, "forward") for backend in TAKEN]
    points = {key: [fit_kernels.Point(done, 1.0, True, name, 1.0) for name in "ab"] for key in keys}
    errors = {key: [math.log(0.25), own] for key, own in zip(keys, (0.0, 0.1, -0.1), strict=True)}
    fits = {key: fit_kernels.Fitted({}, 2, 0, 0, (0, ""), [], errors[key]) for key in keys}
    paces = [[point.pace for point in its] for its in fit_costs.paced(points, fits).values()]
    assert paces == [[pytest.approx(2.0), 1.0]] * 3


def test_documents_of_a_known_number_end_anywhere():
    line = "bf16 b1 hq8 hkv8 sq16384 skv16384 d128 thd causal documents="
    even, unknown = work(f"{line}4096,4096,4096,4096"), work(f"{line}x4")
    assert 1.5 < unknown.flops / even.flops < 2
    assert unknown.keys > 2 * even.keys
    assert unknown.bytes == even.bytes


def test_the_backward_of_chunked_takes_what_it_takes_there():
    line = "bf16 b1 hq16 hkv8 sq8192 skv8192 d512 causal train"
    costs, chunked = (costs_of(TABLES, "sm_90", backend) for backend in ("cudnn_fe", "chunked"))
    assert costs.composed == chunked.table.backward
    judgement = Judgement(prepared(TABLES, H200)["cudnn_fe"], Form(normalize(parse(line))), Policy())
    assert "backward_from_chunked" in judgement.repairs
    assert judgement.cost.device_ms > 0
    call, final = judgement.form.call, judgement.final.form.call
    alone = costs._replace(composed=None)
    assert (
        cost_of(call, final, judgement.repairs, judgement.stages.sizes, alone, peak_of(TABLES, H200)) is None
    )


def test_a_bias_is_read_where_the_kernel_goes():
    line = "bf16 b1 hq8 hkv8 sq8192 skv8192 d128 bias=bf16:1x8x8192x8192"
    full, causal, window = (work(line + mask) for mask in ("", " causal", " window=127,0"))
    assert 0.5 < causal.mask_bytes / full.mask_bytes < 0.52
    assert window.mask_bytes < 0.04 * full.mask_bytes


def test_rounded_lengths_stay_on_their_side_of_a_few():
    assert [work(f"bf16 b1 hq8 hkv8 sq{n} skv1024 d64").is_few for n in (1, 16, 17, 18)] == [1, 1, 0, 0]
    assert [rounded(n) for n in (16, 17, 18, 19, 22)] == [16, 20, 20, 20, 24]


def test_the_pace_of_the_machine_is_taken_out():
    def sample(record, us, repairs=()):
        return Sample(record, "inference", repairs, frozenset(), 0.0, us)

    slow = {"a": 1.0, "b": 3.0, "c": 0.5, "d": 1.0, "e": 1.0}
    plain = {backend: [sample(r, us * pace) for r, pace in slow.items()] for backend, us in TAKEN.items()}
    repaired = [sample(r, 60 * pace, ("cast_mask",)) for r, pace in slow.items()]
    found = hosts_of({**plain, "cudnn": [*plain["cudnn"], *repaired], "flash": plain["flash"][:4]})
    assert {name: times["inference"]["call_us"] for name, times in found.items()} == TAKEN
    assert found["cudnn"]["inference"]["adding_us"] == {"cast_mask": 40}


@pytest.mark.parametrize(("weight", "us"), [(0.001, 20), (30.0, 900)])
def test_a_host_time_that_the_device_hides_says_less(weight, us):
    def sample(record, us, weight=1.0):
        return Sample(record, "inference", (), frozenset(), 0.0, us, None, weight)

    others = {name: [sample(r, TAKEN[name]) for r in "abcdefgh"] for name in ("flash", "fa3")}
    hidden = [sample(r, 900, weight) for r in "cdefgh"]
    found = hosts_of({**others, "cudnn": [sample("a", 20), sample("b", 20), *hidden]})
    assert found["cudnn"]["inference"]["call_us"] == us


def test_padding_spares_a_part_of_the_keys():
    plain, padded = (
        work("bf16 b4 hq8 hkv8 sq1024 skv1024 d64"),
        work("bf16 b4 hq8 hkv8 sq1024 skv1024 d64 keys"),
    )
    assert padded.flops == 0.75 * plain.flops


@pytest.mark.parametrize("line", ["bf16 b0 hq8 hkv8 sq64 skv64 d64", "bf16 b1 hq8 hkv8 sq64 skv64 d1000"])
def test_nothing_is_said_of_calls_without_work_or_of_larger_heads(line):
    assert work(line) is None


def test_a_card_with_a_quarter_of_the_rate_takes_about_four_times_as_long():
    line = "bf16 b2 hq32 hkv32 sq8192 skv8192 d128"
    slow = H200.model_copy(update={"device_name": "NVIDIA H20"})
    ratio = predicted("fa3", line, slow).device_ms / predicted("fa3", line).device_ms
    peaks = [peak_of(TABLES, host).tflops for host in (H200, slow)]
    assert ratio == pytest.approx(peaks[0] / peaks[1], rel=0.2)


def test_costs_of_another_architecture_are_inferred():
    a100 = Host(arch="sm_80", device_name="NVIDIA A100-SXM4-80GB", versions=H200.versions)
    cost = predicted("flash", "bf16 b2 hq32 hkv32 sq4096 skv4096 d128", a100)
    assert cost.kind == "inferred"
    assert cost.device_ms > predicted("flash", "bf16 b2 hq32 hkv32 sq4096 skv4096 d128").device_ms


def test_the_files_are_what_is_fitted():
    for backend, text, _ in fit_costs.tables():
        path = TABLES.folders[0] / "sm_90" / "costs" / f"{backend}.toml"
        assert fit_costs.is_like(path.read_text(encoding="utf-8"), text), (
            f"run benchmarks.fit_costs: {backend}"
        )


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("bf16 b1 hq8 sq128 d64", 1),
        ("bf16 b8 hq16 sq729 d72", 2),
        ("bf16 b1 hq24 sq16384 d128", 96),
        ("bf16 b1 hq8 sq4096 d320 causal", 4),
        ("bf16 b1 hq32 sq16384 d128 causal", 128),
        ("bf16 b4 hq8 sq64 skv4096 d128 causal=bottom_right", 1),
    ],
)
def test_steps_are_about_those_of_chunked(line, steps):
    call = normalize(parse(line))
    band = Limits(None, call.seqlen_kv - call.seqlen_q + 1) if call.mask else Limits()
    group = call.num_heads_q // call.num_heads_kv
    shape = Geometry(call.batch, call.num_heads_kv, group, call.seqlen_q, call.seqlen_kv)
    plan = make_plan(shape, band, ACCELERATOR)
    assert len(plan.chunks) * len(plan.blocks) == steps == steps_of(call)


def test_a_step_costs_the_host_what_its_launches_take():
    short, long = (parse(f"bf16 b1 hq8 sq{length} d320 causal") for length in (512, 8192))
    found = [decide(call, H200).verdict("chunked").prediction.host_ms for call in (short, long)]
    per_step = costs_of(TABLES, "sm_90", "chunked").table.host["inference"].step_us / 1e3
    assert found[1] - found[0] == pytest.approx(per_step * (steps_of(long) - steps_of(short)))
