"""Latent attention without rotation (docs/MODELS.md 3.3), with kv_b_proj absorbed.

The cache holds the latent, not keys and values: with W_k and W_v the two parts of a head's kv_b_proj,
q · (W_k c) = (W_kᵀ q) · c and Σ a_t (W_v c_t) = W_v (Σ a_t c_t), so both products are taken once per token
instead of once per cached position. Many tokens are taken head by head, in tiles of queries and blocks of positions
with a softmax that runs over the blocks: what that needs in memory does not grow with the context.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from container.model import LATENT_NORM_EPS, MlaConfig, ModelConfig
from runtime.compute import attention_kernels, products, row_kernels
from runtime.compute.gates import F32
from runtime.compute.team import Team
from runtime.memory.scratch import BLOCK_POSITIONS, TILE_QUERIES
from runtime.models.mlp import RmsNorm
from runtime.state import LatentCache
from runtime.trunk import Needs, Trunk, dimensions


class LatentAttention:
    """One latent-attention layer."""

    def __init__(self, trunk: Trunk, at: str, config: ModelConfig, team: Team) -> None:
        """Read the tensors that `needs` lists."""
        mla = config.mla
        self._config = mla
        self._team = team
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
        """x [T, hidden] → [T, hidden]; the tokens join `cache` first, since each attends to itself."""
        latent, rotary = np.split(self._latent(x), [self._config.kv_lora_rank], axis=1)
        cache.append(self._latent_norm(np.ascontiguousarray(latent)), rotary)
        query = self._query(x if self._query_norm is None else self._query_norm(self._query_down(x)))
        query = query.reshape(len(x), self._config.n_heads, self._config.qk_head_dim)
        out = self._one(query, cache) if len(x) == 1 else self._many(query, cache)
        if self._gate is not None:
            gate = self._gate(x)
            self._team.run(
                lambda start, stop: row_kernels.multiply_sigmoid_rows(out[start:stop], gate[start:stop]), len(x)
            )
        return self._output(out)

    def _one(self, query: F32, cache: LatentCache) -> F32:
        """query [1, heads, nope + rope] → [1, heads · value size]."""
        mla = self._config
        stride, nope = mla.qk_nope_head_dim + mla.v_head_dim, mla.qk_nope_head_dim
        absorbed = self._key_value.transposed_heads(query[0, :, :nope], stride=stride, first=0)
        absorbed = np.concatenate([absorbed, query[0, :, nope:]], axis=1)
        mixed = np.empty((mla.n_heads, mla.kv_lora_rank), dtype=np.float32)
        attention = partial(attention_kernels.latent_attention, cache.rows, absorbed, mla.qk_head_dim**-0.5, mixed)
        self._team.run(attention, mla.n_heads)
        return self._key_value.matvec_heads(mixed, stride=stride, first=nope, count=mla.v_head_dim).reshape(1, -1)

    def _many(self, query: F32, cache: LatentCache) -> F32:
        """query [T, heads, nope + rope] → [T, heads · value size]; the last T positions of `cache` are its tokens."""
        mla = self._config
        out = np.empty((len(query), mla.n_heads, mla.v_head_dim), dtype=np.float32)

        def part(first_head: int, end_head: int) -> None:
            for head in range(first_head, end_head):
                self._head(head, query[:, head], cache.rows, out[:, head])

        self._team.run(part, mla.n_heads)
        return out.reshape(len(query), -1)

    def _head(self, head: int, query: F32, rows: F32, out: F32) -> None:
        """One head: query [T, nope + rope], rows [positions, latent + rope], out [T, value size]."""
        mla = self._config
        stride, nope, latent = mla.qk_nope_head_dim + mla.v_head_dim, mla.qk_nope_head_dim, mla.kv_lora_rank
        weights = products.unpacked(self._key_value, slice(head * stride, (head + 1) * stride))
        position = len(rows) - len(query)
        for start in range(0, len(query), TILE_QUERIES):
            tile = query[start : start + TILE_QUERIES]
            absorbed = np.concatenate([np.matmul(tile[:, :nope], weights[:nope]), tile[:, nope:]], axis=1)
            mixed = self._mixed(absorbed, rows[: position + start + len(tile)], latent)
            np.matmul(mixed, weights[nope:].T, out=out[start : start + len(tile)])

    def _mixed(self, queries: F32, rows: F32, latent: int) -> F32:
        """Softmax attention of queries [n, latent + rope], the tokens of the last n of `rows`: [n, latent]."""
        n_queries, scale = len(queries), self._config.qk_head_dim**-0.5
        largest = np.full(n_queries, -np.inf, dtype=np.float32)
        total = np.zeros(n_queries, dtype=np.float32)
        mixed = np.zeros((n_queries, latent), dtype=np.float32)
        for start in range(0, len(rows), BLOCK_POSITIONS):
            block = rows[start : start + BLOCK_POSITIONS]
            scores = np.matmul(queries, block.T)
            attention_kernels.running_softmax(scores, len(rows) - n_queries + 1 - start, scale, largest, total, mixed)
            mixed += np.matmul(scores, block[:, :latent])
        mixed /= total[:, None]
        return mixed


def _query_shapes(mla: MlaConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    n_rows = mla.n_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        return {"q_proj": (n_rows, hidden)}
    return {
        "q_a_proj": (mla.q_lora_rank, hidden),
        "q_a_layernorm": (mla.q_lora_rank,),
        "q_b_proj": (n_rows, mla.q_lora_rank),
    }
