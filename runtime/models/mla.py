"""Latent attention without rotation for one token (docs/MODELS.md 3.3), with kv_b_proj absorbed.

The cache holds the latent, not keys and values: with W_k and W_v the two parts of a head's kv_b_proj,
q · (W_k c) = (W_kᵀ q) · c and Σ a_t (W_v c_t) = W_v (Σ a_t c_t), so both products are taken once per token
instead of once per cached position.
"""

from __future__ import annotations

import numpy as np

from container.model import LATENT_NORM_EPS, MlaConfig, ModelConfig
from runtime import gates, kernels
from runtime.gates import F32
from runtime.models.mlp import RmsNorm
from runtime.state import LatentCache
from runtime.trunk import Needs, Trunk, dimensions


class LatentAttention:
    """One latent-attention layer."""

    def __init__(self, trunk: Trunk, at: str, config: ModelConfig) -> None:
        """Read the tensors that `needs` lists."""
        mla = config.mla
        self._config = mla
        if mla.q_lora_rank is None:
            self._query_norm = None
            self._query = trunk.matrix(f"{at}q_proj.weight")
        else:
            self._query_down = trunk.matrix(f"{at}q_a_proj.weight")
            self._query_norm = RmsNorm(trunk.array(f"{at}q_a_layernorm.weight"), LATENT_NORM_EPS)
            self._query = trunk.matrix(f"{at}q_b_proj.weight")
        self._latent = trunk.matrix(f"{at}kv_a_proj_with_mqa.weight")
        self._latent_norm = RmsNorm(trunk.array(f"{at}kv_a_layernorm.weight"), LATENT_NORM_EPS)
        self._key_value = trunk.matrix(f"{at}kv_b_proj.weight")
        self._gate = trunk.matrix(f"{at}g_proj.weight") if mla.output_gate else None
        self._output = trunk.matrix(f"{at}o_proj.weight")

    @staticmethod
    def needs(at: str, config: ModelConfig) -> Needs:
        """Tensors under the name prefix `at`."""
        mla, hidden = config.mla, config.hidden_size
        n_values = mla.n_heads * mla.v_head_dim
        shapes = _query_shapes(mla, hidden) | {
            "kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
            "kv_a_layernorm": (mla.kv_lora_rank,),
            "kv_b_proj": (mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
            "o_proj": (hidden, n_values),
        }
        if mla.output_gate:
            shapes["g_proj"] = (n_values, hidden)
        return dimensions({f"{at}{name}.weight": shape for name, shape in shapes.items()})

    def __call__(self, x: F32, cache: LatentCache) -> F32:
        """x [hidden] → [hidden]; the token joins `cache` first, since it attends to itself."""
        mla = self._config
        latent, rotary = np.split(self._latent.matvec(x), [mla.kv_lora_rank])
        cache.append(self._latent_norm(latent), rotary)
        mixed = np.empty((mla.n_heads, mla.kv_lora_rank), dtype=np.float32)
        kernels.latent_attention(cache.rows, self._absorbed_query(x), mla.qk_head_dim**-0.5, mixed)
        stride = mla.qk_nope_head_dim + mla.v_head_dim
        values = self._key_value.matvec_heads(mixed, stride=stride, first=mla.qk_nope_head_dim, count=mla.v_head_dim)
        out = values.reshape(-1)
        if self._gate is not None:
            gates.multiply_sigmoid(out, self._gate.matvec(x), out)
        return self._output.matvec(out)

    def _absorbed_query(self, x: F32) -> F32:
        """The query as it meets the cache: [heads, latent + rope]."""
        mla = self._config
        if self._query_norm is not None:
            x = self._query_norm(self._query_down.matvec(x))
        query = self._query.matvec(x).reshape(mla.n_heads, mla.qk_head_dim)
        stride = mla.qk_nope_head_dim + mla.v_head_dim
        absorbed = self._key_value.transposed_heads(query[:, : mla.qk_nope_head_dim], stride=stride, first=0)
        return np.concatenate([absorbed, query[:, mla.qk_nope_head_dim :]], axis=1)


def _query_shapes(mla: MlaConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    n_rows = mla.n_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        return {"q_proj": (n_rows, hidden)}
    return {
        "q_a_proj": (mla.q_lora_rank, hidden),
        "q_a_layernorm": (mla.q_lora_rank,),
        "q_b_proj": (n_rows, mla.q_lora_rank),
    }
