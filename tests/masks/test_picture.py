"""A mask in a notebook: a picture of who may attend whom, small, escaped, read from no more than it shows."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mask_objects import HEADS, combined
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

from attnroute import masks
from attnroute.masks import picture
from attnroute.masks.lowered.form import Extent
from attnroute.masks.objects.ragged import Ragged

IDS = torch.tensor([0, 0, 0, 1, 1, 2])
BLOCK_MASK = create_block_mask(lambda _b, _h, i, j: j <= i, 1, 1, 256, 256, device="cpu")
MASKS = {
    "causal": masks.Causal(),
    "window": masks.Window(1023, 0),
    "open window": masks.Window(None, None),
    "prefix": masks.PrefixLM([3, 7]),
    "prefix tensor": masks.PrefixLM(torch.tensor([3, 7])),
    "lengths": masks.Documents(lengths=[5, 9]),
    "ids": masks.Documents(ids=IDS),
    "rows of ids": masks.Documents(ids=IDS.expand(3, -1)),
    "sums": masks.Documents(cu_seqlens=torch.tensor([0, 300, 1000])),
    "positions": masks.Documents(position_ids=torch.tensor([0, 1, 2, 0, 1])),
    "padding": masks.KeyPadding(lengths=[4, 9, 2, 1, 6]),
    "padding on the left": masks.KeyPadding(left=torch.tensor([4, 0])),
    "keep": masks.KeyPadding(keep=torch.tensor([[True, False, True]])),
    "dense": masks.Dense(torch.ones(2, 4, 100, 200, dtype=torch.bool)),
    "one row": masks.Dense(torch.tensor([True, False, True])),
    "function": masks.Function(lambda _b, _h, i, j: (i - j) % 3 == 0),
    "function of ids": masks.Function(lambda _b, _h, i, j: IDS[i] == IDS[j]),
    "blocks": masks.Blocks(BLOCK_MASK),
    "ragged": Ragged(torch.tensor([0, 3, 9]), right=0),
    "all": masks.Causal() & masks.Documents(lengths=[1000, 3096]) & masks.Window(99),
    "either": masks.PrefixLM([100]) | ~masks.Window(400),
    "beside a tensor": masks.Causal() & masks.Dense(torch.eye(7, dtype=torch.bool)),
    "nothing": masks.Either(()),
    "everything": masks.All(()),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_kind_of_mask_is_drawn_small(mask):
    found = mask._repr_html_()
    assert len(found) < 30_000
    pictures = ET.fromstring(found).iter("svg")
    sizes = [tuple(map(int, each.get("viewBox").split())) for each in pictures]
    assert 1 <= len(sizes) <= picture.ROWS
    assert all(1 <= length <= picture.CELLS for _, _, *lengths in sizes for length in lengths)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
def test_a_picture_is_the_mask(data, batch, seqlen_q, seqlen_kv):
    mask, table = data.draw(combined(batch, seqlen_q, seqlen_kv))
    grids = mask._grids(Extent(batch, HEADS, seqlen_q, seqlen_kv, torch.device("cpu")))
    assert grids == table[:, 0].tolist()


@pytest.mark.parametrize("length", [1, 47, 48, 49, 100, 4096, 10**6])
def test_what_is_drawn_stands_for_equal_parts(length):
    found = picture.places(length)
    part = length / min(length, picture.CELLS)
    assert len(found) == min(length, picture.CELLS)
    assert all(abs(place + 0.5 - (cell + 0.5) * part) <= 0.5 for cell, place in enumerate(found))


def test_the_text_is_escaped_and_above_the_picture():
    found = masks.Function(lambda _b, _h, i, j: i == j)._repr_html_()
    assert "&lt;lambda&gt;" in found
    assert "<lambda>" not in found


def test_the_note_says_what_is_left_out():
    found = masks.Dense(torch.ones(9, 4, 100, 64, dtype=torch.bool))._repr_html_()
    note = "100 queries down, 64 keys across; at most 48 of each are drawn; 4 of 9 batch rows; head 0 of 4"
    assert f"<small>{note}</small>" in found


@pytest.mark.parametrize(
    "mask",
    [
        masks.Function(lambda _b, _h, _i, _j: 1 / 0),
        masks.Documents(lengths=[3]) & masks.Documents(lengths=[4]),
        masks.Dense(torch.ones(0, 3, dtype=torch.bool)),
        masks.Dense(torch.ones(8, 8, dtype=torch.bool, device="meta")),
    ],
    ids=["a function that raises", "lengths that contradict", "no query", "no values"],
)
def test_what_cannot_be_drawn_is_left_to_its_text(mask):
    assert mask._repr_html_() is None


def test_no_more_of_a_large_tensor_is_read_than_is_drawn():
    class Sizes(TorchFunctionMode):
        largest = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found._is_view() is False:
                self.largest = max(self.largest, found.numel())
            return found

    mask = masks.Dense(torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(4, 8, 100_000, 100_000))
    with Sizes() as seen:
        assert mask._repr_html_()
    assert 0 < seen.largest <= 100_000


def test_masks_without_tensors_are_drawn_without_torch():
    code = (
        "import sys; from attnroute import masks\n"
        "m = masks.Causal() & masks.Documents(lengths=[5, 9]) | ~masks.Window(3)\n"
        "print(m._repr_html_(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(r"<svg.*</div> False$", done.stdout.strip())
