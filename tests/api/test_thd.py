"""Layout thd: sequences behind each other give what each of them gives alone, in every direction."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.edge_inputs import close
from support.packed_inputs import alone, packed, sums_of
from support.reference import TOLERANCE, error
from support.spy import Spy, ran

import attnroute
from attnroute.api import routes
from attnroute.memory import reset

BANDS = {
    "everything": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "left window": {"window": (3, None)},
    "causal window": {"is_causal": True, "window": (2, 5)},
}
SELF = [[5, 3, 8], [16], [1, 1, 1], [4, 0, 7, 0], [0, 0], [0], [33, 1, 17]]
CROSS = [
    ([5, 3], [2, 9]),
    ([1, 1, 1], [7, 3, 5]),
    ([4, 0, 3, 2], [4, 6, 0, 1]),
    ([3], [0]),
    ([0], [3]),
    ([6, 2], [6, 2]),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def check(lengths_q, lengths_kv=None, *, dtype=torch.float64, sizes=None, **arguments):
    """Hold one call, its log-sum-exp and its gradients against every sequence alone."""
    inputs = [t.requires_grad_() for t in packed(lengths_q, lengths_kv, dtype=dtype, **(sizes or {}))]
    extra = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    given_sums = sums_of(lengths_q, lengths_kv)
    backend = attnroute.explain(*inputs, layout="thd", **given_sums, return_lse=True, **arguments).selected
    with ran(backend):
        out, lse = attnroute.attention(*inputs, layout="thd", **given_sums, return_lse=True, **arguments)
    want, want_lse = alone(inputs, lengths_q, lengths_kv, **arguments)
    close(out, want, dtype)
    assert (lse.shape, lse.dtype) == (want_lse.shape, torch.float32)
    assert torch.equal(lse > -math.inf, want_lse > -math.inf)
    finite = want_lse > -math.inf
    close(lse[finite], want_lse[finite], torch.float32, floor=1.0)
    trained = [*inputs, *(t for t in extra.values() if t.requires_grad)]
    cotangent = torch.randn(out.shape, dtype=torch.float64)
    got = torch.autograd.grad(out, trained, cotangent.to(dtype))
    wanted = torch.autograd.grad(want, trained, cotangent, allow_unused=True)
    for mine, true in zip(got, wanted, strict=True):
        close(mine, torch.zeros_like(mine).double() if true is None else true, dtype, floor=2.0)
    return out


@pytest.mark.parametrize("lengths", SELF, ids=str)
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_self_attention_equals_every_sequence_alone(lengths, band):
    check(lengths, **band)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("lengths_q", "lengths_kv"), CROSS, ids=str)
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_cross_attention_equals_every_sequence_alone(lengths_q, lengths_kv, band, alignment):
    corner = {"causal_alignment": alignment} if band else {}
    check(lengths_q, lengths_kv, **band, **corner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths_kv", [None, [9, 2, 4]], ids=["self", "cross"])
def test_other_dtypes(lengths_kv, dtype):
    arguments = {"is_causal": True, "causal_alignment": "bottom_right"}
    inputs = packed([5, 3, 8], lengths_kv, dtype=dtype)
    out = attnroute.attention(*inputs, layout="thd", **sums_of([5, 3, 8], lengths_kv), **arguments)
    assert out.dtype == dtype
    close(out, alone(inputs, [5, 3, 8], lengths_kv, **arguments)[0], dtype)


@pytest.mark.parametrize(
    "sizes", [{"heads_kv": 1}, {"heads_kv": 4}, {"head_dim_v": 4}, {"head_dim": 20}], ids=str
)
@pytest.mark.parametrize("lengths_kv", [None, [9, 2, 4]], ids=["self", "cross"])
def test_heads_and_head_dims(lengths_kv, sizes):
    check([5, 3, 8], lengths_kv, sizes=sizes, is_causal=True, causal_alignment="top_left")


@pytest.mark.parametrize("lengths_kv", [None, [9, 0, 4]], ids=["self", "cross"])
@pytest.mark.parametrize("feature", ["softcap", "sink", "scale", "alibi_slopes", "all"])
def test_what_changes_scores_holds_in_each_sequence(feature, lengths_kv):
    values = {
        "softcap": 2.0,
        "scale": -0.5,
        "sink": torch.randn(4, dtype=torch.float64).requires_grad_(),
        "alibi_slopes": torch.rand(4, dtype=torch.float64).requires_grad_(),
    }
    if lengths_kv is not None:
        del values["alibi_slopes"]
    chosen = values if feature == "all" else {n: v for n, v in values.items() if n == feature}
    check([5, 3, 8], lengths_kv, **chosen)
    check([5, 3, 8], lengths_kv, is_causal=True, causal_alignment="bottom_right", **chosen)


def test_dropout_is_applied_and_keeps_to_the_sequences():
    inputs = packed([30, 34])
    sums = sums_of([30, 34])
    inputs[2][30:] += 100.0
    torch.manual_seed(1)
    out = attnroute.attention(*inputs, layout="thd", dropout_p=0.5, **sums)
    plain = attnroute.attention(*inputs, layout="thd", **sums)
    assert not torch.allclose(out, plain)
    assert out[:30].abs().max() < 20.0
    torch.manual_seed(1)
    assert torch.equal(out, attnroute.attention(*inputs, layout="thd", dropout_p=0.5, **sums))


@given(st.data())
def test_any_lengths(data):
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)
    lengths_q = data.draw(lengths)
    cross = data.draw(st.booleans())
    count = st.lists(st.integers(0, 9), min_size=len(lengths_q), max_size=len(lengths_q))
    lengths_kv = data.draw(count) if cross else None
    sides = st.sampled_from([None, 0, 1, 4, 20])
    window = (data.draw(sides), data.draw(sides))
    arguments = {
        "window": data.draw(st.sampled_from([None, window])),
        "is_causal": data.draw(st.booleans()),
    }
    if arguments["is_causal"] or arguments["window"] is not None:
        arguments["causal_alignment"] = data.draw(st.sampled_from(["top_left", "bottom_right"]))
    inputs = packed(lengths_q, lengths_kv, dtype=torch.float32)
    sums = sums_of(lengths_q, lengths_kv)
    with Spy() as spy:
        out, lse = attnroute.attention(*inputs, layout="thd", return_lse=True, **sums, **arguments)
    chosen = attnroute.explain(*inputs, layout="thd", return_lse=True, **sums, **arguments).selected
    assert spy.backends == {chosen}
    want, want_lse = alone(inputs, lengths_q, lengths_kv, **arguments)
    assert error(out, want) <= TOLERANCE[torch.float32]
    assert torch.equal(lse > -math.inf, want_lse > -math.inf)
    assert (out[(want_lse == -math.inf).T] == 0).all()


@pytest.mark.parametrize("backend", ["chunked", "flash", "math"])
@pytest.mark.parametrize("lengths_kv", [None, [9, 0, 4]], ids=["self", "cross"])
def test_every_backend_that_accepts_is_right(lengths_kv, backend):
    inputs, sums = packed([5, 3, 8], lengths_kv, dtype=torch.float32), sums_of([5, 3, 8], lengths_kv)
    arguments = {"is_causal": True, "causal_alignment": "bottom_right", "backend": backend}
    assert attnroute.explain(*inputs, layout="thd", **sums, **arguments).selected == backend
    for _ in range(2):
        with ran(backend):
            out = attnroute.attention(*inputs, layout="thd", **sums, **arguments)
        del arguments["backend"]
        close(out, alone(inputs, [5, 3, 8], lengths_kv, **arguments)[0])
        arguments["backend"] = backend


def test_query_without_a_key_gives_zeros_and_the_log_sum_exp_of_nothing():
    inputs, sums = packed([2, 3], [0, 4]), sums_of([2, 3], [0, 4])
    out, lse = attnroute.attention(*inputs, layout="thd", return_lse=True, **sums)
    assert not out[:2].any()
    assert (lse[:, :2] == -math.inf).all()
    assert torch.isfinite(lse[:, 2:]).all()


def test_a_second_derivative():
    inputs = packed([2, 3], [1, 3], heads=2, heads_kv=1, head_dim=4)
    sums = sums_of([2, 3], [1, 3])

    def run(*tensors):
        with attnroute.override(double_backward=True):
            arguments = {"is_causal": True, "causal_alignment": "bottom_right"}
            return attnroute.attention(*tensors, layout="thd", **sums, **arguments)

    assert torch.autograd.gradgradcheck(run, [t.requires_grad_() for t in inputs])


# torch writes some forward-mode formulas in a language that it calls deprecated itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_vmap_and_forward_mode():
    inputs, sums = packed([2, 3]), sums_of([2, 3])

    def run(*tensors):
        return attnroute.attention(*tensors, layout="thd", is_causal=True, **sums)

    many = [torch.stack([t, 2 * t]) for t in inputs]
    out = torch.func.vmap(run)(*many)
    for n in range(2):
        close(out[n], run(*(t[n] for t in many)), torch.float64)
    tangents = [torch.randn_like(t) for t in inputs]
    step = 1e-6
    ahead, behind = (run(*(t + s * d for t, d in zip(inputs, tangents, strict=True))) for s in (step, -step))
    _, tangent = torch.func.jvp(run, tuple(inputs), tuple(tangents))
    assert (tangent - (ahead - behind) / (2 * step)).abs().max() < 1e-7


# The arguments.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_of_either_dtype_and_bounds_change_nothing(dtype):
    inputs = packed([5, 3, 8])
    plain = attnroute.attention(*inputs, layout="thd", **sums_of([5, 3, 8]))
    for bounds in ({}, {"max_seqlen_q": 8}, {"max_seqlen_q": 100, "max_seqlen_kv": 8}):
        sums = sums_of([5, 3, 8], dtype=dtype)
        assert torch.equal(plain, attnroute.attention(*inputs, layout="thd", **sums, **bounds))


def test_the_same_sums_for_keys_are_self_attention():
    inputs, sums = packed([5, 3]), sums_of([5, 3])
    same = {**sums, "cu_seqlens_kv": sums["cu_seqlens_q"]}
    nodes = attnroute.explain(*inputs, layout="thd", is_causal=True, **same).call.mask
    assert [(node.kind, getattr(node, "cross", None)) for node in nodes] == [
        ("documents", False),
        ("causal", None),
    ]
    copied = {**sums, "cu_seqlens_kv": sums["cu_seqlens_q"].clone()}
    call = attnroute.explain(
        *inputs, layout="thd", is_causal=True, causal_alignment="top_left", **copied
    ).call
    assert call.mask[0].cross


def test_the_question_as_data():
    inputs, sums = packed([5, 3], [4, 6]), sums_of([5, 3], [4, 6])
    corner = {"causal_alignment": "bottom_right"}
    decision = attnroute.explain(*inputs, layout="thd", window=(2, 0), sink=torch.zeros(4), **corner, **sums)
    call = decision.call
    assert (call.layout, call.batch, call.seqlen_q, call.seqlen_kv) == ("thd", 1, 8, 10)
    assert (call.num_heads_q, call.num_heads_kv, call.head_dim_qk, call.sink) == (4, 2, 8, True)
    assert [node.kind for node in call.mask] == ["documents", "window"]
    assert (call.mask[1].left, call.mask[1].right, call.mask[1].alignment) == (2, 0, "bottom_right")
    assert call.strides.packed
    assert decision.selected in str(decision)


def test_views_of_a_fused_projection():
    fused = torch.randn(8, 8, 8, dtype=torch.float64)
    query, key, value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    out = attnroute.attention(query, key, value, layout="thd", **sums_of([5, 3]))
    close(out, alone((query, key, value), [5, 3])[0], torch.float64)


def test_autocast_casts_packed_tensors_too():
    inputs = packed([5, 3], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attnroute.attention(*inputs, layout="thd", **sums_of([5, 3]))
    assert out.dtype == torch.bfloat16
    close(out, alone(inputs, [5, 3])[0], torch.bfloat16)


# Remembered routes.


def test_other_sums_of_the_same_shape_take_the_route_and_not_the_answer(monkeypatch):
    made = []
    make = routes.make
    monkeypatch.setattr(routes, "make", lambda *given, **rest: made.append(given[2]) or make(*given, **rest))
    reset()
    inputs = packed([5, 3])
    for lengths in ([5, 3], [2, 6], [8, 0]):
        out = attnroute.attention(*inputs, layout="thd", is_causal=True, **sums_of(lengths))
        close(out, alone(inputs, lengths, is_causal=True)[0], torch.float64)
    assert len(made) == 1


@pytest.mark.parametrize("backend", ["chunked", "math"])
@pytest.mark.parametrize("lengths_kv", [None, [4, 4]], ids=["self", "cross"])
def test_sums_changed_in_place_are_read_again(lengths_kv, backend):
    inputs, sums = packed([5, 3], lengths_kv), sums_of([5, 3], lengths_kv)
    for first in (5, 2, 8):
        sums["cu_seqlens_q"][1] = first
        out = attnroute.attention(*inputs, layout="thd", backend=backend, **sums)
        close(out, alone(inputs, [first, 8 - first], lengths_kv)[0], torch.float64)
    if lengths_kv is not None:
        sums["cu_seqlens_kv"][1] = 1
        out = attnroute.attention(*inputs, layout="thd", backend=backend, **sums)
        close(out, alone(inputs, [8, 0], [1, 7])[0], torch.float64)


def test_what_became_wrong_is_refused_on_a_known_route_too():
    inputs, sums = packed([5, 3]), sums_of([5, 3])
    attnroute.attention(*inputs, layout="thd", max_seqlen_q=5, **sums)
    sums["cu_seqlens_q"][1] = 2
    with pytest.raises(attnroute.AttnRouteError, match=r"max_seqlen_q requires at least the longest"):
        attnroute.attention(*inputs, layout="thd", max_seqlen_q=5, **sums)
    sums["cu_seqlens_q"][2] = 7
    with pytest.raises(attnroute.AttnRouteError, match=r"cu_seqlens_q requires .* got \[0, 2, 7\]"):
        attnroute.attention(*inputs, layout="thd", **sums)
