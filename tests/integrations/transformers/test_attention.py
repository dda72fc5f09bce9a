"""Registration, and what the attention function does with each argument: honours it or raises a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers
from support.reference import attend
from transformers import AttentionInterface, AttentionMaskInterface

from attnroute.errors import ArgumentError
from attnroute.integrations.transformers import mask_interface, register
from attnroute.integrations.transformers.attention import attention_function
from attnroute.integrations.transformers.mask_interface import make_mask

forward = attention_function(frozenset())


class Module(torch.nn.Module):
    """Stands for a model's attention module."""

    is_causal = True


class Encoder(torch.nn.Module):
    is_causal = False


def tensors(seqlen_q=6, seqlen_kv=6, batch=2, batch_q=None):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(batch_q or batch, 4, seqlen_q, 8, generator=generator)
    key, value = (torch.randn(batch, 2, seqlen_kv, 8, generator=generator) for _ in range(2))
    return query, key, value


def triangle(seqlen_q, seqlen_kv):
    return torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool).tril(seqlen_kv - seqlen_q)


def check(found, *given, **options):
    out, weights = found
    expected, _ = attend(*given, **options)
    assert weights is None
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected.transpose(1, 2).float(), rtol=1e-4, atol=1e-5)


def test_a_module_without_a_mask_is_causal_as_it_says():
    given = tensors()
    check(forward(Module(), *given, None), *given, allowed=triangle(6, 6))
    check(forward(Encoder(), *given, None), *given)
    check(forward(Module(), *given, None, is_causal=False), *given)
    check(forward(torch.nn.Module(), *given, None), *given, allowed=triangle(6, 6))
    check(forward(Module(), *given, None, sliding_window=2), *given, allowed=triangle(6, 6).triu(-1))


def test_one_query_without_a_mask_sees_every_key():
    given = tensors(seqlen_q=1)
    check(forward(Module(), *given, None), *given)
    check(forward(Module(), *given, None, sliding_window=6), *given)


def test_cross_attention_of_other_lengths():
    given = tensors(3, 7)
    check(forward(Encoder(), *given, None), *given)
    with pytest.raises(ArgumentError, match="None with 3 queries and 7 keys"):
        forward(Module(), *given, None)


def test_a_window_nobody_stated_raises():
    with pytest.raises(ArgumentError, match="sliding window of 3"):
        forward(Encoder(), *tensors(), None, sliding_window=3)
    with pytest.raises(ArgumentError, match="sliding window of 3"):
        forward(Module(), *tensors(seqlen_q=1), None, sliding_window=3)


def test_scores():
    given, sink = tensors(), torch.randn(4)
    mask = make_mask(2, 6, 6)
    options = {"softcap": 1.5, "scale": 0.7, "sink": sink}
    found = forward(Module(), *given, mask, scaling=0.7, softcap=1.5, s_aux=sink)
    check(found, *given, allowed=triangle(6, 6), **options)


@pytest.mark.parametrize("width", [1, 9])
def test_position_bias_beside_an_object(width):
    given, bias = tensors(4, 9), torch.randn(1, 4, 4, width)
    mask = make_mask(2, 4, 9, 2)
    assert mask.pattern.keys == (0, 6)
    allowed = torch.zeros(4, 9, dtype=torch.bool)
    allowed[:, :6] = triangle(4, 6)
    check(forward(Module(), *given, mask, position_bias=bias), *given, allowed=allowed, bias=bias)


def test_dense_masks_stay_as_they_are():
    given = tensors()
    allowed = torch.rand(2, 1, 6, 6) < 0.6
    allowed[..., 0] = True
    check(forward(Module(), *given, allowed, sliding_window=2), *given, allowed=allowed)
    additive = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    check(forward(Module(), *given, additive), *given, allowed=allowed)


def test_a_written_mask_is_believed():
    given, mask = tensors(), make_mask(2, 6, 6)
    mask[:, :, :, 0] = False
    mask[:, :, 0, 0] = True
    allowed = triangle(6, 6)
    allowed[1:, 0] = False
    check(forward(Module(), *given, mask), *given, allowed=allowed)


