"""The Kimi forward pass once more, as differently as the mathematics allows, in numpy float64.

Delta attention is solved as a triangular linear system over the whole sequence instead of stepped through; latent
attention is computed in the latent space, head by head; every expert is evaluated for every token and masked; the
residual stream is recomputed from the list of all outputs each time it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from container.model import ModelConfig

Array = NDArray[np.float64]


class Oracle:
    """One model; `logits(ids)` is the only entry. `routing` and `prefix_sums` hold what the last call saw."""

    def __init__(self, tensors: Mapping[str, Any], config: ModelConfig, *, latent_eps: float = 1e-6) -> None:
        self.w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}
        self.c = config
        self.latent_eps = latent_eps
        self.routing: dict[int, list[set[int]]] = {}
        self.prefix_sums: list[Array] = []

    def logits(self, ids: Sequence[int]) -> Array:
        embedding = self.w["model.embed_tokens.weight"][list(ids)]
        outputs: list[Array] = []  # attention and feed-forward outputs in turn, two per layer
        self.prefix_sums = []
        for layer in range(self.c.n_layers):
            at = f"model.layers.{layer}."
            h = self._read(embedding, outputs, layer, f"{at}self_attention_res")
            h = self._norm(h, f"{at}input_layernorm.weight", self.c.rms_norm_eps)
            attend = self._kda if self.c.is_kda(layer) else self._mla
            outputs.append(attend(f"{at}self_attn.", h))
            h = self._read(embedding, outputs, layer, f"{at}mlp_res")
            h = self._norm(h, f"{at}post_attention_layernorm.weight", self.c.rms_norm_eps)
            if self.c.is_moe(layer):
                outputs.append(self._moe(f"{at}block_sparse_moe.", layer, h))
            else:
                outputs.append(self._mlp(f"{at}mlp.", h, "gate_proj", "up_proj", "down_proj"))
            self.prefix_sums.append(self._parts(embedding, outputs)[-1])
        final = self._read(embedding, outputs, self.c.n_layers, "model.output_attn_res")
        return self._norm(final, "model.norm.weight", self.c.rms_norm_eps) @ self.w["lm_head.weight"].T

    def _parts(self, embedding: Array, outputs: list[Array]) -> list[Array]:
        """Embedding, then sums of runs of `block` layers, the last one perhaps unfinished or just finished."""
        block = self.c.attn_res_block_size
        if block is None or not outputs:
            return [embedding + sum(outputs, np.zeros_like(embedding))]
        runs = [outputs[n : n + 2 * block] for n in range(0, len(outputs), 2 * block)]
        return [embedding, *(np.sum(run, axis=0) for run in runs)]

    def _read(self, embedding: Array, outputs: list[Array], layer: int, name: str) -> Array:
        parts = self._parts(embedding, outputs)
        if len(parts) == 1:
            return parts[0]
        query = self.w[f"{name}_norm.weight"] * self.w[f"{name}_proj.weight"][0]
        mixed = np.empty_like(embedding)
        for t in range(len(embedding)):
            scores = [u[t] @ query / np.sqrt(u[t] @ u[t] / len(query) + self.c.rms_norm_eps) for u in parts]
            shares = np.exp(np.array(scores) - max(scores))
            mixed[t] = sum(share * u[t] for share, u in zip(shares / shares.sum(), parts, strict=True))
        return mixed

    def _norm(self, x: Array, name: str, eps: float) -> Array:
        return x / np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps) * self.w[name]

    def _kda(self, at: str, h: Array) -> Array:
        kda, n_tokens = self.c.kda, len(h)
        convolved = {}
        for part in "qkv":
            x = h @ self.w[f"{at}{part}_proj.weight"].T
            taps = self.w[f"{at}{part}_conv1d.weight"][:, 0]
            y = np.stack([np.convolve(x[:, c], taps[c, ::-1])[:n_tokens] for c in range(kda.width)], axis=1)
            convolved[part] = y * _sigmoid(y)
        raw = h @ self.w[f"{at}f_a_proj.weight"].T @ self.w[f"{at}f_b_proj.weight"].T + self.w[f"{at}dt_bias"]
        beta = _sigmoid(h @ self.w[f"{at}b_proj.weight"].T)
        if kda.full_rank_gate:
            gate = _sigmoid(h @ self.w[f"{at}g_proj.weight"].T)
        else:
            gate = _sigmoid(h @ self.w[f"{at}g_a_proj.weight"].T @ self.w[f"{at}g_b_proj.weight"].T)
        out = np.empty((n_tokens, kda.width))
        for head in range(kda.n_heads):
            own = slice(head * kda.head_dim, (head + 1) * kda.head_dim)
            rate = np.exp(self.w[f"{at}A_log"].ravel()[head])
            if kda.gate_lower_bound is None:
                g = -rate * np.logaddexp(0, raw[:, own])
            else:
                g = kda.gate_lower_bound * _sigmoid(rate * raw[:, own])
            q, k = (
                x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
                for x in (convolved["q"][:, own], convolved["k"][:, own])
            )
            o = _delta_rule(q / np.sqrt(kda.head_dim), k, convolved["v"][:, own], g, beta[:, head])
            out[:, own] = self._norm(o, f"{at}o_norm.weight", self.c.rms_norm_eps) * gate[:, own]
        return out @ self.w[f"{at}o_proj.weight"].T

    def _mla(self, at: str, h: Array) -> Array:
        mla, n_tokens = self.c.mla, len(h)
        nope, rope, value = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        if mla.q_lora_rank is None:
            q = h @ self.w[f"{at}q_proj.weight"].T
        else:
            latent_q = self._norm(h @ self.w[f"{at}q_a_proj.weight"].T, f"{at}q_a_layernorm.weight", self.latent_eps)
            q = latent_q @ self.w[f"{at}q_b_proj.weight"].T
        compressed = h @ self.w[f"{at}kv_a_proj_with_mqa.weight"].T
        latent = self._norm(compressed[:, : mla.kv_lora_rank], f"{at}kv_a_layernorm.weight", self.latent_eps)
        shared = compressed[:, mla.kv_lora_rank :]
        heads = []
        for head in range(mla.n_heads):
            own = q[:, head * (nope + rope) : (head + 1) * (nope + rope)]
            up = self.w[f"{at}kv_b_proj.weight"][head * (nope + value) : (head + 1) * (nope + value)]
            scores = (own[:, :nope] @ up[:nope]) @ latent.T + own[:, nope:] @ shared.T
            shares = np.tril(np.exp((scores - scores.max(1, keepdims=True)) / np.sqrt(nope + rope)))
            heads.append(shares / shares.sum(1, keepdims=True) @ latent @ up[nope:].T)
        out = np.concatenate(heads, axis=1)
        assert out.shape == (n_tokens, mla.n_heads * value)
        if mla.output_gate:
            out = out * _sigmoid(h @ self.w[f"{at}g_proj.weight"].T)
        return out @ self.w[f"{at}o_proj.weight"].T

    def _moe(self, at: str, layer: int, x: Array) -> Array:
        moe = self.c.moe
        scores = _sigmoid(x @ self.w[f"{at}gate.weight"].T)
        shares = np.zeros_like(scores)
        self.routing[layer] = []
        for t, choice in enumerate(scores + self.w[f"{at}gate.e_score_correction_bias"]):
            chosen = set(np.argsort(-choice)[: moe.top_k].tolist())
            self.routing[layer].append(chosen)
            total = sum(scores[t, e] for e in chosen) if moe.renormalize else 1.0
            for e in chosen:
                shares[t, e] = scores[t, e] / total * moe.routed_scaling_factor
        z = x if moe.latent_size is None else x @ self.w[f"{at}routed_expert_down_proj.weight"].T
        every = np.stack([self._mlp(f"{at}experts.{e}.", z, "w1", "w3", "w2") for e in range(moe.n_experts)])
        routed = np.einsum("te,etd->td", shares, every)
        if moe.latent_size is not None:
            if moe.latent_norm:
                routed = self._norm(routed, f"{at}routed_expert_norm.weight", self.c.rms_norm_eps)
            routed = routed @ self.w[f"{at}routed_expert_up_proj.weight"].T
        return routed + self._mlp(f"{at}shared_experts.", x, "gate_proj", "up_proj", "down_proj")

    def _mlp(self, at: str, x: Array, gate_name: str, up_name: str, down_name: str) -> Array:
        gate, up = x @ self.w[f"{at}{gate_name}.weight"].T, x @ self.w[f"{at}{up_name}.weight"].T
        if self.c.hidden_act == "situ":
            beta, linear = self.c.situ_beta, self.c.situ_linear_beta
            hidden = (
                beta * _tanh(gate / beta) * _sigmoid(gate) * (up if linear is None else linear * _tanh(up / linear))
            )
        else:
            hidden = gate * _sigmoid(gate) * up
        return hidden @ self.w[f"{at}{down_name}.weight"].T


def _delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    """Outputs [T, dim] of one head: the corrections d solve (I + diag(β) A) d = diag(β) v, A strictly lower."""
    total = g.cumsum(0)
    decay = np.exp(np.minimum(total[:, None] - total[None], 0))  # [t, s, channel], used for s <= t only
    among_keys = np.tril(np.einsum("tc,sc,tsc->ts", k, k, decay), -1)
    corrections = np.linalg.solve(np.eye(len(q)) + beta[:, None] * among_keys, beta[:, None] * v)
    return np.tril(np.einsum("tc,sc,tsc->ts", q, k, decay)) @ corrections


def _sigmoid(x: Array) -> Array:
    return (1 + np.tanh(x / 2)) / 2


def _tanh(x: Array) -> Array:
    return 1 - 2 / (np.exp(2 * x) + 1)
