"""The tensor inventory and the configs of the checkpoint builders, against the released models' own figures."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from container.model import ModelConfig, canonical_config
from tests.checkpoints import K3_DIMENSIONS, TensorSpec, k3_config, kimi_linear_config, tensor_table

K3_DATA = Path(__file__).parents[2] / "shared" / "data" / "k3"
needs_k3_data = pytest.mark.skipif(not K3_DATA.is_dir(), reason="the release's config and index are not here")

K3_RELEASED: dict[str, Any] = {
    **K3_DIMENSIONS,
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "mm_hidden_size": 1024,
        "qkv_hidden_size": 1536,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": 27,
    },
}
KIMI_LINEAR_DIMENSIONS: dict[str, Any] = {
    "num_hidden_layers": 27,
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "moe_intermediate_size": 1024,
    "linear_attn_config": {"num_heads": 32, "head_dim": 128},
}


@functools.cache
def k3_table() -> list[TensorSpec]:
    """Half a million tensors; made once."""
    return tensor_table(k3_config(**K3_RELEASED))


def test_k3_inventory_has_the_released_size() -> None:
    table = k3_table()
    assert len(table) == len({spec.name for spec in table}) == 497_220
    assert sum(spec.n_bytes for spec in table) == 1_560_860_324_864
    per_layer = {
        layer: [spec for spec in table if spec.name.startswith(f"language_model.model.layers.{layer}.")]
        for layer in (0, 1, 92)
    }
    assert {layer: (len(specs), sum(s.n_bytes for s in specs)) for layer, specs in per_layer.items()} == {
        0: (23, 2_341_213_184),
        1: (5_404, 16_990_092_800),
        92: (5_398, 16_566_684_160),
    }


def test_kimi_linear_inventory_has_the_released_size() -> None:
    table = tensor_table(kimi_linear_config(**KIMI_LINEAR_DIMENSIONS))
    assert len(table) == len({spec.name for spec in table}) == 20_493
    assert sum(prod(spec.shape) for spec in table) == 49_122_681_728


def test_k3_inventory_has_the_released_shapes() -> None:
    attention, moe = "layers.{}.self_attn.", "layers.1.block_sparse_moe."
    expected = {
        "model.embed_tokens.weight": ((163840, 7168), "BF16"),
        "model.output_attn_res_proj.weight": ((1, 7168), "BF16"),
        "layers.0.mlp.gate_proj.weight": ((33792, 7168), "BF16"),
        "layers.0.mlp.down_proj.weight": ((7168, 33792), "BF16"),
        "layers.0.mlp_res_proj.weight": ((1, 7168), "BF16"),
        attention.format(0) + "q_proj.weight": ((12288, 7168), "BF16"),
        attention.format(0) + "q_conv1d.weight": ((12288, 1, 4), "F32"),
        attention.format(0) + "A_log": ((128,), "F32"),
        attention.format(0) + "dt_bias": ((12288,), "F32"),
        attention.format(0) + "f_a_proj.weight": ((128, 7168), "BF16"),
        attention.format(0) + "f_b_proj.weight": ((12288, 128), "BF16"),
        attention.format(0) + "b_proj.weight": ((96, 7168), "BF16"),
        attention.format(0) + "o_norm.weight": ((128,), "F32"),
        attention.format(0) + "o_proj.weight": ((7168, 12288), "BF16"),
        attention.format(92) + "q_a_proj.weight": ((1536, 7168), "BF16"),
        attention.format(92) + "q_b_proj.weight": ((18432, 1536), "BF16"),
        attention.format(92) + "kv_a_proj_with_mqa.weight": ((576, 7168), "BF16"),
        attention.format(92) + "kv_b_proj.weight": ((24576, 512), "BF16"),
        attention.format(92) + "g_proj.weight": ((12288, 7168), "BF16"),
        attention.format(92) + "o_proj.weight": ((7168, 12288), "BF16"),
        moe + "gate.weight": ((896, 7168), "BF16"),
        moe + "gate.e_score_correction_bias": ((896,), "F32"),
        moe + "routed_expert_down_proj.weight": ((3584, 7168), "BF16"),
        moe + "routed_expert_up_proj.weight": ((7168, 3584), "BF16"),
        moe + "shared_experts.gate_proj.weight": ((6144, 7168), "BF16"),
        moe + "shared_experts.down_proj.weight": ((7168, 6144), "BF16"),
        moe + "experts.895.w1.weight_packed": ((3072, 1792), "U8"),
        moe + "experts.895.w2.weight_packed": ((3584, 1536), "U8"),
        moe + "experts.895.w2.weight_scale": ((3584, 96), "U8"),
        moe + "experts.895.w3.weight_scale": ((3072, 112), "U8"),
        "vision_tower.patch_embed.proj.weight": ((1024, 3, 14, 14), "BF16"),
        "vision_tower.encoder.blocks.26.wqkv.weight": ((4608, 1024), "BF16"),
        "vision_tower.encoder.blocks.26.wo.weight": ((1024, 1536), "BF16"),
        "vision_tower.encoder.blocks.26.mlp.fc0.weight": ((4096, 1024), "BF16"),
        "mm_projector.proj.2.weight": ((7168, 4096), "BF16"),
    }
    table = _shapes(k3_table(), "language_model.")
    assert {name: table[name] for name in expected} == expected


def test_kimi_linear_inventory_has_the_released_shapes() -> None:
    attention, moe = "layers.{}.self_attn.", "layers.1.block_sparse_moe."
    expected = {
        "lm_head.weight": ((163840, 2304), "BF16"),
        attention.format(0) + "k_proj.weight": ((4096, 2304), "BF16"),
        attention.format(0) + "k_conv1d.weight": ((4096, 1, 4), "BF16"),
        attention.format(0) + "A_log": ((1, 1, 32, 1), "F32"),
        attention.format(0) + "dt_bias": ((4096,), "F32"),
        attention.format(0) + "g_a_proj.weight": ((128, 2304), "BF16"),
        attention.format(0) + "g_b_proj.weight": ((4096, 128), "BF16"),
        attention.format(0) + "o_norm.weight": ((128,), "BF16"),
        attention.format(26) + "q_proj.weight": ((6144, 2304), "BF16"),
        attention.format(26) + "kv_b_proj.weight": ((8192, 512), "BF16"),
        attention.format(26) + "o_proj.weight": ((2304, 4096), "BF16"),
        moe + "gate.e_score_correction_bias": ((256,), "BF16"),
        moe + "experts.255.w1.weight": ((1024, 2304), "BF16"),
        moe + "experts.255.w2.weight": ((2304, 1024), "BF16"),
        moe + "shared_experts.down_proj.weight": ((2304, 1024), "BF16"),
    }
    table = _shapes(tensor_table(kimi_linear_config(**KIMI_LINEAR_DIMENSIONS)), "")
    assert {name: table[name] for name in expected} == expected


def _shapes(table: list[TensorSpec], prefix: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype by name; layers without what stands before `layers`."""
    return {
        name.removeprefix(f"{prefix}model." if ".layers." in name else prefix): (shape, dtype)
        for name, shape, dtype in table
    }


