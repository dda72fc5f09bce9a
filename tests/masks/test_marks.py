"""What is kept with a tensor: of it as it is, never of another one, without a weak reference on it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import attnroute
from attnroute import masks
from attnroute.masks.kept import remember
from attnroute.masks.marks import Mark

N = 300


def causal(n=N):
    return torch.ones(n, n, dtype=torch.bool).tril()


def normal(n=N, heads=2):
    return torch.randn(1, heads, n, 8)


def attended(query, mask):
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)


def given_as(form, tensor):
    """Return what is given to attention(), and the tensors that the user holds."""
    if form == "tensor":
        return tensor, [tensor]
    if form == "view":
        view = tensor[None, None]
        return view, [view]
    if form == "object":
        return masks.Dense(tensor), [tensor]
    return ~masks.Dense(tensor), [tensor]


@pytest.mark.parametrize("size", [8, N], ids=["small", "looked at"])
@pytest.mark.parametrize("form", ["tensor", "view", "object", "negated"])
@pytest.mark.parametrize("backend", [None, "chunked", "math"])
def test_no_weak_reference_stays_on_a_mask(form, backend, size):
    mask, tensors = given_as(form, causal(size))
    for train in (False, True):
        query = normal(size).requires_grad_(train)
        out = attnroute.attention(query, query, query, mask, backend=backend)
        if train:
            out.sum().backward()
    del out, query
    assert [weakref.getweakrefs(t) for t in tensors] == [[] for _ in tensors]


def token_masks():
    lengths, left = torch.tensor([5, 8]), torch.tensor([3, 0])
    ids = torch.arange(8).expand(2, 8) // 3
    yield lengths, lambda t: {"mask": masks.KeyPadding(lengths=t)}
    yield left, lambda t: {"mask": masks.KeyPadding(left=t)}
    yield torch.rand(2, 8) < 0.7, lambda t: {"mask": masks.KeyPadding(keep=t)}
    yield ids.contiguous(), lambda t: {"mask": masks.Documents(ids=t)}
    yield torch.tensor([0, 3, 8]), lambda t: {"mask": masks.Documents(cu_seqlens=t)}
    yield torch.arange(8) % 3, lambda t: {"mask": masks.Documents(position_ids=t)}
    yield lengths.clone(), lambda t: {"mask": masks.PrefixLM(t)}
    yield lengths.clone(), lambda t: {"mask": masks.Function(lambda b, _h, _i, j: j < t[b])}


@pytest.mark.parametrize(("tensor", "call"), list(token_masks()))
def test_tensors_inside_of_masks_can_be_swapped(tensor, call):
    query = torch.randn(2, 2, 8, 4)
    for _ in range(2):
        attnroute.attention(query, query, query, **call(tensor))
    gc.collect()
    other = torch.zeros(3)
    torch.utils.swap_tensors(tensor, other)
    assert tensor.shape == (3,)


def test_prefix_sums_can_be_swapped():
    query = torch.randn(8, 2, 4)
    q, kv = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 8], [0, 2, 8]))
    band = {"layout": "thd", "is_causal": True, "causal_alignment": "bottom_right"}
    for _ in range(2):
        attnroute.attention(query, query, query, cu_seqlens_q=q, cu_seqlens_kv=kv, **band)
        attnroute.attention(query, query, query, cu_seqlens_q=q, **band)
    gc.collect()
    for sums in (q, kv):
        torch.utils.swap_tensors(sums, torch.zeros(3))


@pytest.mark.parametrize("size", [8, N], ids=["small", "looked at"])
def test_a_swapped_mask_is_read_as_it_is_now(size):
    mask, other, query = causal(size), torch.ones(size, size, dtype=torch.bool), normal(size)
    torch.testing.assert_close(attnroute.attention(query, query, query, mask), attended(query, causal(size)))
    torch.utils.swap_tensors(mask, other)
    torch.testing.assert_close(attnroute.attention(query, query, query, mask), attended(query, None))
    torch.testing.assert_close(attnroute.attention(query, query, query, other), attended(query, causal(size)))


def changed_in_place(mask):
    mask[:] = True


def changed_data(mask):
    mask.data = torch.ones_like(mask)


def changed_layout(mask):
    mask.data = mask.data.T


@pytest.mark.parametrize("change", [changed_in_place, changed_data, changed_layout])
@pytest.mark.parametrize("size", [8, N], ids=["small", "looked at"])
@pytest.mark.parametrize("make", [lambda t: t, masks.Dense, lambda t: ~masks.Dense(t)])
def test_a_changed_mask_is_read_again(make, size, change):
    tensor, query = causal(size), normal(size)
    mask = make(tensor)
    for step in range(2):
        allowed = ~tensor if isinstance(mask, masks.Not) else tensor
        want = attended(query, allowed).nan_to_num(0.0)
        torch.testing.assert_close(attnroute.attention(query, query, query, mask), want)
        if not step:
            change(tensor)


@pytest.mark.parametrize("form", [lambda t: t, lambda t: t[:]], ids=["alias", "view of an alias"])
def test_an_alias_with_a_version_of_its_own_is_never_taken_for_an_earlier_one(form):
    """What `mask.data` gives begins at version 0 each time, often at the address of the last one."""
    mask, query = causal(), normal()
    for diagonal in range(4):
        mask.copy_(torch.ones(N, N, dtype=torch.bool).tril(diagonal * 40))
        out = attnroute.attention(query, query, query, form(mask.data))
        torch.testing.assert_close(out, attended(query, mask))


def test_masks_that_come_and_go_at_one_address_are_all_read():
    query = normal()
    for diagonal in range(6):
        mask = torch.ones(N, N, dtype=torch.bool).tril(diagonal * 40)
        out = attnroute.attention(query, query, query, mask)
        torch.testing.assert_close(out, attended(query, mask))


def test_views_of_one_mask_that_come_and_go_share_what_was_made():
    base, made = causal(), []

    def make():
        made.append(1)
        return len(made)

    found = [remember(base[:100, :n], "what", make) for n in (100, 100, 200, 200)]
    assert found == [1, 1, 2, 2]
    assert weakref.getweakrefs(base) == []


def test_many_views_at_once_are_all_kept_for_themselves():
    base = causal()
    views = [base[:100, n : n + 100] for n in range(5)]
    for _ in range(2):
        found = [remember(view, "what", lambda n=n: n) for n, view in enumerate(views)]
        assert found == list(range(5))


def test_a_mark_ends_with_its_tensor():
    ended = []
    tensor = causal()
    mark = Mark(tensor, ended=ended.append)
    assert mark.fits(tensor)
    assert not mark.fits(tensor.clone())
    del tensor
    gc.collect()
    assert ended == [mark.place]
    assert not mark.fits(causal())
