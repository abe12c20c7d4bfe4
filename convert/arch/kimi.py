"""Kimi-Linear and Kimi K3: one family, told apart by config keys (docs/MODELS.md 2).

K3 adds a `language_model.` prefix, latent experts, attention residuals, low-rank queries, output gates and a
vision tower; each is declared where its config key asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from container.config_keys import MAX_SIZE
from container.errors import ConfigError, shown
from container.model import MAX_LAYERS, ModelConfig
from convert.arch.base import Architecture, ExpertNames, Precision, TrunkTensor

MODEL_TYPES = ("kimi_linear", "kimi_k3")
Shape = tuple[int, ...]

# K3 pads A_log to whole blocks of 128 (docs/MODELS.md 2.1); Kimi-Linear keeps [1, 1, heads, 1].
A_LOG_BLOCK = 128


def describe(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a canonical config. Raises ConfigError when a key is missing or unsupported."""
    model = ModelConfig.from_config(config)
    outer = config.get("_outer")
    vision = None if outer is None else _object(outer, "_outer").get("vision_config")
    prefix = "language_model." if outer is not None else ""
    trunk = [TrunkTensor(f"{prefix}{name}", f"{prefix}{name}", *rest) for name, *rest in _text_tensors(model)]
    if vision is not None:
        trunk += _vision_tensors(_object(vision, "vision_config"))
    return Architecture(
        arch="kimi-k3" if outer is not None else "kimi-linear",
        tensor_prefix=prefix,
        config=config,
        model=model,
        trunk=tuple(trunk),
        experts=ExpertNames(
            f"{prefix}model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{{matrix}}.weight",
            {"gate": "w1", "up": "w3", "down": "w2"},
        ),
    )


def _text_tensors(model: ModelConfig) -> Iterator[tuple[Any, ...]]:
    """(name without prefix, shape, layer, precision) of every text tensor outside the experts."""
    hidden = model.hidden_size
    yield "model.embed_tokens.weight", (model.vocab_size, hidden), None, Precision.HIGH
    for layer in range(model.n_layers):
        parts = {**_norms(model), **_attention(model, layer), **_feed_forward(model, layer)}
        for name, shape in parts.items():
            precision = Precision.HIGH if name == "block_sparse_moe.gate.weight" else Precision.NORMAL
            yield f"model.layers.{layer}.{name}", shape, layer, precision
    yield "model.norm.weight", (hidden,), None, Precision.NORMAL
    if model.attn_res_block_size is not None:
        yield "model.output_attn_res_norm.weight", (hidden,), None, Precision.NORMAL
        yield "model.output_attn_res_proj.weight", (1, hidden), None, Precision.NORMAL
    yield "lm_head.weight", (model.vocab_size, hidden), None, Precision.HIGH


def _norms(model: ModelConfig) -> dict[str, Shape]:
    hidden = model.hidden_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if model.attn_res_block_size is not None:
        for part in ("self_attention", "mlp"):
            shapes[f"{part}_res_norm.weight"] = (hidden,)
            shapes[f"{part}_res_proj.weight"] = (1, hidden)
    return shapes


