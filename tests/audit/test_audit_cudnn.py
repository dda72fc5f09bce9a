"""`attnroute tables audit cudnn` on small releases made here, whose checks differ from the tables."""

from __future__ import annotations

import pytest
from support.wheels import put_wheel

from attnroute.audit import cudnn, cudnn_release, releases
from attnroute.cli import main
from attnroute.question.line import parse
from attnroute.question.normalize import normalize

OPERATORS = """
import torch
import cudnn

_lib = torch.library.Library("cudnn", "FRAGMENT")

def _build_graph(B, H, S_q, S_kv, D, D_v, thd, sinks, **band):
    g = cudnn.pygraph(handle=0)
    tensors = {
        name: g.tensor(name=name, dim=[B, H, s, d], stride=[H * s * d, s * d, d, 1], uid=1)
        for name, s, d in (("q", S_q, D), ("k", S_kv, D), ("v", S_kv, D_v))
    }
    if thd:
        tensors["q"].set_ragged_offset(g.tensor(name="r", dim=[B + 1, 1, 1, 1], stride=[1, 1, 1, 1]))
    return g, tensors, dict(
        attn_scale=1.0, use_padding_mask=thd, seq_len_q=None, seq_len_kv=None,
        diagonal_alignment=getattr(
            cudnn.diagonal_alignment, "BOTTOM_RIGHT" if band["causal_bottom_right"] else "TOP_LEFT"
        ),
        diagonal_band_left_bound=band["window_left"] if band["window_left"] >= 0 else None,
        diagonal_band_right_bound=0 if band["is_causal"] else None,
    )

def _sizes(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_kv):
    if cu_seqlens_q is not None:
        return cu_seqlens_q.numel() - 1, q.shape[1], max_seqlen_q, max_seqlen_kv, q.shape[-1], v.shape[-1]
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[-1], v.shape[-1]

def _sdpa_fwd_impl(q, k, v, attn_scale, is_causal=False, causal_bottom_right=False, window_left=-1,
                   window_right=-1, sinks=None, cu_seqlens_q=None, cu_seqlens_kv=None,
                   max_seqlen_q=0, max_seqlen_kv=0):
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"unsupported dtype {q.dtype}")
    g, tensors, given = _build_graph(
        *_sizes(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_kv), cu_seqlens_q is not None, sinks,
        is_causal=is_causal, causal_bottom_right=causal_bottom_right, window_left=window_left,
    )
    o, stats = g.sdpa(**tensors, generate_stats=True, sink_token=sinks, **given)
    o.set_uid(2).set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
    g.validate()
    g.build_plans().nothing_runs_behind_it

def _sdpa_bwd_impl(grad, q, k, v, o, lse, attn_scale, is_causal=False, causal_bottom_right=False,
                   window_left=-1, window_right=-1, cu_seqlens_q=None, cu_seqlens_kv=None,
                   max_seqlen_q=0, max_seqlen_kv=0, is_deterministic=False):
    g, tensors, given = _build_graph(
        *_sizes(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_kv), cu_seqlens_q is not None, None,
        is_causal=is_causal, causal_bottom_right=causal_bottom_right, window_left=window_left,
    )
    g.sdpa_backward(**tensors, o=tensors["q"], dO=tensors["q"], stats=tensors["q"],
                    use_deterministic_algorithm=is_deterministic, **given)
    g.validate()

_lib.impl("sdpa_fwd", _sdpa_fwd_impl, "CUDA")
"""
SURFACE = """
inline error_t
SDPA_attributes::validate_sdpa_support_surface(const detail::Context& context, int64_t s_kv) const {
    int64_t d_qk = inputs.at(SDPA_attributes::input_names::Q)->get_dim()[3];
    int64_t s_q  = inputs.at(SDPA_attributes::input_names::Q)->get_dim()[2];
    RETURN_CUDNN_FRONTEND_ERROR_IF(d_qk % 8 != 0, error_code_t::GRAPH_NOT_SUPPORTED, "a multiple of 8");
    RETURN_CUDNN_FRONTEND_ERROR_IF(s_q == 1 && has_sink_token(), error_code_t::X, "no sinks");
    {surface}
    return {error_code_t::OK, ""};
}
"""
NODES = """
class SDPANodeBase {
    error_t pre_validate_node() const override {
        auto validation_result = attributes.validate_sdpa_support_surface(context, infer_s_kv(), 0, 0);
        if (validation_result.is_good() == false) { return validation_result; }
        return {error_code_t::OK, ""};
    }
};
class CompositeSDPABackwardNode {
    error_t pre_validate_node() const override {
        int32_t const prop_major = context.get_sm_version() / 10;
        {backward}
        return {error_code_t::OK, ""};
    }
};
"""
CALLS = (
    "bf16 b2 hq8 sq512 d64",
    "bf16 b2 hq8 hkv2 sq512 d128 causal train",
    "bf16 b2 hq8 sq512 d100",
    "bf16 b2 hq8 sq512 d64 thd window=64,0",
    "bf16 b2 hq8 sq1 skv512 d64 sink",
    "bf16 b2 hq8 sq512 d64 softcap=30",
    "fp32 b2 hq8 sq512 d64",
)