@needs_k3_data
def test_k3_inventory_has_the_names_of_the_released_index() -> None:
    config = json.loads((K3_DATA / "config.json").read_text())
    with gzip.open(K3_DATA / "model.safetensors.index.json.gz") as file:
        index = json.load(file)
    table = tensor_table(config)
    assert {spec.name for spec in table} == set(index["weight_map"])
    assert sum(spec.n_bytes for spec in table) == index["metadata"]["total_size"]


@needs_k3_data
def test_k3_config_has_the_keys_and_constants_of_the_released_one() -> None:
    released = json.loads((K3_DATA / "config.json").read_text())
    ours = k3_config()
    dimensions = K3_RELEASED.keys() - {"num_shared_experts"}  # of which ours has as many
    ids = {"bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"}
    nested = {"text_config", "vision_config", "linear_attn_config"}
    for real, small in ((released, ours), (released["text_config"], ours["text_config"])):
        assert real.keys() == small.keys()
        differing = {key for key in real if real[key] != small[key]}
        assert differing <= dimensions | ids | nested
    assert released["vision_config"].keys() == ours["vision_config"].keys()
    linear = "linear_attn_config"
    assert released["text_config"][linear].keys() == ours["text_config"][linear].keys()
    full_size = k3_config(**K3_RELEASED)
    assert released["text_config"][linear] == full_size["text_config"][linear]
    assert released["vision_config"] == full_size["vision_config"]


@pytest.mark.parametrize("make_config", [k3_config, kimi_linear_config])
def test_small_models_show_the_released_features(make_config: Callable[..., dict[str, Any]]) -> None:
    config = make_config()
    model = ModelConfig.from_config(canonical_config(config))
    kinds = {(model.is_kda(layer), model.is_moe(layer)) for layer in range(model.n_layers)}
    assert kinds == {(True, False), (True, True), (False, True)}
    assert model.moe.intermediate_size % 64  # index tiles have padding
    large = {spec.name for spec in tensor_table(config) if prod(spec.shape) >= 65_536 and len(spec.shape) > 1}
    prefix = "language_model." if config["model_type"] == "kimi_k3" else ""
    trunk = ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]
    assert {f"{prefix}{name}.weight" for name in trunk} <= large
    if prefix:
        assert {f"vision_tower.{name}.weight" for name in ("patch_embed.proj", "encoder.blocks.0.wqkv")} <= large