def _attention(model: ModelConfig, layer: int) -> dict[str, Shape]:
    shapes = _kda(model) if model.is_kda(layer) else _mla(model)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _kda(model: ModelConfig) -> dict[str, Shape]:
    kda, hidden = model.kda, model.hidden_size
    shapes: dict[str, Shape] = {}
    for part in ("q", "k", "v"):
        shapes[f"{part}_proj.weight"] = (kda.width, hidden)
        shapes[f"{part}_conv1d.weight"] = (kda.width, 1, kda.conv_kernel)
    if kda.gate_lower_bound is None:
        shapes["A_log"] = (1, 1, kda.n_heads, 1)
    else:
        shapes["A_log"] = (-(-kda.n_heads // A_LOG_BLOCK) * A_LOG_BLOCK,)
    shapes["dt_bias"] = (kda.width,)
    shapes["f_a_proj.weight"] = (kda.head_dim, hidden)
    shapes["f_b_proj.weight"] = (kda.width, kda.head_dim)
    shapes["b_proj.weight"] = (kda.n_heads, hidden)
    if kda.full_rank_gate:
        shapes["g_proj.weight"] = (kda.width, hidden)
    else:
        shapes["g_a_proj.weight"] = (kda.head_dim, hidden)
        shapes["g_b_proj.weight"] = (kda.width, kda.head_dim)
    shapes["o_norm.weight"] = (kda.head_dim,)
    shapes["o_proj.weight"] = (hidden, kda.width)
    return shapes


def _mla(model: ModelConfig) -> dict[str, Shape]:
    mla, hidden = model.mla, model.hidden_size
    shapes: dict[str, Shape] = {}
    queries = mla.n_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        shapes["q_proj.weight"] = (queries, hidden)
    else:
        shapes["q_a_proj.weight"] = (mla.q_lora_rank, hidden)
        shapes["q_a_layernorm.weight"] = (mla.q_lora_rank,)
        shapes["q_b_proj.weight"] = (queries, mla.q_lora_rank)
    shapes["kv_a_proj_with_mqa.weight"] = (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    shapes["kv_a_layernorm.weight"] = (mla.kv_lora_rank,)
    shapes["kv_b_proj.weight"] = (mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    if mla.output_gate:
        shapes["g_proj.weight"] = (mla.n_heads * mla.v_head_dim, hidden)
    shapes["o_proj.weight"] = (hidden, mla.n_heads * mla.v_head_dim)
    return shapes


def _feed_forward(model: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden, moe = model.hidden_size, model.moe
    if not model.is_moe(layer):
        return _mlp("mlp", hidden, model.intermediate_size)
    shapes: dict[str, Shape] = {
        "block_sparse_moe.gate.weight": (moe.n_experts, hidden),
        "block_sparse_moe.gate.e_score_correction_bias": (moe.n_experts,),
    }
    if moe.latent_size is not None:
        shapes["block_sparse_moe.routed_expert_down_proj.weight"] = (moe.latent_size, hidden)
        if moe.latent_norm:
            shapes["block_sparse_moe.routed_expert_norm.weight"] = (moe.latent_size,)
        shapes["block_sparse_moe.routed_expert_up_proj.weight"] = (hidden, moe.latent_size)
    if moe.n_shared_experts:
        shapes |= _mlp("block_sparse_moe.shared_experts", hidden, moe.n_shared_experts * moe.intermediate_size)
    return shapes


def _mlp(name: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def _vision_tensors(vision: Mapping[str, Any]) -> list[TrunkTensor]:
    """K3's tower and projector (docs/MODELS.md 2.1 and 4), all of them kept at 8 bits."""
    return [
        TrunkTensor(name, name, shape, None, Precision.HIGH, flattened=name == "vision_tower.patch_embed.proj.weight")
        for name, shape in _vision_shapes(vision).items()
    ]


def _vision_shapes(vision: Mapping[str, Any]) -> dict[str, Shape]:
    width, patch, qkv = (_size(vision, key) for key in ("vt_hidden_size", "patch_size", "qkv_hidden_size"))
    inner, out = _size(vision, "vt_intermediate_size"), _size(vision, "text_hidden_size")
    height_width = _size(vision, "init_pos_emb_height"), _size(vision, "init_pos_emb_width")
    merged = width * math.prod(_merge_kernel(vision))
    shapes: dict[str, Shape] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb.weight": (*height_width, width),
    }
    for block in range(_size(vision, "vt_num_hidden_layers", most=MAX_LAYERS)):
        name = f"vision_tower.encoder.blocks.{block}"
        shapes[f"{name}.norm0.weight"] = (width,)
        shapes[f"{name}.norm1.weight"] = (width,)
        shapes[f"{name}.wqkv.weight"] = (3 * qkv, width)
        shapes[f"{name}.wo.weight"] = (width, qkv)
        shapes[f"{name}.mlp.fc0.weight"] = (inner, width)
        shapes[f"{name}.mlp.fc1.weight"] = (width, inner)
    shapes["vision_tower.encoder.final_layernorm.weight"] = (width,)
    shapes["mm_projector.proj.0.weight"] = (merged, merged)
    shapes["mm_projector.proj.2.weight"] = (out, merged)
    shapes["mm_projector.post_norm.weight"] = (out,)
    return shapes


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"config: `{name}` must be an object, found {shown(value)}")
    return value


def _size(vision: Mapping[str, Any], key: str, *, most: int = MAX_SIZE) -> int:
    value: Any = vision.get(key)
    if not _is_size(value, most):
        raise ConfigError(
            f"config: `vision_config.{key}` must be a whole number from 1 to {most}, found {shown(value)}"
        )
    return int(value)


def _merge_kernel(vision: Mapping[str, Any]) -> list[int]:
    kernel = vision.get("merge_kernel_size")
    if not isinstance(kernel, list) or len(kernel) != 2 or not all(_is_size(size) for size in kernel):
        raise ConfigError(f"config: `vision_config.merge_kernel_size` must list two sizes, found {shown(kernel)}")
    return kernel


def _is_size(value: Any, most: int = MAX_SIZE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
