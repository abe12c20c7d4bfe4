"""Which tensors a container's trunk must hold, from its config alone, and in which shapes.

Derived from what the reference forward pass fetches, not from the converter's tables, so that each can contradict
the other. A tensor may be allowed in several shapes where releases and writers differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from container.config_keys import MAX_SIZE
from container.errors import ConfigError, shown
from container.model import MAX_LAYERS, ModelConfig

Shape = tuple[int, ...]
Named = Iterator[tuple[str, tuple[Shape, ...]]]

A_LOG_PADDING = 128  # K3 stores A_log padded with zeros to whole multiples of this many heads
IMAGE_CHANNELS = 3


def trunk_tensors(model: ModelConfig, config: Mapping[str, Any], prefix: str) -> dict[str, tuple[Shape, ...]]:
    """Full name → allowed stored shapes of every trunk tensor; `config` is the manifest's, `prefix` its tensor prefix.

    Raises ConfigError when the config has a vision tower whose shape it does not tell.
    """
    tensors = {prefix + name: shapes for name, shapes in _text(model)}
    outer = config.get("_outer")
    vision = outer.get("vision_config") if isinstance(outer, Mapping) else None
    if vision is not None:
        tensors |= _vision(vision)
    return tensors


def _text(model: ModelConfig) -> Named:
    hidden = model.hidden_size
    yield from _matrix("model.embed_tokens", model.vocab_size, hidden)
    for layer in range(model.n_layers):
        at = f"model.layers.{layer}."
        yield from _vector(f"{at}input_layernorm.weight", hidden)
        yield from _vector(f"{at}post_attention_layernorm.weight", hidden)
        if model.attn_res_block_size is not None:
            yield from _mix(f"{at}self_attention_res", hidden)
            yield from _mix(f"{at}mlp_res", hidden)
        yield from (_delta_attention if model.is_kda(layer) else _latent_attention)(model, f"{at}self_attn.")
        if model.is_moe(layer):
            yield from _experts(model, f"{at}block_sparse_moe.")
        else:
            yield from _gated_mlp(f"{at}mlp.", hidden, model.intermediate_size)
    yield from _vector("model.norm.weight", hidden)
    if model.attn_res_block_size is not None:
        yield from _mix("model.output_attn_res", hidden)
    yield from _matrix("lm_head", model.vocab_size, hidden)


def _delta_attention(model: ModelConfig, at: str) -> Named:
    kda, hidden = model.kda, model.hidden_size
    for part in ("q", "k", "v"):
        yield from _matrix(f"{at}{part}_proj", kda.width, hidden)
        yield f"{at}{part}_conv1d.weight", ((kda.width, 1, kda.conv_kernel), (kda.width, kda.conv_kernel))
    yield from _low_rank(f"{at}f", hidden, kda.head_dim, kda.width)
    if kda.full_rank_gate:
        yield from _matrix(f"{at}g_proj", kda.width, hidden)
    else:
        yield from _low_rank(f"{at}g", hidden, kda.head_dim, kda.width)
    yield from _matrix(f"{at}b_proj", kda.n_heads, hidden)
    heads, padded = kda.n_heads, -(-kda.n_heads // A_LOG_PADDING) * A_LOG_PADDING
    yield f"{at}A_log", ((heads,), (1, heads), (1, 1, heads, 1), (padded,))
    yield from _vector(f"{at}dt_bias", kda.width)
    yield from _vector(f"{at}o_norm.weight", kda.head_dim)
    yield from _matrix(f"{at}o_proj", hidden, kda.width)


def _latent_attention(model: ModelConfig, at: str) -> Named:
    mla, hidden = model.mla, model.hidden_size
    n_queries, n_values = mla.n_heads * mla.qk_head_dim, mla.n_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        yield from _matrix(f"{at}q_proj", n_queries, hidden)
    else:
        yield from _low_rank(f"{at}q", hidden, mla.q_lora_rank, n_queries)
        yield from _vector(f"{at}q_a_layernorm.weight", mla.q_lora_rank)
    yield from _matrix(f"{at}kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    yield from _vector(f"{at}kv_a_layernorm.weight", mla.kv_lora_rank)
    yield from _matrix(f"{at}kv_b_proj", mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    if mla.output_gate:
        yield from _matrix(f"{at}g_proj", n_values, hidden)
    yield from _matrix(f"{at}o_proj", hidden, n_values)


def _experts(model: ModelConfig, at: str) -> Named:
    """Everything around the routed experts, which are not in the trunk."""
    moe, hidden = model.moe, model.hidden_size
    yield from _matrix(f"{at}gate", moe.n_experts, hidden)
    yield from _vector(f"{at}gate.e_score_correction_bias", moe.n_experts)
    if moe.latent_size is not None:
        yield from _matrix(f"{at}routed_expert_down_proj", moe.latent_size, hidden)
        yield from _matrix(f"{at}routed_expert_up_proj", hidden, moe.latent_size)
        if moe.latent_norm:
            yield from _vector(f"{at}routed_expert_norm.weight", moe.latent_size)
    if moe.n_shared_experts:
        yield from _gated_mlp(f"{at}shared_experts.", hidden, moe.n_shared_experts * moe.intermediate_size)


def _gated_mlp(at: str, width: int, inner: int) -> Named:
    yield from _matrix(f"{at}gate_proj", inner, width)
    yield from _matrix(f"{at}up_proj", inner, width)
    yield from _matrix(f"{at}down_proj", width, inner)


def _low_rank(name: str, n_in: int, rank: int, n_out: int) -> Named:
    yield from _matrix(f"{name}_a_proj", rank, n_in)
    yield from _matrix(f"{name}_b_proj", n_out, rank)


def _mix(name: str, hidden: int) -> Named:
    """Norm and projection of one attention-residual reader."""
    yield from _vector(f"{name}_norm.weight", hidden)
    yield from _matrix(f"{name}_proj", 1, hidden)


def _matrix(name: str, rows: int, cols: int) -> Named:
    yield f"{name}.weight", ((rows, cols),)


def _vector(name: str, n: int) -> Named:
    yield name, ((n,),)


def _vision(vision: Any) -> dict[str, tuple[Shape, ...]]:
    """Tower and projector, as K3 names them; a four-dimensional kernel is stored flattened."""
    if not isinstance(vision, Mapping):
        raise ConfigError(f"config: `_outer.vision_config` must be an object, found {shown(vision)}")
    width, qkv, inner = (_count(vision, f"{key}_size") for key in ("vt_hidden", "qkv_hidden", "vt_intermediate"))
    patch, out = _count(vision, "patch_size"), _count(vision, "text_hidden_size")
    merged = width * prod(_merge_kernel(vision))
    shapes: dict[str, Shape] = {
        "vision_tower.patch_embed.proj": (width, IMAGE_CHANNELS * patch * patch),
        "vision_tower.patch_embed.pos_emb": (
            _count(vision, "init_pos_emb_height"),
            _count(vision, "init_pos_emb_width"),
            width,
        ),
        "vision_tower.encoder.final_layernorm": (width,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (out, merged),
        "mm_projector.post_norm": (out,),
    }
    for block in range(_count(vision, "vt_num_hidden_layers", most=MAX_LAYERS)):
        at = f"vision_tower.encoder.blocks.{block}."
        shapes |= {f"{at}norm0": (width,), f"{at}norm1": (width,)}
        shapes |= {f"{at}wqkv": (3 * qkv, width), f"{at}wo": (width, qkv)}
        shapes |= {f"{at}mlp.fc0": (inner, width), f"{at}mlp.fc1": (width, inner)}
    return {f"{name}.weight": (shape,) for name, shape in shapes.items()}


def _merge_kernel(vision: Mapping[str, Any]) -> list[int]:
    kernel = vision.get("merge_kernel_size")
    if not isinstance(kernel, list) or len(kernel) != 2 or not all(type(n) is int and 1 <= n <= 64 for n in kernel):
        raise ConfigError(f"config: `vision_config.merge_kernel_size` must be two small numbers, found {shown(kernel)}")
    return kernel


def _count(vision: Mapping[str, Any], key: str, *, most: int = MAX_SIZE) -> int:
    value = vision.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(
            f"config: `vision_config.{key}` must be a whole number from 1 to {most}, found {shown(value)}"
        )
    return value
