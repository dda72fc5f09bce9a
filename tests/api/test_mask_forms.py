"""Masks that are new in each call and have the form of earlier ones go the short way, and each is read."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from support.reference import TOLERANCE, attend, error
from support.spy import profiled
from support.variations import tensors

import attnroute
from attnroute import masks
from attnroute.api import repeats
from attnroute.api.alike import OF_MASK

pytestmark = pytest.mark.usefixtures("fresh")

QUERIES, KEYS = 6, 16


def flags(*shape, empty=()):
    """Return flags of which no row is without a key, but those of queries that are named."""
    made = torch.rand(shape) < 0.6
    made[..., torch.randint(shape[-1], (1,))] = True
    if len(shape) > 1 and shape[-2] > 1:
        made[..., list(empty), :] = False
    return made


TENSORS = {
    "one row": lambda: flags(1, 1, 1, KEYS),
    "one row of each sequence": lambda: flags(2, 1, 1, KEYS),
    "expanded": lambda: flags(1, 1, 1, KEYS).expand(2, 1, QUERIES, KEYS),
    "of each query": lambda: flags(2, 1, QUERIES, KEYS, empty=[2]),
    "of each head": lambda: flags(2, 4, QUERIES, KEYS, empty=[0, 5]),
    "heads behind queries": lambda: flags(2, QUERIES, 4, KEYS).transpose(1, 2),
    "turned": lambda: flags(2, 1, KEYS, QUERIES).transpose(2, 3).logical_or(torch.eye(QUERIES, KEYS) > 0),
    "cut out of a wider one": lambda: flags(2, 1, QUERIES, KEYS + 3)[..., 1 : KEYS + 1],
    "two dimensions": lambda: flags(QUERIES, KEYS, empty=[1]),
}


def inputs(keys=KEYS, *, train=False, **sizes):
    return [t.requires_grad_(train) for t in tensors(heads_kv=2, seqlen_q=QUERIES, seqlen_kv=keys, **sizes)]


def compare(given, mask, allowed, **arguments):
    """Run a call and hold output and gradients against those of a formula in float64."""
    query, key, value = given
    turned = arguments.get("layout") == "bshd"
    passed = [t.transpose(1, 2) for t in given] if turned else given
    out = attnroute.attention(*passed, mask, **arguments)
    out = out.transpose(1, 2) if turned else out
    want = attend(query, key, value, allowed=allowed, sink=arguments.get("sink"))[0]
    assert error(out, want) <= TOLERANCE[query.dtype]
    if query.requires_grad:
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, given, grad)
        for got, wanted in zip(found, torch.autograd.grad(want, given, grad.double()), strict=True):
            assert error(got, wanted) <= TOLERANCE[query.dtype]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("keys", [KEYS, KEYS - 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_new_tensor_goes_the_short_way_and_counts(name, keys, train, ways):
    for _ in range(5):
        mask = TENSORS[name]()[..., :keys]
        # Each twice, as two layers of a model do.
        for _ in range(2):
            with profiled("flash"):
                compare(inputs(keys, train=train), mask, mask)
    assert ways == ["long", *["short"] * 9]


@pytest.mark.parametrize(
    "arguments",
    [
        {"layout": "bshd"},
        {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"backend": "math"},
        {"backend": "chunked"},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"window": (3, 2), "causal_alignment": "top_left"},
    ],
    ids=str,
)
def test_a_new_tensor_beside_other_arguments(arguments, ways):
    band = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if "is_causal" in arguments:
        band = masks.Causal("bottom_right").materialize(QUERIES, KEYS)
    if "window" in arguments:
        band = masks.Window(3, 2).materialize(QUERIES, KEYS)
    for _ in range(4):
        mask = TENSORS["of each query"]()
        compare(inputs(), mask, mask & band, **arguments)
    assert ways == ["long", *["short"] * 3]


def test_a_new_tensor_beside_a_bias(ways):
    for _ in range(4):
        given, mask, bias = inputs(), TENSORS["of each query"](), torch.randn(1, 4, QUERIES, KEYS)
        out = attnroute.attention(*given, mask, bias=bias)
        assert error(out, attend(*given, allowed=mask, bias=bias)[0]) <= TOLERANCE[torch.float32]
    assert ways == ["long", *["short"] * 3]


@pytest.mark.parametrize(
    "other",
    [
        lambda: flags(2, 1, QUERIES, KEYS).to(torch.float32).log(),
        lambda: flags(1, 1, QUERIES, KEYS),
        lambda: flags(2, 1, QUERIES, KEYS + 1)[..., :KEYS],
        lambda: flags(2, 1, KEYS, QUERIES).transpose(2, 3),
    ],
    ids=["dtype", "shape", "strides", "order"],
)
def test_a_tensor_of_another_form_is_another_call(other, ways):
    for _ in range(3):
        attnroute.attention(*inputs(), flags(2, 1, QUERIES, KEYS))
    attnroute.attention(*inputs(), other())
    assert ways == ["long", "short", "short", "long"]


def test_tensors_that_are_read_are_told_apart_by_what_they_say():
    """Their route may be that of a causal mask, which says nothing of the next one."""
    query, key, value = torch.randn(3, 1, 2, 300, 16).unbind()
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    for mask in (causal, torch.rand(300, 300) < 0.5, causal.clone(), causal.T.contiguous()):
        for _ in range(2):
            out = attnroute.attention(query, key, value, mask)
            assert error(out, attend(query, key, value, allowed=mask)[0]) <= TOLERANCE[torch.float32]


def test_inference_mode_keeps_nothing_and_goes_the_short_way(ways):
    with torch.inference_mode():
        for _ in range(3):
            mask = flags(2, 1, 1, KEYS)
            for _ in range(2):
                compare(inputs(), mask, mask)
                # No version tells of this.
                mask.logical_not_()[..., 0] = True
    # What was made there serves no training.
    mask = flags(2, 1, 1, KEYS)
    compare(inputs(train=True), mask, mask)
    assert ways == ["long", *["short"] * 5, "long"]


def test_no_tensor_is_kept_alive(ways):
    seen = []
    for _ in range(3):
        mask = flags(2, 1, QUERIES, KEYS)
        attnroute.attention(*inputs(), mask)
        seen.append(weakref.ref(mask.untyped_storage()))
        del mask
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3
    assert ways == ["long", "short", "short"]


def test_masks_leave_nothing_behind():
    """However many there were: what is kept is of their form, or goes with them."""
    before = None
    for n in range(40):
        attnroute.attention(*inputs(), flags(2, 1, QUERIES, KEYS))
        if n == 3:
            before = len(repeats._REPEATS)
    assert len(repeats._REPEATS) == before


# Objects.


def keep(*, at_left=False):
    found = flags(2, KEYS)
    if at_left:
        found[0, :3] = False
    return found


OBJECTS = {
    "flags": lambda: masks.KeyPadding(keep=keep(), finite=True),
    "flags at the left": lambda: masks.KeyPadding(keep=keep(at_left=True)),
    "lengths": lambda: masks.KeyPadding(lengths=torch.randint(1, KEYS, (2,)), finite=True),
    "left": lambda: masks.KeyPadding(left=torch.randint(1, KEYS, (2,)), finite=True),
    "flags in a window": lambda: (
        masks.Window(KEYS, 4, "bottom_right") & masks.KeyPadding(keep=keep(), finite=True)
    ),
    "tensor": lambda: masks.Dense(flags(2, 1, QUERIES, KEYS, empty=[3])),
    "prefix": lambda: masks.PrefixLM(torch.randint(1, KEYS, (2,))),
    "alternatives": lambda: masks.Causal() | masks.KeyPadding(keep=keep(), finite=True),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_new_object_goes_the_short_way_and_counts(name, train, ways):
    for _ in range(4):
        mask = OBJECTS[name]()
        allowed = mask.materialize(QUERIES, KEYS, batch=2, num_heads_q=4)
        for _ in range(2):
            compare(inputs(train=train), mask, allowed)
    assert ways == ["long", *["short"] * 7]


def test_what_is_left_out_may_be_nan_unless_a_mask_says_otherwise(ways):
    """Of two objects that differ in that alone, and of any that come after."""
    for finite in (True, False, True, False):
        for _ in range(2):
            query, key, value = inputs()
            mask = masks.KeyPadding(keep=keep(at_left=True), finite=finite)
            allowed = mask.materialize(QUERIES, KEYS, batch=2)
            want = attend(query, key, value, allowed=allowed)[0]
            if not finite:
                gone = ~mask.keep[:, None, :, None]
                key, value = key.masked_fill(gone, torch.nan), value.masked_fill(gone, torch.nan)
            out = attnroute.attention(query, key, value, mask)
            assert error(out, want) <= TOLERANCE[torch.float32]
    assert ways == ["long", "short", "long", *["short"] * 5]


def test_objects_of_which_nothing_may_be_kept_do_not_stand_for_others(ways):
    """Tensors of inference mode count no writes, so that an object with one has no token."""
    query, key, value = inputs()
    with torch.inference_mode():
        unknown = keep(at_left=True)
    for _ in range(3):
        compare((query, key, value), masks.KeyPadding(keep=unknown, finite=True), unknown[:, None, None])
    assert ways == ["long", "short", "short"]
    known = unknown.clone()
    want = attend(query, key, value, allowed=known[:, None, None])[0]
    value = value.masked_fill(~known[:, None, :, None], torch.nan)
    out = attnroute.attention(query, key, value, masks.KeyPadding(keep=known))
    assert error(out, want) <= TOLERANCE[torch.float32]
    assert ways[3:] == ["long"]
    assert all(not isinstance(place[OF_MASK], str) for place in repeats._REPEATS.items())


def test_an_object_of_another_form_is_another_call(ways):
    for _ in range(3):
        attnroute.attention(*inputs(), masks.KeyPadding(keep=keep(), finite=True))
    attnroute.attention(*inputs(), masks.KeyPadding(lengths=torch.tensor([3, 9]), finite=True))
    attnroute.attention(*inputs(), masks.KeyPadding(lengths=[3, 9], finite=True))
    attnroute.attention(*inputs(), masks.KeyPadding(lengths=[3, 8], finite=True))
    assert ways == ["long", "short", "short", "long", "long", "long"]


def test_objects_are_freed(ways):
    seen = []
    for _ in range(3):
        mask = masks.KeyPadding(keep=keep(), finite=True)
        attnroute.attention(*inputs(), mask)
        seen.append(weakref.ref(mask))
        del mask
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3
    assert ways == ["long", "short", "short"]


def whole_of(tensors):
    """Return tensors of layout thd as one batch row in layout bhsd, in float64."""
    return [t.transpose(0, 1)[None].double() for t in tensors]


PACKED = {
    "apart": lambda: [torch.randn(30, 2, 8) for _ in "qkv"],
    "of one projection": lambda: [*torch.randn(30, 6, 8).split(2, 1)],
    "heads outermost": lambda: [torch.randn(2, 30, 8).transpose(0, 1) for _ in "qkv"],
    "shared heads, expanded": lambda: [torch.randn(30, 2, 8), *torch.randn(2, 30, 1, 8).expand(2, 30, 2, 8)],
}


@pytest.mark.parametrize("backend", ["flash", "math", "chunked"])
@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (5, 0)}], ids=str)
@pytest.mark.parametrize("memory", PACKED)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_packed_batches_that_come_again_are_made_of_their_own_sums(backend, band, memory, trains):
    """They have no mask as an argument; sums are other tensors, or the same ones written anew."""
    packed = [t.detach().requires_grad_(trains) for t in PACKED[memory]()]
    kept = torch.tensor([0, 9, 9, 20, 30], dtype=torch.int32)
    ends = ((9, 9, 20), (1, 12, 18), (9, 9, 20))
    others = [torch.tensor([0, *three, 30], dtype=torch.int32) for three in ends]
    bands = {
        "is_causal": [masks.Causal(alignment="bottom_right")],
        "window": [masks.Window(5, 0, alignment="bottom_right")],
    }
    for number, sums in enumerate((kept, kept, kept, *others, kept, kept)):
        if number in (2, 6):
            kept[2] += 4
        given = {"cu_seqlens_q": sums, "max_seqlen_q": 20, "layout": "thd", **band}
        # A profile takes longer than all calls.
        with profiled(backend) if number in (2, 4) else nullcontext():
            out = attnroute.attention(*packed, **given, backend=backend)
        parts = [masks.Documents(cu_seqlens=sums), *(part for name in band for part in bands[name])]
        both = masks.All(tuple(parts)) if len(parts) > 1 else parts[0]
        want, _ = attend(*whole_of(packed), allowed=both.materialize(30, 30))
        assert error(out.transpose(0, 1)[None], want) <= TOLERANCE[torch.float32]
        if trains:
            cotangent = torch.randn_like(want)
            grads = torch.autograd.grad(out, packed, cotangent[0].transpose(0, 1).float())
            wanted = torch.autograd.grad(want, packed, cotangent)
            for grad, true in zip(grads, wanted, strict=True):
                assert error(grad, true, floor=1.0) <= 2 * TOLERANCE[torch.float32]
