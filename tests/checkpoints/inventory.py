"""Every tensor of a checkpoint, from its config alone: name, shape and stored dtype.

The tables of the two releases, written out once more for the tests, so that they can contradict the converter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from container.model import ModelConfig, canonical_config

DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
A_LOG_MULTIPLE = 128  # K3 stores its per-head A_log padded with zeros to a multiple of this


class TensorSpec(NamedTuple):
    """One tensor of a shard, with the dtype spelled as safetensors does."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        """Size in the shard."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def is_k3(config: Mapping[str, Any]) -> bool:
    """True for Kimi K3's wrapper, False for Kimi-Linear's flat config."""
    return bool(config["model_type"] == "kimi_k3")


def tensor_table(config: Mapping[str, Any], *, resident_mxfp4: bool = False) -> list[TensorSpec]:
    """All tensors of the release that `config` (its config.json) describes, layer by layer.

    K3's routed experts are MXFP4 pairs when the config has a `quantization_config`; `resident_mxfp4` packs the
    shared experts and the two latent projections too, as the small community checkpoints of K3 do.
    """
    model = ModelConfig.from_config(canonical_config(config))
    if not is_k3(config):
        return list(_kimi_linear(model))
    packed = "quantization_config" in config["text_config"]
    language = _k3_language(model, packed=packed, resident_packed=packed and resident_mxfp4)
    prefixed = [spec._replace(name=f"language_model.{spec.name}") for spec in language]
    return [*prefixed, *_projector(config["vision_config"]), *_vision_tower(config["vision_config"])]