def test_a_modules_window_holds_beside_a_mask_without_one():
    given = tensors()
    check(
        forward(Module(), *given, make_mask(2, 6, 6), sliding_window=3),
        *given,
        allowed=triangle(6, 6).triu(-2),
    )


def test_queries_shared_by_the_batch():
    query, key, value = tensors(batch_q=1)
    check(forward(Encoder(), query, key, value, None), query.expand(2, -1, -1, -1), key, value)


def test_a_mask_for_other_lengths_raises():
    with pytest.raises(ArgumentError, match=r"6 queries and 6 keys.*one for 6 and 7"):
        forward(Module(), *tensors(), make_mask(2, 6, 7))


def documents(*lengths):
    sums = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return sums, ids[:, None] == ids[None]


@pytest.mark.parametrize("kind", ["object", "dense", "none"])
def test_cumulative_lengths(kind):
    given = tensors(batch=1)
    sums, same = documents(2, 3, 1)
    mask = {"object": make_mask(1, 6, 6), "dense": triangle(6, 6)[None, None], "none": None}[kind]
    for _ in range(2):
        found = forward(
            Module(), *given, mask, cu_seq_lens_q=sums, cu_seq_lens_k=sums.clone(), max_length_q=3
        )
        check(found, *given, allowed=same & triangle(6, 6))
    check(forward(Encoder(), *given, None, cu_seq_lens_q=sums, cu_seq_lens_k=sums), *given, allowed=same)


@pytest.mark.parametrize(
    ("given", "other", "sentence"),
    [
        (tensors(), None, "batch 2, 6 queries, 6 keys, both"),
        (tensors(2, 6, batch=1), None, "2 queries, 6 keys"),
        (tensors(batch=1), documents(3, 3)[0], "cu_seq_lens_k requires the same documents"),
        (tensors(batch=1), "missing", "one of them"),
    ],
    ids=["batch", "lengths", "different", "one"],
)
def test_cumulative_lengths_that_mean_nothing_raise(given, other, sentence):
    sums = documents(2, 4)[0]
    other = (
        {"missing": None}.get(other, other) if isinstance(other, str) else sums if other is None else other
    )
    with pytest.raises(ArgumentError, match=sentence):
        forward(Encoder(), *given, None, cu_seq_lens_q=sums, cu_seq_lens_k=other)


def test_cumulative_lengths_against_positions_raise():
    from transformers import masking_utils as hf

    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = make_mask(
        1, 6, 6, mask_function=hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(ids))
    )
    given, (agreeing, same) = tensors(batch=1), documents(3, 3)
    found = forward(Module(), *given, mask, cu_seq_lens_q=agreeing, cu_seq_lens_k=agreeing)
    check(found, *given, allowed=same & triangle(6, 6))
    contrary = documents(2, 4)[0]
    with pytest.raises(ArgumentError, match="documents that position_ids state"):
        forward(Module(), *given, mask, cu_seq_lens_q=contrary, cu_seq_lens_k=contrary)


def test_attention_weights_raise():
    with pytest.raises(ArgumentError, match='attn_implementation="eager" to see them'):
        forward(Module(), *tensors(), None, output_attentions=True)


def test_unknown_arguments_raise_unless_they_are_off_or_ignored():
    given = tensors()
    with pytest.raises(ArgumentError, match=r'keyword argument indices.*register\(ignore=\["indices"\]\)'):
        forward(Module(), *given, None, indices=torch.zeros(1))
    plain = forward(Module(), *given, None)[0]
    for kwargs in (
        {"indices": None},
        {"head_mask": False},
        {"position_ids": torch.arange(6), "use_cache": True},
    ):
        assert torch.equal(forward(Module(), *given, None, **kwargs)[0], plain)
    lenient = attention_function(frozenset({"indices"}))
    assert torch.equal(lenient(Module(), *given, None, indices=torch.zeros(1))[0], plain)