@pytest.fixture
def audit(monkeypatch, tmp_path, capsys):
    """Audit a release with one check more in its surface, and one in its backward."""
    monkeypatch.setattr(releases, "grid", lambda: [normalize(parse(line)) for line in CALLS])
    monkeypatch.setattr(cudnn, "_CUDNN", ("9.19.0",))

    def run(surface="", backward=""):
        files = {
            cudnn_release.OPERATORS: OPERATORS,
            cudnn_release.SURFACE: SURFACE.replace("{surface}", surface),
            cudnn_release.NODES: NODES.replace("{backward}", backward),
        }
        put_wheel(monkeypatch, tmp_path, "nvidia-cudnn-frontend", "1.32.0", files)
        code = main(["tables", "audit", "cudnn", "--version", "1.32.0"])
        return code, " ".join(capsys.readouterr().out.split())

    return run


def refusal(condition, said):
    return f'RETURN_CUDNN_FRONTEND_ERROR_IF({condition}, error_code_t::GRAPH_NOT_SUPPORTED, "{said}");'


def test_checks_that_refuse_no_more_than_the_tables_are_no_failure(audit):
    code, said = audit()
    assert code == 0
    assert " 0 too loose" in said
    assert "undecided" not in said


def test_what_a_header_refuses_is_too_loose_with_its_own_words(audit):
    code, said = audit(
        surface=refusal("left_bound.has_value() && left_bound.value() == 65", "not this window")
    )
    assert code == 1
    assert "too loose sm_90: bf16 b2 hq8 hkv8 sq512 skv512 d64 thd window=64,0" in said
    assert "not this window" in said


def test_the_backward_is_asked_with_its_card(audit):
    code, said = audit(
        backward=refusal("prop_major == 9 && attributes.has_causal_like_masking()", "not on Hopper")
    )
    assert code == 1
    assert "1 too loose" in said
    assert "sm_90: bf16 b2 hq8 hkv2 sq512 skv512 d128 causal train: not on Hopper" in said


def test_a_check_that_asks_what_nobody_knows_is_undecided(audit):
    code, said = audit(surface='if (somebody_knows) { return {error_code_t::X, "no"}; }')
    assert code == 0
    assert "undecided" in said


def test_rows_that_refuse_more_are_counted(audit):
    _, said = audit()
    assert "stricter shared/cudnn_fe_before_9_18_1" not in said
    assert "any/cudnn_fe/feature-softcap" not in said


@pytest.mark.parametrize(
    ("sizes", "band", "given"),
    [
        ((512, 512), {"causal": True}, {"is_causal": True, "causal_bottom_right": False}),
        (
            (300, 700),
            {"causal": True, "bottom_right": True},
            {"is_causal": True, "causal_bottom_right": True},
        ),
        (
            (512, 512),
            {"window_size_left": 128, "window_size_right": 0},
            {"window_left": 129, "is_causal": True},
        ),
        (
            (300, 700),
            {"window_size_left": 64, "window_size_right": 64},
            {"window_left": 65, "window_right": 64},
        ),
        ((1, 512), {"causal": True, "bottom_right": True}, {}),
    ],
)
def test_bands_are_those_of_the_executor(sizes, band, given):
    call = {"sq": sizes[0], "skv": sizes[1], "ragged": False, "causal": False, "bottom_right": False}
    call |= {"window_size_left": None, "window_size_right": None}
    found = cudnn_release._band({**call, **band})
    assert {name: found[name] for name in given} == given
    assert bool(found) == bool(given)
