"""Ragged batches and padding on a CUDA device: FLASH takes them as they are, and every gradient is written.

Before each run the memory that it will get is filled with NaN, so that what a kernel leaves out shows.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.cuda_problems import (
    TOLERANCE,
    apart,
    band,
    compare_gradients,
    packed,
    problem,
    spoil_memory,
    sums_of,
)
from support.kernel_names import backend_seen, names_of
from support.reference import attend, error

import attnroute
from attnroute import masks

pytestmark = pytest.mark.gpu


def check(run, trained, want, want_lse, *, backend="flash", cotangent_of=lambda t: t):
    """Hold output, log-sum-exp and gradients of a run against float64, and say what ran.

    Args:
        run: Returns output and log-sum-exp as the caller gets them.
        trained: Query, key and value; gradients are compared where they require one.
        want: The output in float64, with its history.
        want_lse: The log-sum-exp in float64, -inf where a query has no key.
        backend: What must have run, None for anything.
        cotangent_of: Turns a tensor of the reference's shape into one of the output's.
    """
    train = trained[0].requires_grad
    cotangent = torch.randn_like(want)

    def both():
        spoil_memory()
        out, lse = run()
        if not train:
            return out, lse, ()
        return out, lse, torch.autograd.grad(out, trained, cotangent_of(cotangent).to(out.dtype))

    both()
    (out, lse, grads), on_device, names = names_of(both)
    assert backend is None or backend_seen(on_device, names) == {backend}, sorted(on_device)
    tolerance = TOLERANCE[out.dtype]
    assert error(out, cotangent_of(want)) <= tolerance
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    finite = want_lse > -math.inf
    empty = (want == 0).all(-1)
    if finite.any():
        assert (lse.double() - want_lse)[finite].abs().max() < 1e-3
    if train:
        compare_gradients(grads, torch.autograd.grad(want, trained, cotangent), empty, tolerance)


BANDS = {
    "everything": {},
    "causal": {"is_causal": True},
    "window": {"window": (20, 0)},
    "both sides": {"window": (20, 7)},
    "left open": {"window": (None, 9)},
    "right open": {"window": (9, None)},
    "wide": {"window": (70, 150)},
}


def sides(arguments):
    return (None, 0) if "is_causal" in arguments else arguments.get("window", (None, None))


def check_packed(inputs, lengths_q, lengths_kv, arguments, *, given=None, alignment="bottom_right", **rest):
    sums = {"cu_seqlens_q": sums_of(lengths_q)}
    if lengths_kv is not lengths_q:
        sums["cu_seqlens_kv"] = sums_of(lengths_kv)
        if arguments:
            arguments = {**arguments, "causal_alignment": alignment}
    want, want_lse = apart(inputs, lengths_q, lengths_kv, *sides(arguments), alignment)
    backend = rest.setdefault("backend", "flash")
    given = {"layout": "thd", **sums, **(given or {}), **arguments}

    def run():
        return attnroute.attention(*inputs, **given, return_lse=True, backend=backend)

    decision = attnroute.explain(*inputs, **given, return_lse=True, backend=backend)
    assert decision.selected is not None, str(decision)
    check(run, inputs, want, want_lse, backend=backend)
    return decision


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("arguments", BANDS.values(), ids=BANDS)
def test_self_attention_of_sequences(arguments, heads):
    lengths = [50, 1, 0, 279, 0, 128]
    inputs = packed(lengths, lengths, heads=heads)
    decision = check_packed(inputs, lengths, lengths, arguments)
    assert decision.verdict("flash").repairs == ("to_varlen",)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("arguments", BANDS.values(), ids=BANDS)
def test_cross_attention_of_sequences(arguments, heads):
    """Among them more queries than keys, queries without keys, keys without queries, and nothing at all."""
    lengths_q, lengths_kv = [200, 3, 70, 0, 0, 150, 1], [60, 290, 0, 40, 0, 150, 77]
    inputs = packed(lengths_q, lengths_kv, heads=heads)
    check_packed(inputs, lengths_q, lengths_kv, arguments)


@pytest.mark.parametrize("arguments", [BANDS["causal"], BANDS["right open"]])
def test_equal_totals_are_no_equal_lengths(arguments):
    lengths_q, lengths_kv = [100, 30, 70], [30, 70, 100]
    check_packed(packed(lengths_q, lengths_kv), lengths_q, lengths_kv, arguments)


@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_of_the_lengths_change_nothing(dtype, head_dim):
    lengths_q, lengths_kv = [130, 0, 64], [64, 130, 7]
    inputs = packed(lengths_q, lengths_kv, dtype=dtype, head_dim=head_dim)
    given = {"max_seqlen_q": 130, "max_seqlen_kv": 131}
    check_packed(inputs, lengths_q, lengths_kv, BANDS["causal"], given=given)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("lengths_q", [[1, 1, 1, 1], [1, 0, 1, 1]])
@pytest.mark.parametrize("arguments", [BANDS["everything"], BANDS["causal"], BANDS["window"]])
def test_one_query_per_sequence(arguments, lengths_q, train, heads):
    """A bound of one lets the kernel treat heads as queries, which it must not where a sequence has none."""
    lengths_kv = [700, 1, 0, 2049]
    inputs = packed(lengths_q, lengths_kv, heads=heads, head_dim=128, train=train)
    given = {"max_seqlen_q": 1, "max_seqlen_kv": 2049}
    check_packed(inputs, lengths_q, lengths_kv, arguments, given=given)


def test_a_diagonal_from_the_top_left_runs_elsewhere():
    lengths_q, lengths_kv = [100, 30], [70, 200]
    inputs = packed(lengths_q, lengths_kv)
    decision = check_packed(
        inputs, lengths_q, lengths_kv, BANDS["causal"], alignment="top_left", backend=None
    )
    assert decision.verdict("flash").status == "rejected"


def test_sums_on_the_device_that_lead_nowhere_read_nothing_behind_the_tokens():
    lengths = [60, 40]
    query, key, value = packed(lengths, lengths, train=False)
    wrong = torch.tensor([5, 60, 10**6], device="cuda", dtype=torch.int32)
    out = attnroute.attention(query, key, value, layout="thd", cu_seqlens_q=wrong, backend="flash")
    assert error(out, apart((query, key, value), lengths, lengths)[0]) <= TOLERANCE[out.dtype]


def check_padded(inputs, mask, allowed, *, backend="flash", repairs=("to_varlen",), layout="bhsd", **rest):
    query, key, value = inputs
    want, want_lse = attend(query, key, value, allowed=allowed)
    given = inputs if layout == "bhsd" else [t.transpose(1, 2) for t in inputs]
    decision = attnroute.explain(*given, mask, layout=layout, return_lse=True, backend=backend, **rest)
    assert decision.selected is not None, str(decision)
    assert repairs is None or decision.verdict(decision.selected).repairs == repairs

    def run():
        return attnroute.attention(*given, mask, layout=layout, return_lse=True, backend=backend, **rest)

    turned = (lambda t: t) if layout == "bhsd" else (lambda t: t.transpose(1, 2))
    check(run, inputs, want, want_lse.detach(), backend=backend, cotangent_of=turned)
    return decision


def trained(inputs, *, train):
    return [t.detach().requires_grad_(train) for t in inputs]


def kept_of(side, counts, seqlen_kv):
    """Return which keys exist, (batch, 1, 1, seqlen_kv)."""
    places, counts = torch.arange(seqlen_kv, device="cuda"), torch.tensor(counts, device="cuda")[:, None]
    kept = places < counts if side == "right" else places >= seqlen_kv - counts
    return kept[:, None, None]


def padding_of(side, counts, seqlen_kv, form):
    """Return the mask object: ints, or a tensor on the CPU or the device."""
    given = counts if side == "right" else [seqlen_kv - n for n in counts]
    if form != "ints":
        given = torch.tensor(given, device=form)
    return masks.KeyPadding(lengths=given) if side == "right" else masks.KeyPadding(left=given)


SHAPES = [(130, 130, True), (100, 300, True), (1, 300, True), (1, 300, False)]
"""Queries and keys of a row, and whether gradients are asked for: one query is run differently without."""


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "train"), SHAPES)
def test_padded_rows(seqlen_q, seqlen_kv, train, side, heads):
    counts = [seqlen_kv, 0, 1, 77]
    inputs = problem(batch=4, heads_q=heads[0], heads_kv=heads[1], seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    mask = padding_of(side, counts, seqlen_kv, "cuda")
    check_padded(trained(inputs, train=train), mask, kept_of(side, counts, seqlen_kv))


@pytest.mark.parametrize("form", ["ints", "cpu"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_counts_that_the_host_knows(side, form):
    inputs = problem(batch=3)
    check_padded(inputs, padding_of(side, [130, 0, 9], 130, form), kept_of(side, [130, 0, 9], 130))


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "train"), [*SHAPES, (300, 100, True)])
@pytest.mark.parametrize("arguments", list(BANDS.values())[1:], ids=list(BANDS)[1:])
def test_rows_padded_on_the_left_keep_their_band(arguments, seqlen_q, seqlen_kv, train):
    counts = [seqlen_kv, 0, 1, 77]
    left, right = sides(arguments)
    offset = seqlen_kv - seqlen_q
    low, high = (None if left is None else offset - left), (None if right is None else offset + right)
    allowed = kept_of("left", counts, seqlen_kv) & band(seqlen_q, seqlen_kv, low, high)
    inputs = trained(problem(batch=4, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv), train=train)
    mask = padding_of("left", counts, seqlen_kv, "cuda")
    check_padded(inputs, mask, allowed, causal_alignment="bottom_right", **arguments)


@pytest.mark.parametrize("train", [True, False])
def test_padded_rows_of_layout_bshd(train):
    inputs = trained([t.transpose(1, 2).contiguous().transpose(1, 2) for t in problem()], train=train)
    decision = check_padded(
        inputs, masks.KeyPadding(lengths=[130, 9]), kept_of("right", [130, 9], 130), layout="bshd"
    )
    assert decision.verdict("flash").extra_bytes == 0


def test_padded_rows_with_a_head_dim_that_is_padded_too():
    mask, allowed = masks.KeyPadding(left=[0, 99]), kept_of("left", [130, 31], 130) & band(130, 130, None, 0)
    check_padded(problem(head_dim=20), mask, allowed, is_causal=True, repairs=("to_varlen", "pad_head_dim"))


def test_what_no_sequences_can_say_runs_elsewhere():
    mask, allowed = masks.KeyPadding(lengths=[130, 31]), kept_of("right", [130, 31], 130)
    allowed = allowed & band(130, 130, None, 0)
    decision = check_padded(problem(), mask, allowed, backend=None, repairs=None, is_causal=True)
    assert decision.verdict("flash").status == "rejected"


def test_deterministic_training_of_padded_rows():
    inputs, mask = problem(), masks.KeyPadding(lengths=[130, 9])
    want, _ = attend(*inputs, allowed=kept_of("right", [130, 9], 130))
    cotangent = torch.randn_like(want)
    wanted = torch.autograd.grad(want, inputs, cotangent)
    torch.use_deterministic_algorithms(mode=True)
    try:
        found = []
        for _ in range(2):
            spoil_memory()
            out = attnroute.attention(*inputs, mask, backend="flash")
            found.append(torch.autograd.grad(out, inputs, cotangent.to(out.dtype)))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    compare_gradients(found[0], wanted, (want == 0).all(-1), TOLERANCE[out.dtype])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("seqlens", [(300, 100), (130, 130), (100, 300)])
@pytest.mark.parametrize("window", [(20, None), (None, 150), (20, 150), (0, 100), (20, 0)])
def test_windows_with_more_queries_than_keys(window, seqlens):
    """The operator without prefix sums reads a right side of seqlen_kv or more keys as another one."""
    seqlen_q, seqlen_kv = seqlens
    offset = seqlen_kv - seqlen_q
    left, right = window
    low, high = (None if left is None else offset - left), (None if right is None else offset + right)
    inputs = problem(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    check_padded(
        inputs,
        None,
        band(seqlen_q, seqlen_kv, low, high),
        repairs=(),
        window=window,
        causal_alignment="bottom_right",
    )


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("train", [True, False])
def test_nobody_waits_for_the_device(train):
    """Counts and sums stay on the device; a mask that was never seen before is prepared there as well."""
    inputs = trained(problem(), train=train)
    rows = packed([60, 70], [60, 70], train=train)
    counts, sums = torch.tensor([130, 9], device="cuda"), sums_of([60, 70])

    def run():
        mask = masks.KeyPadding(left=counts.clone())
        padded = attnroute.attention(*inputs, mask, is_causal=True, backend="flash")
        given = {"layout": "thd", "cu_seqlens_q": sums.clone(), "cu_seqlens_kv": sums.clone()}
        return padded, attnroute.attention(*rows, **given, backend="flash")

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = run()
        if train:
            torch.autograd.grad([out.sum() for out in outs], [*inputs, *rows])
    finally:
        torch.cuda.set_sync_debug_mode("default")
