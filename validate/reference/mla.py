"""Multi-head latent attention without rotation, over a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from container.model import MlaConfig
from validate.reference.tensors import Weights


def mla_attention(weights: Weights, config: MlaConfig, h: Tensor, latent_norm_eps: float) -> Tensor:
    """Latent attention of one layer: normed input h [T, H] to output [T, H].

    `weights` are those under `model.layers.L.self_attn.`. Sources: DeepSeek-V2, arXiv 2405.04434, here without
    rotation; for K3's output gate its modeling_kimi_linear.py.
    """
    n_tokens, hidden_size = h.shape
    n_heads, value_dim = config.n_heads, config.v_head_dim
    q = _queries(weights, config, h, latent_norm_eps)
    k, v = _keys_and_values(weights, config, h, latent_norm_eps)
    out = causal_attention(q, k, v).reshape(n_tokens, n_heads * value_dim)
    if config.output_gate:
        out = out * torch.sigmoid(weights.linear(h, "g_proj", n_heads * value_dim))
    return weights.linear(out, "o_proj", hidden_size)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ · dim^-0.5) v, no look ahead: q, k [T, heads, dim], v and result [T, heads, dim(v)]."""
    n_tokens = q.shape[0]
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    future = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
    shares = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
    return torch.einsum("hij,jhd->ihd", shares, v)


def _queries(weights: Weights, config: MlaConfig, h: Tensor, eps: float) -> Tensor:
    width = config.n_heads * config.qk_head_dim
    if config.q_lora_rank is None:
        q = weights.linear(h, "q_proj", width)
    else:
        latent = weights.norm(weights.linear(h, "q_a_proj", config.q_lora_rank), "q_a_layernorm", eps)
        q = weights.linear(latent, "q_b_proj", width)
    return q.view(-1, config.n_heads, config.qk_head_dim)


def _keys_and_values(weights: Weights, config: MlaConfig, h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Keys [T, heads, nope + rope] and values [T, heads, v]; only the latent is normed; heads share the rope part."""
    n_heads, nope, rope = config.n_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    compressed = weights.linear(h, "kv_a_proj_with_mqa", config.kv_lora_rank + rope)
    latent, shared_key = torch.split(compressed, [config.kv_lora_rank, rope], dim=-1)
    latent = weights.norm(latent, "kv_a_layernorm", eps)
    expanded = weights.linear(latent, "kv_b_proj", n_heads * (nope + config.v_head_dim))
    by_head = expanded.view(-1, n_heads, nope + config.v_head_dim)
    own_key, value = torch.split(by_head, [nope, config.v_head_dim], dim=-1)
    return torch.cat([own_key, shared_key[:, None, :].expand(-1, n_heads, rope)], dim=-1), value
