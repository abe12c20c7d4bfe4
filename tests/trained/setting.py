"""What is trained and how: the model's shape and the training's numbers, at full and at toy size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.checkpoints import k3_config
from tests.trained.vocabulary import Vocabulary

# K3's parts at about a hundredth of its width. Matrices of the delta attention have 65,536 elements, so that a
# container stores them in 4 bits; expert matrices are whole 64-row tiles and whole MXFP4 groups.
FULL_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "num_experts": 36,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
    "attn_res_block_size": 2,
    "max_position_embeddings": 4096,
    "linear_attn_config": {"num_heads": 8, "head_dim": 64},
}
TOY_SHAPE: dict[str, Any] = FULL_SHAPE | {
    "hidden_size": 32,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "linear_attn_config": {"num_heads": 2, "head_dim": 16},
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training run. Steps are optimiser steps; a learning rate rises linearly and falls along a cosine."""

    shape: dict[str, Any] = field(default_factory=lambda: FULL_SHAPE)
    n_ranks: int = 960
    n_specials: int = 64
    seed: int = 0
    sequence: int = 256  # tokens
    batch: int = 8  # sequences
    n_steps: int = 600
    warm_up: int = 50
    learning_rate: float = 3e-3
    n_rounded_steps: int = 120  # with the weights rounded as they will be stored
    rounded_learning_rate: float = 6e-4
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of a step's gradient
    replaced: float = 0.1  # share of input tokens that a random one stands in for, against learning by heart
    dropout: float = 0.1  # share of embedding and attention outputs set to zero, likewise
    bias_step: float = 2e-3  # by which a router's bias is moved per step


TOY = Setting(
    shape=TOY_SHAPE, n_ranks=300, sequence=32, batch=4, n_steps=8, warm_up=2, n_rounded_steps=4, learning_rate=1e-2
)


def config_json(setting: Setting, vocabulary: Vocabulary) -> dict[str, Any]:
    """The config.json of the model: the release's keys, without a vision tower."""
    ids = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.end_id, "pad_token_id": vocabulary.pad_id}
    config = k3_config(**setting.shape, vocab_size=vocabulary.size, **ids) | ids
    for key in ("vision_config", "image_placeholder", "media_placeholder_token_id"):
        del config[key]
    return config
