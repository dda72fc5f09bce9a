"""The tensors that a function reads are found wherever its code reaches them by name, each once."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from attnroute import masks
from attnroute.masks.objects.captures import captured_tensors

GLOBAL, UNUSED, OF_HELPER = (torch.zeros(n) for n in (1, 2, 3))
LISTED = {"a": [torch.zeros(4)], "b": (torch.zeros(5),)}


class Box:
    """Holds things as attributes."""

    of_class = torch.zeros(6)

    def __init__(self, **held):
        self.__dict__.update(held)

    def method(self, _b, _h, i, _j):
        return self.used[i]

    @property
    def found(self):
        return self.used

    @staticmethod
    def static(_b, _h, _i, _j):
        return GLOBAL

    def __call__(self, _b, _h, i, j):
        return self.method(_b, _h, i, j)


class Slotted:
    """Holds its attribute in a slot."""

    __slots__ = ("used",)

    def __init__(self, used):
        self.used = used


class Module(torch.nn.Module):
    """Has a buffer that its predicate reads, and parameters that it does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.zeros(7))
        self.layer = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def mask_mod(self, _b, _h, i, j):
        return self.ids[i] == self.ids[j]

    def forward(self, _b, _h, i, _j):
        return self.scale + self.ids[i]


def helper():
    return OF_HELPER


def reads_globals(_b, _h, _i, _j):
    return GLOBAL + LISTED["a"][0] + helper()


def only_says_a_name(_b, _h, _i, _j):
    return "UNUSED"


USED, OTHER = torch.zeros(8), torch.zeros(9)
BOX = Box(used=USED, other=OTHER, deep=Box(used=OTHER), taken=[Box(used=USED)])
MODULE = Module()
SLOTTED = Slotted(USED)
FILE = types.ModuleType("of_a_user")
FILE.TABLE, FILE.OTHER = USED, OTHER


def closes_over(tensor):
    def mask_mod(_b, _h, i, _j):
        def inner(place):
            return tensor[place]

        return inner(i)

    return mask_mod


def reads_default(_b, _h, i, _j, table=USED, *, other=OTHER):
    return table[i] + other[i]


def forward_reference():
    def mask_mod(_b, _h, i, _j):
        return later[i]

    before = captured_tensors(mask_mod)
    later = USED
    return before, mask_mod


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda _b, _h, i, j: i >= j, []),
        (only_says_a_name, []),
        (closes_over(USED), [USED]),
        (reads_globals, [GLOBAL, LISTED["a"][0], LISTED["b"][0], OF_HELPER]),
        (reads_default, [USED, OTHER]),
        (functools.partial(reads_default, table=GLOBAL), [GLOBAL, USED, OTHER]),
        (functools.partial(lambda t, _b, _h, i, _j: t[i], USED), [USED]),
        (BOX.method, [USED]),
        (BOX, [USED]),
        (BOX.static, [GLOBAL]),
        (lambda _b, _h, i, _j: BOX.found[i], [USED]),
        (lambda _b, _h, i, _j: BOX.deep.used[i], [USED, OTHER]),
        (lambda _b, _h, i, _j: BOX.taken[0].used[i], [USED]),
        (lambda _b, _h, i, _j: BOX.of_class[i], [Box.of_class]),
        (lambda _b, _h, i, _j: SLOTTED.used[i], [USED]),
        (lambda _b, _h, i, _j: FILE.TABLE[i], [USED]),
        (USED.__getitem__, [USED]),
        (USED.take, [USED]),
        (MODULE.mask_mod, [MODULE.ids]),
        (MODULE, [MODULE.scale, MODULE.ids]),
        (lambda b, h, i, j: MODULE(b, h, i, j) > 0, [MODULE.scale, MODULE.ids]),
        (lambda _b, _h, i, _j: MODULE.ids[i].float(), [MODULE.ids]),
        (lambda _b, _h, i, _j: MODULE.layer(i), list(MODULE.layer.parameters())),
        (and_masks(closes_over(USED), closes_over(OTHER), closes_over(USED)), [USED, OTHER]),
        (functools.lru_cache(closes_over(USED)), [USED]),
        (functools.wraps(reads_globals)(closes_over(OTHER)), [OTHER]),
    ],
)
def test_what_is_read_is_found_once(function, tensors):
    found = captured_tensors(function)
    assert len(found) == len(tensors)
    assert {id(t) for t in found} == {id(t) for t in tensors}


def test_a_name_that_is_bound_later_is_found_then():
    before, mask_mod = forward_reference()
    assert before == ()
    assert captured_tensors(mask_mod)[0] is USED


def test_a_function_that_reaches_itself_ends():
    def mask_mod(_b, _h, i, _j):
        return mask_mod if i else holder

    holder = [mask_mod, USED]
    holder.append(holder)
    assert [t is USED for t in captured_tensors(mask_mod)] == [True]


def test_values_that_cannot_be_called_read_nothing_but_tensors_themselves():
    assert captured_tensors(None) == captured_tensors("USED") == captured_tensors(torch.Tensor) == ()


def test_searching_runs_no_code_of_what_is_searched():
    class Trap:
        @property
        def used(self):
            raise AssertionError

        def __getattr__(self, name):
            if name == "data_ptr":
                raise AttributeError(name)
            raise AssertionError(name)

    trap = Trap()
    assert captured_tensors(lambda _b, _h, _i, _j: trap.used + trap.missing) == ()


def test_libraries_are_not_searched():
    """The globals of torch hold tensors of its own, and thousands of functions."""
    assert captured_tensors(lambda _b, _h, i, j: torch.nn.functional.relu(i - j) > 0) == ()
    assert captured_tensors(sys.modules["torch.nn.functional"].scaled_dot_product_attention) == ()


def test_masks_list_what_their_functions_read():
    mask = masks.Function(closes_over(USED)) & ~masks.Function(BOX.method) | masks.Function(reads_default)
    assert [t is wanted for t, wanted in zip(mask.tensors, (USED, USED, USED, OTHER), strict=True)] == [
        True
    ] * 4
