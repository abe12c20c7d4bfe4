"""The slow obvious model: whole sequences, dense float64 matrices, no caches, nothing absorbed, nothing shared.

Written from the formulas, not from the runtime; only the unpacking of stored bytes comes from `container`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from container.indices import unpack_indices
from container.layout import ExpertQuant
from container.reader import ContainerReader
from container.records import ExpertRecord
from container.trunk import unpack_rows

F64 = npt.NDArray[np.float64]


def relative_error(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    """The norm of the difference, against the norm of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def dense_expert_matrix(record: ExpertRecord, kind: str, shape: tuple[int, int], books: F64, quant: ExpertQuant) -> F64:
    """[rows, cols] of one matrix; `books` [stages, entries, 8] of its kind."""
    codes = unpack_indices(record.indices[kind], shape, quant)
    vectors = sum(books[stage][codes[:, :, stage]] for stage in range(quant.n_stages))
    return np.reshape(vectors, shape) * record.scales[kind].astype(np.float64)[:, None]


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def rms(x: F64, weight: F64, tolerance: float) -> F64:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + tolerance) * weight


def situ(gate: F64, up: F64, beta: float, linear_beta: float) -> F64:
    return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)


def delta_rule(q: F64, k: F64, v: F64, log_decay: F64, beta: F64) -> F64:
    """One head over a sequence: q, k, log_decay [T, dk], v [T, dv], beta [T] → [T, dv]."""
    state = np.zeros((k.shape[1], v.shape[1]))
    out = np.empty_like(v)
    for t in range(len(q)):
        state = np.diag(np.exp(log_decay[t])) @ state
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        out[t] = state.T @ q[t]
    return out


def causal_softmax(scores: F64) -> F64:
    """scores [T, T] → shares, no position seeing a later one."""
    scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


