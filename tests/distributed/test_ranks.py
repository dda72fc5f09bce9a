"""The processes that tests of many ranks share: what they bring back, and that they end."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed._ranks import RankError, Ranks


def total(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    own = tensor * (dist.get_rank() + 1)
    dist.all_reduce(own)
    return os.getpid(), own


def fail_on_the_last(others_wait: bool) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this rank is wrong")
    if others_wait:
        dist.barrier()


def warn() -> None:
    warnings.warn("careful", stacklevel=1)


def sleep_on_the_first() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def die() -> None:
    os._exit(7)


def alive(pids: list[int]) -> list[int]:
    """Processes that are there and no zombies: their parent may collect them a moment later."""
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def test_each_rank_returns_and_is_used_again(two_ranks):
    first = two_ranks.run(total, torch.ones(3))
    second = two_ranks.run(total, torch.ones(1))
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first}) == 2
    assert all(torch.equal(sums, torch.full((3,), 3.0)) for _, sums in first)


def test_a_warning_is_an_error_where_it_is_one_in_the_test(two_ranks):
    with pytest.raises(RankError, match="careful"):
        two_ranks.run(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert two_ranks.run(warn) == [None, None]


def test_failures_are_told_and_end_every_process():
    ranks = Ranks(2)
    pids = [pid for pid, _ in ranks.run(total, torch.ones(1))]
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: .*this rank is wrong"):
        ranks.run(fail_on_the_last, True)
    assert alive(pids) == []
    pids = [pid for pid, _ in ranks.run(total, torch.ones(1))]
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2: did not end.*sleep_on_the_first"):
        ranks.run(sleep_on_the_first, timeout=1.0)
    with pytest.raises(RankError, match="ended with exit code 7"):
        ranks.run(die)
    pids += [pid for pid, _ in ranks.run(total, torch.ones(1))]
    ranks.stop()
    assert alive(pids) == []


def test_what_cannot_be_sent_is_refused(two_ranks):
    with pytest.raises(RankError, match="top level; got test_what_cannot_be_sent"):
        two_ranks.run(lambda: None)
