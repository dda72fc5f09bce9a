"""Backwards on a CUDA device that run again, and of several outputs at once: the numbers of one backward."""

from __future__ import annotations

import pytest
import torch
from support.package_runs import check_again

# torch says so where it loops over samples for a kernel of its own.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:There is a performance drop")]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "chunked"])
def test_backwards_run_again_and_together(backend, with_sink):
    options = {"sink": torch.zeros(4, device="cuda")} if with_sink else {}
    check_again(backend, together=True, **options)


@pytest.mark.parametrize("return_lse", [False, True])
def test_flex_runs_again(return_lse):
    check_again("flex", sink=torch.zeros(4, device="cuda") if return_lse else None)
