"""`attnroute tables audit te` on a small release made here, whose filters differ from the tables."""

from __future__ import annotations

import pytest
from support.wheels import put_wheel

from attnroute.audit import releases, te_release
from attnroute.cli import main
from attnroute.question.line import parse
from attnroute.question.normalize import normalize

FILTERS = """
import logging
from dataclasses import dataclass
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.utils import get_device_compute_capability, get_cudnn_version
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

class AttentionLogging:
    _log_level = logging.WARNING

@torch.library.custom_op("te::op", mutates_args=())
def op(x): ...

@op.register_fake
def _(x): ...

@dataclass
class AttentionParams:
    qkv_dtype: torch.dtype = torch.bfloat16
    head_dim_qk: int = 64
    attn_mask_type: str = "no_mask"
    is_training: bool = True

def get_attention_backend(params):
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(AttentionLogging._log_level)
    fused = True
    {filter}
    backend, why = tex.get_fused_attn_backend(head_dim=params.head_dim_qk)
    if backend == FusedAttnBackend.No_Backend.value:
        fused = False
    return False, fused, backend, True, [False, fused, True]
"""
CALLS = ("bf16 b2 hq8 sq512 d64", "bf16 b2 hq8 hkv2 sq512 d128 causal train", "fp32 b2 hq8 sq512 d64")


@pytest.fixture
def audit(monkeypatch, tmp_path, capsys):
    """Audit a release with one filter."""
    monkeypatch.setattr(releases, "grid", lambda: [normalize(parse(line)) for line in CALLS])

    def run(line):
        files = {te_release.FILE: FILTERS.replace("{filter}", line)}
        put_wheel(monkeypatch, tmp_path, "transformer-engine", "2.20.2", files)
        code = main(["tables", "audit", "te", "--version", "2.20.2"])
        return code, " ".join(capsys.readouterr().out.split())

    return run


def test_filters_that_refuse_no_more_than_the_tables_are_no_failure(audit):
    code, said = audit("pass")
    assert code == 0
    assert "0 too loose" in said
    assert "undecided" not in said


def test_what_a_filter_refuses_is_too_loose_with_its_own_words(audit):
    code, said = audit(
        "if get_cudnn_version() < (9, 11, 0) and get_device_compute_capability() == (9, 0) and"
        " params.attn_mask_type == 'causal' and params.is_training:"
        " fused = False; logger.debug('Disabling FusedAttention for head dim %s', params.head_dim_qk)"
    )
    assert code == 1
    assert "1 too loose" in said
    assert "sm_90: bf16 b2 hq8 hkv2 sq512 skv512 d128 causal train: Disabling FusedAttention" in said
    assert "for head dim 128" in said


def test_a_refusal_without_a_word_is_undecided(audit):
    code, said = audit("fused = False")
    assert code == 0
    assert "not fused, and no word why" in said


def test_an_older_form_of_the_answer_is_read_too(audit):
    code, said = audit("return True, '2.8', fused, tex.get_fused_attn_backend(0), True, [True, True, True]")
    assert (code, "undecided" in said) == (0, False)