class Oracle:
    """A container's model in float64."""

    def __init__(self, folder: Path) -> None:
        self.reader = ContainerReader.open(folder)
        self.config = self.reader.model
        self.weight = cache(self._weight)
        self.routing: dict[int, list[list[int]]] = {}

    def _weight(self, name: str) -> F64:
        entry = self.reader.entry(name)
        values, scales = self.reader.read_trunk_rows(entry, 0, entry.size.rows)
        return unpack_rows(values, scales, entry.shape[-1], entry.fmt).reshape(entry.shape).astype(np.float64)

    def logits(self, ids: list[int]) -> tuple[F64, list[F64]]:
        """Logits [T, vocabulary], and the residual stream after each layer [T, hidden]."""
        config = self.config
        p, aside, layers = self.weight("model.embed_tokens.weight")[ids], [], []
        for layer in range(config.n_layers):
            at = f"model.layers.{layer}."
            h = self._mix(aside, p, f"{at}self_attention_res") if aside else p
            starts = config.attn_res_block_size is not None and layer % config.attn_res_block_size == 0
            if starts:
                aside.append(p)
            attention = self._kda if config.is_kda(layer) else self._mla
            a = attention(rms(h, self.weight(f"{at}input_layernorm.weight"), config.rms_norm_eps), f"{at}self_attn.")
            p = a if starts else p + a
            h = self._mix(aside, p, f"{at}mlp_res") if aside else p
            h = rms(h, self.weight(f"{at}post_attention_layernorm.weight"), config.rms_norm_eps)
            p = p + (self._moe(h, layer) if config.is_moe(layer) else self._mlp(h, f"{at}mlp."))
            layers.append(p)
        p = self._mix(aside, p, "model.output_attn_res") if aside else p
        return rms(p, self.weight("model.norm.weight"), config.rms_norm_eps) @ self.weight("lm_head.weight").T, layers

    def _mix(self, aside: list[F64], p: F64, at: str) -> F64:
        stacked = np.stack([*aside, p])
        normed = rms(stacked, self.weight(f"{at}_norm.weight"), self.config.rms_norm_eps)
        scores = normed @ self.weight(f"{at}_proj.weight").reshape(-1)
        shares = np.exp(scores - scores.max(axis=0))
        return np.einsum("nt,nth->th", shares / shares.sum(axis=0), stacked)

    def _linear(self, x: F64, *names: str) -> F64:
        for name in names:
            x = x @ self.weight(f"{name}.weight").T
        return x

    def _convolved(self, x: F64, name: str) -> F64:
        taps = self.weight(name).reshape(x.shape[1], -1)
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), x])
        y = np.stack([np.sum(padded[t : t + taps.shape[1]] * taps.T, axis=0) for t in range(len(x))])
        return y * sigmoid(y)

    def _kda(self, x: F64, at: str) -> F64:
        kda = self.config.kda
        heads = (len(x), kda.n_heads, kda.head_dim)
        q, k, v = (
            self._convolved(self._linear(x, f"{at}{s}_proj"), f"{at}{s}_conv1d.weight").reshape(heads) for s in "qkv"
        )
        q = q / np.sqrt(np.sum(q * q, axis=-1, keepdims=True) + 1e-6) * kda.head_dim**-0.5
        k = k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + 1e-6)
        z = (self._linear(x, f"{at}f_a_proj", f"{at}f_b_proj") + self.weight(f"{at}dt_bias")).reshape(heads)
        rate = np.exp(self.weight(f"{at}A_log").reshape(-1)[: kda.n_heads, None])
        decay = (
            -rate * np.log1p(np.exp(z)) if kda.gate_lower_bound is None else kda.gate_lower_bound * sigmoid(rate * z)
        )
        beta = sigmoid(self._linear(x, f"{at}b_proj"))
        out = np.stack(
            [delta_rule(q[:, h], k[:, h], v[:, h], decay[:, h], beta[:, h]) for h in range(kda.n_heads)], axis=1
        )
        gate_names = ["g_proj"] if kda.full_rank_gate else ["g_a_proj", "g_b_proj"]
        gate = self._linear(x, *(at + name for name in gate_names)).reshape(heads)
        out = rms(out, self.weight(f"{at}o_norm.weight"), self.config.rms_norm_eps) * sigmoid(gate)
        return self._linear(out.reshape(len(x), -1), f"{at}o_proj")

    def _mla(self, x: F64, at: str) -> F64:
        mla = self.config.mla
        if mla.q_lora_rank is None:
            q = self._linear(x, f"{at}q_proj")
        else:
            low = rms(self._linear(x, f"{at}q_a_proj"), self.weight(f"{at}q_a_layernorm.weight"), 1e-6)
            q = self._linear(low, f"{at}q_b_proj")
        q = q.reshape(len(x), mla.n_heads, -1)
        c = self._linear(x, f"{at}kv_a_proj_with_mqa")
        latent = rms(c[:, : mla.kv_lora_rank], self.weight(f"{at}kv_a_layernorm.weight"), 1e-6)
        shared_key = c[:, mla.kv_lora_rank :]
        kv = self._linear(latent, f"{at}kv_b_proj").reshape(len(x), mla.n_heads, -1)
        out = np.empty((len(x), mla.n_heads, mla.v_head_dim))
        for h in range(mla.n_heads):
            key = np.concatenate([kv[:, h, : mla.qk_nope_head_dim], shared_key], axis=1)
            out[:, h] = causal_softmax(q[:, h] @ key.T / np.sqrt(mla.qk_head_dim)) @ kv[:, h, mla.qk_nope_head_dim :]
        out = out.reshape(len(x), -1)
        if mla.output_gate:
            out = out * sigmoid(self._linear(x, f"{at}g_proj"))
        return self._linear(out, f"{at}o_proj")

    def _act(self, gate: F64, up: F64) -> F64:
        if self.config.hidden_act == "silu":
            return gate * sigmoid(gate) * up
        return situ(gate, up, self.config.situ_beta, self.config.situ_linear_beta)

    def _mlp(self, x: F64, at: str) -> F64:
        inner = self._act(self._linear(x, f"{at}gate_proj"), self._linear(x, f"{at}up_proj"))
        return self._linear(inner, f"{at}down_proj")

    def _moe(self, x: F64, layer: int) -> F64:
        moe, at = self.config.moe, f"model.layers.{layer}.block_sparse_moe."
        z = x if moe.latent_size is None else self._linear(x, f"{at}routed_expert_down_proj")
        scores = sigmoid(self._linear(x, f"{at}gate"))
        choice = scores + self.weight(f"{at}gate.e_score_correction_bias")
        y = np.zeros_like(z)
        for t in range(len(x)):
            allowed = self._allowed(choice[t])
            chosen = sorted(allowed, key=lambda e: -choice[t, e])[: moe.top_k]
            self.routing.setdefault(layer, []).append(sorted(chosen))
            total = sum(scores[t, e] for e in chosen) if moe.renormalize and moe.top_k > 1 else 1.0
            for e in chosen:
                y[t] += moe.routed_scaling_factor * scores[t, e] / total * self._expert(z[t], layer, e)
        if moe.latent_size is not None:
            y = self._linear(
                rms(y, self.weight(f"{at}routed_expert_norm.weight"), self.config.rms_norm_eps),
                f"{at}routed_expert_up_proj",
            )
        return y + self._mlp(x, f"{at}shared_experts.")

    def _allowed(self, choice: F64) -> list[int]:
        """Experts of the groups whose two best experts have the largest sum."""
        moe = self.config.moe
        size = moe.n_experts // moe.n_groups
        strength = {g: sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(moe.n_groups)}
        kept = sorted(strength, key=lambda g: -strength[g])[: moe.topk_groups]
        return [e for e in range(moe.n_experts) if e // size in kept]

    def _expert(self, x: F64, layer: int, expert: int) -> F64:
        record = self.reader.read_expert(layer, expert)
        books, quant = self.reader.codebooks(layer).astype(np.float64), self.reader.manifest.expert_quant
        gate, up, down = (
            dense_expert_matrix(record, kind, shape, books[n], quant)
            for n, (kind, shape) in enumerate(self.config.expert_shapes.items())
        )
        return down @ self._act(gate @ x, up @ x)