def _k3_language(model: ModelConfig, *, packed: bool, resident_packed: bool) -> Iterator[TensorSpec]:
    h = model.hidden_size
    for layer in range(model.n_layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield _weight(at + name, h)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            yield _weight(at + name, 1, h)
        if model.is_kda(layer):
            yield from _k3_kda(model, at + "self_attn.")
        else:
            yield from _mla(model, at + "self_attn.")
        if model.is_moe(layer):
            yield from _k3_moe(model, at + "block_sparse_moe.", packed=packed, resident_packed=resident_packed)
        else:
            yield from _mlp(at + "mlp.", h, model.intermediate_size)
    yield from _head(model)
    yield _weight("model.output_attn_res_norm", h)
    yield _weight("model.output_attn_res_proj", 1, h)


def _kimi_linear(model: ModelConfig) -> Iterator[TensorSpec]:
    h = model.hidden_size
    for layer in range(model.n_layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield _weight(at + name, h)
        if model.is_kda(layer):
            yield from _kimi_linear_kda(model, at + "self_attn.")
        else:
            yield from _mla(model, at + "self_attn.")
        if model.is_moe(layer):
            yield from _kimi_linear_moe(model, at + "block_sparse_moe.")
        else:
            yield from _mlp(at + "mlp.", h, model.intermediate_size)
    yield from _head(model)


def _head(model: ModelConfig) -> Iterator[TensorSpec]:
    yield _weight("lm_head", model.vocab_size, model.hidden_size)
    yield _weight("model.embed_tokens", model.vocab_size, model.hidden_size)
    yield _weight("model.norm", model.hidden_size)


def _kda_projections(model: ModelConfig, at: str) -> Iterator[TensorSpec]:
    kda, h = model.kda, model.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        yield _weight(at + name, kda.width, h)
    yield _weight(at + "f_a_proj", kda.head_dim, h)
    yield _weight(at + "f_b_proj", kda.width, kda.head_dim)
    yield _weight(at + "b_proj", kda.n_heads, h)
    yield _weight(at + "o_proj", h, kda.width)
    yield TensorSpec(at + "dt_bias", (kda.width,), "F32")


def _k3_kda(model: ModelConfig, at: str) -> Iterator[TensorSpec]:
    kda = model.kda
    yield from _kda_projections(model, at)
    yield _weight(at + "g_proj", kda.width, model.hidden_size)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield _weight(at + name, kda.width, 1, kda.conv_kernel, dtype="F32")
    yield TensorSpec(at + "A_log", (-(-kda.n_heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,), "F32")
    yield _weight(at + "o_norm", kda.head_dim, dtype="F32")


def _kimi_linear_kda(model: ModelConfig, at: str) -> Iterator[TensorSpec]:
    kda = model.kda
    yield from _kda_projections(model, at)
    yield _weight(at + "g_a_proj", kda.head_dim, model.hidden_size)
    yield _weight(at + "g_b_proj", kda.width, kda.head_dim)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield _weight(at + name, kda.width, 1, kda.conv_kernel)
    yield TensorSpec(at + "A_log", (1, 1, kda.n_heads, 1), "F32")
    yield _weight(at + "o_norm", kda.head_dim)


def _mla(model: ModelConfig, at: str) -> Iterator[TensorSpec]:
    mla, h = model.mla, model.hidden_size
    query = mla.n_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        yield _weight(at + "q_proj", query, h)
    else:
        yield _weight(at + "q_a_proj", mla.q_lora_rank, h)
        yield _weight(at + "q_a_layernorm", mla.q_lora_rank)
        yield _weight(at + "q_b_proj", query, mla.q_lora_rank)
    yield _weight(at + "kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, h)
    yield _weight(at + "kv_a_layernorm", mla.kv_lora_rank)
    yield _weight(at + "kv_b_proj", mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    if mla.output_gate:
        yield _weight(at + "g_proj", mla.n_heads * mla.v_head_dim, h)
    yield _weight(at + "o_proj", h, mla.n_heads * mla.v_head_dim)


def _mlp(at: str, width: int, inner: int, *, packed: bool = False) -> Iterator[TensorSpec]:
    yield from _linear(at + "gate_proj", inner, width, packed=packed)
    yield from _linear(at + "up_proj", inner, width, packed=packed)
    yield from _linear(at + "down_proj", width, inner, packed=packed)


def _k3_moe(model: ModelConfig, at: str, *, packed: bool, resident_packed: bool) -> Iterator[TensorSpec]:
    moe, h = model.moe, model.hidden_size
    yield from _router(model, at, bias_dtype="F32")
    yield from _linear(at + "routed_expert_down_proj", model.expert_width, h, packed=resident_packed)
    yield _weight(at + "routed_expert_norm", model.expert_width)
    yield from _linear(at + "routed_expert_up_proj", h, model.expert_width, packed=resident_packed)
    shared = moe.n_shared_experts * moe.intermediate_size
    yield from _mlp(at + "shared_experts.", h, shared, packed=resident_packed)
    yield from _experts(model, at, packed=packed)


def _kimi_linear_moe(model: ModelConfig, at: str) -> Iterator[TensorSpec]:
    shared = model.moe.n_shared_experts * model.moe.intermediate_size
    yield from _router(model, at, bias_dtype="BF16")
    yield from _mlp(at + "shared_experts.", model.hidden_size, shared)
    yield from _experts(model, at, packed=False)


def _router(model: ModelConfig, at: str, *, bias_dtype: str) -> Iterator[TensorSpec]:
    yield _weight(at + "gate", model.moe.n_experts, model.hidden_size)
    yield TensorSpec(at + "gate.e_score_correction_bias", (model.moe.n_experts,), bias_dtype)


def _experts(model: ModelConfig, at: str, *, packed: bool) -> Iterator[TensorSpec]:
    inner, outer = model.moe.intermediate_size, model.expert_width
    for expert in range(model.moe.n_experts):
        for name, rows, cols in (("w1", inner, outer), ("w2", outer, inner), ("w3", inner, outer)):
            yield from _linear(f"{at}experts.{expert}.{name}", rows, cols, packed=packed)


def _projector(vision: Mapping[str, Any]) -> Iterator[TensorSpec]:
    merged = vision["mm_hidden_size"] * prod(vision["merge_kernel_size"])
    yield _weight("mm_projector.proj.0", merged, merged)
    yield _weight("mm_projector.proj.2", vision["text_hidden_size"], merged)
    yield _weight("mm_projector.post_norm", vision["text_hidden_size"])


def _vision_tower(vision: Mapping[str, Any]) -> Iterator[TensorSpec]:
    width, qkv, patch = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["patch_size"]
    yield _weight("vision_tower.patch_embed.proj", width, 3, patch, patch)
    yield _weight(
        "vision_tower.patch_embed.pos_emb", vision["init_pos_emb_height"], vision["init_pos_emb_width"], width
    )
    for number in range(vision["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{number}."
        yield _weight(at + "norm0", width)
        yield _weight(at + "norm1", width)
        yield _weight(at + "wqkv", 3 * qkv, width)
        yield _weight(at + "wo", width, qkv)
        yield _weight(at + "mlp.fc0", vision["vt_intermediate_size"], width)
        yield _weight(at + "mlp.fc1", width, vision["vt_intermediate_size"])
    yield _weight("vision_tower.encoder.final_layernorm", width)


def _weight(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name + ".weight", shape, dtype)


def _linear(name: str, rows: int, cols: int, *, packed: bool) -> Iterator[TensorSpec]:
    """One matrix: a plain tensor, or its MXFP4 pair with the bytes first."""
    if packed:
        yield TensorSpec(name + ".weight_packed", (rows, cols // 2), "U8")
        yield TensorSpec(name + ".weight_scale", (rows, cols // 32), "U8")
    else:
        yield _weight(name, rows, cols)