def test_models_for_eager_attention_alone_raise():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention
    from transformers.models.llama.modeling_llama import LlamaAttention

    given = tensors()
    stub = type("Stub", (torch.nn.Module,), {"__module__": DeepseekV4Attention.__module__})()
    with pytest.raises(ArgumentError, match=r"Stub.*register\(eager_only=True\)"):
        forward(stub, *given, None)
    served = attention_function(frozenset(), eager_only=True)(stub, *given, None)[0]
    other = type("Stub", (torch.nn.Module,), {"__module__": LlamaAttention.__module__})()
    assert torch.equal(forward(other, *given, None)[0], served)


SMALL = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("family", "extra", "named"),
    [
        # Tables of classes, which a name picks one from.
        ("Falcon", {}, "FalconAttention"),
        (
            "GPTNeo",
            {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
            "GPTNeoSelfAttention",
        ),
        ("Data2VecVision", {"image_size": 4, "patch_size": 2}, "Data2VecVisionSelfAttention"),
        # One class that computes attention itself.
        ("Bloom", {}, "BloomModel"),
        ("Mpt", {"d_model": 8, "n_heads": 2, "n_layers": 1}, "MptModel"),
        ("RemBert", {"input_embedding_size": 8}, "RemBertModel"),
        ("XGLM", {"d_model": 8, "attention_heads": 2, "num_layers": 1, "ffn_dim": 8}, "XGLMModel"),
    ],
)
def test_models_that_compute_attention_themselves_raise(family, extra, named):
    model = getattr(transformers, f"{family}Model")
    config = getattr(transformers, f"{family}Config")
    register()
    with pytest.raises(ArgumentError, match=f'"attnroute" for {named}, which computes attention by itself'):
        model._from_config(config(**SMALL, **extra), attn_implementation="attnroute")
    assert model._from_config(config(**SMALL, **extra), attn_implementation="eager")
    # Whoever makes such a model anew gets the same answer, and a subclass as well.
    derived = type("Derived", (model,), {"__module__": __name__})
    with pytest.raises(ArgumentError, match="which computes attention by itself"):
        derived._from_config(config(**SMALL, **extra), attn_implementation="attnroute")


def test_transformers_is_asked_once_however_often_one_registers():
    register()
    asked = transformers.PreTrainedModel.get_correct_attn_implementation
    register("asked-again")
    assert transformers.PreTrainedModel.get_correct_attn_implementation is asked


def test_registering_twice_is_harmless():
    register()
    register()
    register(ignore=["something"])
    register()
    assert AttentionMaskInterface()["attnroute"] is make_mask
    assert "attnroute" in AttentionInterface().valid_keys()


def test_a_name_of_ones_own():
    register("routed")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaModel._from_config(config, attn_implementation="routed")
    assert model.config._attn_implementation == "routed"
    assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", ["sdpa", "my_flash", "eager", "paged|attnroute", "owner/kernel"])
def test_names_that_transformers_treats_specially_raise(name):
    with pytest.raises(ArgumentError, match="does not treat specially"):
        register(name)


def test_a_name_of_somebody_else_raises():
    AttentionInterface.register("theirs", forward)
    with pytest.raises(ArgumentError, match="registered by somebody else"):
        register("theirs")
    assert AttentionInterface()["theirs"] is forward


def test_old_versions_of_transformers_raise(monkeypatch):
    def sdpa_mask(batch_size, cache_position, kv_length):
        raise NotImplementedError

    monkeypatch.setattr(mask_interface, "sdpa_mask", sdpa_mask)
    with pytest.raises(ImportError, match=r"q_length and q_offset.*got 5"):
        register()


def test_unregistered_use_fails_as_transformers_says():
    config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=8)
    with pytest.raises(ValueError, match='attn_implementation="attnroute-missing"` is not supported'):
        transformers.LlamaModel._from_config(config, attn_implementation="attnroute-missing")


def test_importing_the_integration_does_not_import_transformers():
    code = (
        "import attnroute.integrations.transformers, sys; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
