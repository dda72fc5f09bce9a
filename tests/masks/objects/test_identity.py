"""Masks compare, hash and print by their numbers and by which tensors they hold, never by what those hold."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attnroute import masks

FLAGS = torch.ones(2, 4, dtype=torch.bool)
IDS = torch.zeros(2, 4, dtype=torch.int32)
COUNTS = torch.tensor([1, 2])


def lower(_b, _h, i, j):
    return j <= i


class Marked:
    """A predicate that is a method, and one that is the object itself."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("a mask compares the functions that it holds by identity")

    def above(self, _b, _h, i, j):
        return j > i

    def __call__(self, b, h, i, j):
        return self.above(b, h, i, j)


MARKED = Marked()
BLOCKS = create_block_mask(lower, None, None, 4, 4, device="cpu")
MAKERS = [
    masks.Causal,
    lambda: masks.Causal("bottom_right"),
    lambda: masks.Window(3),
    lambda: masks.Window(3, None),
    lambda: masks.Documents(lengths=[1, 3]),
    lambda: masks.Documents(ids=IDS),
    lambda: masks.Documents(position_ids=IDS),
    lambda: masks.KeyPadding(lengths=[1, 3]),
    lambda: masks.KeyPadding(left=[1, 3]),
    lambda: masks.KeyPadding(lengths=COUNTS),
    lambda: masks.KeyPadding(keep=FLAGS),
    lambda: masks.PrefixLM([1, 3]),
    lambda: masks.PrefixLM([1, 3], "bottom_right"),
    lambda: masks.PrefixLM(COUNTS),
    lambda: masks.Dense(FLAGS),
    lambda: masks.Function(lower),
    lambda: masks.Function(lower, per_head=False),
    lambda: masks.Function(MARKED),
    lambda: masks.Function(MARKED.above),
    lambda: masks.Blocks(BLOCKS),
    lambda: masks.Causal() & masks.Dense(FLAGS),
    lambda: masks.Dense(FLAGS) & masks.Causal(),
    lambda: masks.Causal() | masks.Dense(FLAGS),
    lambda: ~masks.Dense(FLAGS),
    lambda: ~(masks.Dense(FLAGS) | masks.Window(2)),
    lambda: masks.All(()),
    lambda: masks.Either(()),
]


def test_masks_made_alike_are_equal_and_all_others_are_not():
    for place, make in enumerate(MAKERS):
        for other_place, other in enumerate(MAKERS):
            assert (make() == other()) is (place == other_place), (make(), other())
            assert (make() != other()) is (place != other_place)
        assert hash(make()) == hash(make())
    assert len({make() for make in MAKERS for _ in range(2)}) == len(MAKERS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.Dense(FLAGS.clone()),
        lambda: masks.Documents(ids=IDS.clone()),
        lambda: masks.KeyPadding(lengths=COUNTS.clone()),
        lambda: masks.PrefixLM(COUNTS.clone()),
        lambda: masks.Function(lambda _b, _h, i, j: j <= i),
        lambda: masks.Function(functools.partial(lower)),
        lambda: masks.Function(Marked().above),
        lambda: ~masks.Dense(FLAGS.clone()),
    ],
)
def test_other_tensors_and_functions_are_other_masks_whatever_they_hold(make):
    assert make() != make()
    assert len({make(), make()}) == 2


def test_a_mask_is_no_other_kind_of_thing():
    assert masks.Causal() != "Causal()"
    assert masks.Causal() != masks.PrefixLM([])


def test_equal_numbers_of_other_types_are_equal():
    assert masks.Documents(lengths=(1, 3)) == masks.Documents(lengths=[1, 3])
    assert masks.Causal() == masks.Causal("top_left")
    assert masks.Window(3, 0) == masks.Window(3)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (masks.Causal() & masks.Window(4095, 0), "Causal() & Window(4095, 0)"),
        (masks.Causal("bottom_right"), "Causal(alignment='bottom_right')"),
        (masks.Window(3, None, "bottom_right"), "Window(3, None, alignment='bottom_right')"),
        (masks.Documents(ids=IDS), "Documents(ids=int32 (2, 4))"),
        (masks.Documents(lengths=[1, 3]), "Documents(lengths=(1, 3))"),
        (masks.Documents(lengths=[1] * 9), "Documents(lengths=(1, 1, 1, 1, 1, 1, 1, 1, ... 9 in all))"),
        (masks.KeyPadding(left=[1, 3]), "KeyPadding(left=(1, 3))"),
        (masks.PrefixLM(COUNTS), "PrefixLM(int64 (2,))"),
        (masks.PrefixLM([3], "bottom_right"), "PrefixLM((3,), alignment='bottom_right')"),
        (masks.Dense(FLAGS), "Dense(bool (2, 4))"),
        (masks.Function(lower, per_batch=False), "Function(lower, per_batch=False)"),
        (masks.Function(MARKED), "Function(Marked)"),
        (masks.Function(MARKED.above), "Function(Marked.above)"),
        (masks.Function(functools.partial(lower, FLAGS)), "Function(partial of lower)"),
        (masks.Blocks(BLOCKS), "Blocks(BlockMask (1, 1, 4, 4))"),
        (
            (masks.Causal() | masks.Window(1)) & masks.Dense(FLAGS),
            "(Causal() | Window(1, 0)) & Dense(bool (2, 4))",
        ),
        (masks.Causal() & masks.Window(1) | masks.Window(2), "Causal() & Window(1, 0) | Window(2, 0)"),
        (
            ~masks.Causal() & ~(masks.Window(1) | masks.Window(2)),
            "~Causal() & ~(Window(1, 0) | Window(2, 0))",
        ),
        (masks.All(()), "All(())"),
        (masks.Either((masks.Causal(),)), "Either((Causal(),))"),
        (~masks.All((masks.Causal(),)), "~All((Causal(),))"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_masks_say_themselves_without_the_values_of_tensors(mask, said):
    assert repr(mask) == said


def test_a_mask_class_of_a_user_compares_and_prints_too():
    class Diagonal(masks.Mask):
        def __init__(self, wide):
            self.wide = wide

        def describe(self, extent):
            return masks.Window(self.wide, self.wide).describe(extent)

        def lower(self, into, extent):
            return masks.Window(self.wide, self.wide).lower(into, extent)

    assert Diagonal(1) == Diagonal(1) != Diagonal(2)
    assert len({Diagonal(1), Diagonal(1), Diagonal(2)}) == 2
    assert repr(Diagonal(1) & masks.Causal()) == "Diagonal() & Causal()"
    assert (~Diagonal(0)).materialize(2, 2)[0, 0].tolist() == [[False, True], [True, False]]


def test_what_is_said_of_numbers_reads_back():
    names = vars(masks)
    for mask in (
        masks.Causal("bottom_right") & ~masks.Window(3, None) | masks.PrefixLM([1, 2]),
        ~(masks.Causal() | masks.KeyPadding(left=[1]) & masks.Documents(lengths=[2, 0])),
        masks.All((masks.Either(()),)),
    ):
        assert eval(repr(mask), {"__builtins__": {}}, names) == mask


def test_comparing_and_printing_load_no_torch():
    code = (
        "import sys; from attnroute.masks import *\n"
        "m = ~(Causal() & Window(3)) | PrefixLM([1]); assert m == m and hash(m) and repr(m)\n"
        "assert Function(print) == Function(print) and m.tensors == () == Function(print).tensors\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
