"""Small models of diffusers with random weights, one of each way in which its models call attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    """A model class with a small configuration.

    Attributes:
        model: Name of the class.
        settings: Arguments of the class.
        inputs: Makes the arguments of its forward.
        asks: Whether its attention asks diffusers' backends, or calls torch's function itself.
    """

    model: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    asks: bool


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its inputs, the same ones each time."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = getattr(diffusers, family.model)(**family.settings)
    return model.eval(), family.inputs()


def _text(width: int, length: int = 7) -> Tensor:
    return torch.randn(2, length, width)


TIME = torch.tensor([1.0, 2.0])
UNET = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
FAMILIES = {
    "flux": Family(
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": torch.randn(2, 16, 4),
            "encoder_hidden_states": _text(32),
            "pooled_projections": torch.randn(2, 32),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(7, 3),
            "timestep": TIME,
        },
        asks=True,
    ),
    "wan": Family(
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 256,
            "ffn_dim": 32,
            "num_layers": 2,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "encoder_hidden_states": _text(16),
            "timestep": TIME,
        },
        asks=True,
    ),
    "qwen_image": Family(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        lambda: {
            "hidden_states": torch.randn(2, 16, 16),
            "encoder_hidden_states": _text(16),
            "encoder_hidden_states_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]).bool(),
            "timestep": TIME,
            "img_shapes": [(1, 4, 4)] * 2,
        },
        asks=True,
    ),
    "stable_diffusion": Family(
        "UNet2DConditionModel",
        UNET,
        lambda: {
            "sample": torch.randn(2, 4, 16, 16),
            "timestep": TIME,
            "encoder_hidden_states": _text(32),
        },
        asks=False,
    ),
    "stable_diffusion, padded": Family(
        "UNet2DConditionModel",
        UNET,
        lambda: {
            "sample": torch.randn(2, 4, 16, 16),
            "timestep": TIME,
            "encoder_hidden_states": _text(32),
            "encoder_attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
        },
        asks=False,
    ),
    "stable_diffusion_3": Family(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "encoder_hidden_states": _text(32),
            "pooled_projections": torch.randn(2, 64),
            "timestep": TIME,
        },
        asks=False,
    ),
    "autoencoder": Family(
        "AutoencoderKL",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 8,
            "latent_channels": 4,
        },
        lambda: {"sample": torch.randn(2, 3, 16, 16)},
        asks=False,
    ),
}
