"""Containers of real widths for measurements: random numbers of the right size, written about as fast as the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from container.layout import VQ3R
from container.model import ModelConfig
from container.records import RecordLayout
from tests.containers import build_container, kimi_linear_config

# Widths of Kimi-Linear-48B-A3B, whose 27 layers have 256 experts each and whose vocabulary has 163,840 entries.
_KIMI_LINEAR_WIDTHS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_token": 8,
    "vocab_size": 20_480,
}


def real_width_config(*, n_layers: int, n_experts: int) -> dict[str, Any]:
    """Kimi-Linear's config.json with fewer layers and experts: one dense layer, latent attention in every fourth."""
    linear = {"num_heads": 32, "head_dim": 128, "full_attn_layers": list(range(4, n_layers + 1, 4))}
    numbers = {"num_hidden_layers": n_layers, "num_experts": n_experts, "linear_attn_config": linear}
    return kimi_linear_config(**_KIMI_LINEAR_WIDTHS, **numbers)


def kimi_linear_slice(folder: Path, *, n_layers: int = 5, n_experts: int = 32) -> Path:
    """Write the slice that decoding and prefill are timed on, 0.6 GB, into `folder` and return it."""
    return build_container(folder, real_width_config(n_layers=n_layers, n_experts=n_experts), random_integers=True)


def container_of_size(folder: Path, n_bytes: int, *, n_experts: int = 256) -> Path:
    """Write a container of Kimi-Linear's widths, with as many layers as make its banks at least `n_bytes`."""
    shapes = ModelConfig.from_config(real_width_config(n_layers=2, n_experts=n_experts)).expert_shapes
    bank_bytes = n_experts * RecordLayout(VQ3R, shapes).stride_bytes
    return kimi_linear_slice(folder, n_layers=1 + -(-n_bytes // bank_bytes), n_experts=n_experts)
