"""`attnroute tables audit fa4` on small releases made here, whose checks differ from the tables."""

from __future__ import annotations

import pytest
from support.wheels import put_wheel

from attnroute.audit import releases
from attnroute.audit.grid import grid
from attnroute.cli import main
from attnroute.question.line import parse
from attnroute.question.normalize import normalize

INTERFACE = """
import torch
import cutlass
import cutlass.cute as cute
from flash_attn.cute.kernel import Kernel

def _validate_head_dims(head_dim, head_dim_v, major):
    {check}

def _flash_attn_fwd(q, k, v, causal=False, softcap=None, return_lse=False, window_size_left=None,
                    window_size_right=None, learnable_sink=None, **lengths):
    arch = torch.cuda.get_device_capability()[0]
    assert v.dtype in [torch.float16, torch.bfloat16], "inputs must be 16-bit"
    _validate_head_dims(q.shape[-1], v.shape[-1], arch)
    {more}
    _flash_attn_fwd.compile_cache[arch] = cute.compile(Kernel(q.shape[-1]))
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    return out, torch.empty(q.shape[0], q.shape[-2], q.shape[1], dtype=torch.float32)

_flash_attn_fwd.compile_cache = dict()

def _flash_attn_bwd(q, k, v, out, dout, lse, causal=False, softcap=None, deterministic=False, **lengths):
    arch = torch.cuda.get_device_capability()[0]
    assert arch in [9, 10, 11, 12], "no backward"
    assert not (arch == 12 and deterministic), "no deterministic backward"
"""
KERNEL = """
class Kernel:
    def __init__(self, head_dim):
        self.tile = 128

    @staticmethod
    def can_implement(head_dim, tile):
        from cutlass.utils import get_smem_capacity_in_bytes
        return 4 * head_dim * tile <= get_smem_capacity_in_bytes("sm_80")
"""
CHECK = 'assert major in (8, 12) or 8 <= head_dim <= 256 and head_dim % 8 == 0, "head dims"'
CALLS = (
    "bf16 b2 hq8 sq512 d64",
    "bf16 b2 hq8 hkv2 sq512 d128 causal train",
    "bf16 b2 hq8 sq512 d256",
    "bf16 b2 hq8 sq512 d264",
    "bf16 b2 hq8 sq512 d64 thd window=64,0 sink",
    "fp32 b2 hq8 sq512 d64",
)


@pytest.fixture
def release(monkeypatch, tmp_path):
    """Make a release with a check of head dims and one line more in the forward."""

    def make(check=CHECK, more="pass", interface=INTERFACE):
        monkeypatch.setattr(releases, "grid", lambda: [normalize(parse(line)) for line in CALLS])
        files = {
            "flash_attn/cute/__init__.py": "",
            "flash_attn/cute/interface.py": interface.replace("{check}", check).replace("{more}", more),
            "flash_attn/cute/kernel.py": KERNEL,
        }
        put_wheel(monkeypatch, tmp_path, "flash-attn-4", "4.0.0b36", files, ["nvidia-cutlass-dsl>=4.6.2"])

    return make


def audit(capsys):
    code = main(["tables", "audit", "fa4", "--version", "4.0.0b36"])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_release_that_refuses_nothing_more_is_no_failure(release, capsys):
    release()
    code, said = audit(capsys)
    assert code == 0
    assert " 0 too loose" in said
    assert "undecided" not in said


def test_what_the_release_refuses_and_the_tables_accept_is_too_loose(release, capsys):
    release(check="assert major != 9 or head_dim != 128, 'not 128 on Hopper'")
    code, said = audit(capsys)
    assert code == 1
    assert "flash-attn-4 4.0.0b36:" in said
    assert "too loose sm_90: bf16 b2 hq8 hkv2 sq512 skv512 d128 causal train" in said
    assert "interface.py _validate_head_dims: AssertionError: not 128 on Hopper" in said
    assert "1 too loose" in said


def test_what_the_release_takes_and_the_tables_refuse_is_counted_by_row(release, capsys):
    release(check="pass")
    code, said = audit(capsys)
    assert code == 0
    assert (
        "stricter shared/fa4_sm_90/validator-head-dims (limit, probe, measured): 1 calls, 1 of them" in said
    )
    assert "sm_90: bf16 b2 hq8 hkv8 sq512 skv512 d264" in said


def test_what_a_kernel_object_says_of_shared_memory_counts_where_its_kernels_are_amperes(release, capsys):
    """512 bytes for each element of a head: 264 is beyond 99 KiB and 200 would be too."""
    release(check="pass")
    _, said = audit(capsys)
    assert "shared/fa4_163_kib/head-dim-max (limit, inferred): 2 calls" in said
    assert "shared/fa4_99_kib" not in said


def test_a_branch_on_a_stand_in_is_undecided_and_never_a_pass(release, capsys):
    release(more="if cutlass.utils.HardwareInfo().get_max_active_clusters(2) > 3: pass")
    code, said = audit(capsys)
    assert code == 0
    assert "undecided" in said
    assert "UndecidedError" in said


def test_errors_that_no_stand_in_can_cause_are_refusals(release, capsys):
    release(more="1 / (q.shape[-1] - 128)")
    code, said = audit(capsys)
    assert code == 1
    assert "ZeroDivisionError" in said


def test_a_release_whose_code_does_not_run_is_an_error_in_one_sentence(release, capsys):
    release(interface="raise OSError('not today')")
    assert main(["tables", "audit", "fa4", "--version", "4.0.0b36"]) == 7
    said = capsys.readouterr().err
    assert "requires the code of the release to run with stand-ins; got OSError: not today" in said


def test_the_grid_has_every_feature_dtype_and_phase_once():
    calls = grid()
    assert len(set(calls)) == len(calls) > 10000
    assert {call.phase for call in calls} == {"training", "inference"}
    assert {call.dtype for call in calls} == {"float16", "bfloat16", "float32", "float8_e4m3fn"}
    assert {call.layout for call in calls} == {"bhsd", "bshd", "thd"}
    assert {call.num_heads_kv for call in calls} == {1, 2, 8}
    for field in ("sink", "deterministic", "return_lse"):
        assert {getattr(call, field) for call in calls} == {True, False}
