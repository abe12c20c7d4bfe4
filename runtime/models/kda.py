"""Kimi delta attention (docs/MODELS.md 3.2), with K3's and Kimi-Linear's gates.

Many tokens are taken in blocks. Within a block the recurrence is a triangular system for the corrections d_t (the WY
form): with P_t the product of the decays up to token t, S_t = P_t (S_0 + Σ_{s≤t} (k_s / P_s) d_sᵀ), hence
d_t = β_t (v_t - S_0ᵀ (P_t k_t) - Σ_{s<t} (P_t k_t · k_s / P_s) d_s), and what is left are matrix products per head.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from container.errors import FormatError
from container.layout import align_up
from container.model import L2_NORM_EPS, KdaConfig, ModelConfig
from runtime.compute import delta_kernels, gates, row_kernels
from runtime.compute.gates import F32
from runtime.compute.matrix import Matrix, multiply_all
from runtime.compute.team import Team
from runtime.memory.scratch import BLOCK_TOKENS
from runtime.models.mlp import RmsNorm
from runtime.state import KdaState
from runtime.trunk import Needs, Trunk, dimensions

_A_LOG_MULTIPLE = 128  # K3 pads its vector of one number per head with zeros to a multiple of this
_STREAMS = ("q", "k", "v")
# Half a block may decay by this factor at most: its inverse, squared where products of two meet, must stay in f32.
# K3's bound of -5 per token never comes near: half a block of 16 decays by exp(-40) at most.
_LEAST_DECAY = math.exp(-80)


class DeltaAttention:
    """One delta-attention layer."""

    def __init__(self, trunk: Trunk, at: str, config: ModelConfig, team: Team) -> None:
        """Read the tensors that `needs` lists. Raises FormatError when a padded A_log is not zero behind its heads."""
        kda = config.kda
        self._config = kda
        self._team = team
        self._projections = [trunk.matrix(f"{at}{stream}_proj.weight") for stream in _STREAMS]
        self._convolutions = [_taps(trunk, f"{at}{stream}_conv1d.weight", kda) for stream in _STREAMS]
        self._forget = [trunk.matrix(f"{at}{name}.weight") for name in ("f_a_proj", "f_b_proj")]
        self._gate = [trunk.matrix(f"{at}{name}.weight") for name in _gate_names(kda)]
        self._beta = trunk.matrix(f"{at}b_proj.weight")
        self._output = trunk.matrix(f"{at}o_proj.weight")
        self._norm = RmsNorm(trunk.array(f"{at}o_norm.weight"), config.rms_norm_eps)
        self._dt_bias = trunk.array(f"{at}dt_bias").reshape(kda.n_heads, kda.head_dim)
        self._rate = np.exp(_per_head(trunk, f"{at}A_log", kda.n_heads))

    @staticmethod
    def needs(at: str, config: ModelConfig) -> Needs:
        """Tensors under the name prefix `at`."""
        kda, hidden = config.kda, config.hidden_size
        needs = dimensions(
            {f"{at}{stream}_proj.weight": (kda.width, hidden) for stream in _STREAMS}
            | {
                f"{at}f_a_proj.weight": (kda.head_dim, hidden),
                f"{at}f_b_proj.weight": (kda.width, kda.head_dim),
                f"{at}b_proj.weight": (kda.n_heads, hidden),
                f"{at}o_proj.weight": (hidden, kda.width),
                f"{at}o_norm.weight": (kda.head_dim,),
                f"{at}dt_bias": (kda.width,),
            }
        )
        widths = (hidden,) if kda.full_rank_gate else (hidden, kda.head_dim)
        rows = (kda.width,) if kda.full_rank_gate else (kda.head_dim, kda.width)
        for name, n_rows, width in zip(_gate_names(kda), rows, widths, strict=True):
            needs[f"{at}{name}.weight"] = ((n_rows, width),)
        for stream in _STREAMS:
            shapes = ((kda.width, 1, kda.conv_kernel), (kda.width, kda.conv_kernel))
            needs[f"{at}{stream}_conv1d.weight"] = shapes
        n_heads = kda.n_heads
        # a writer that flattens 4-D tensors like convolution kernels leaves [1, heads] of [1, 1, heads, 1]
        needs[f"{at}A_log"] = ((n_heads,), (1, 1, n_heads, 1), (1, n_heads), (align_up(n_heads, _A_LOG_MULTIPLE),))
        return needs

    def __call__(self, x: F32, state: KdaState) -> F32:
        """x [T, hidden] → [T, hidden]; `state` moves on by T tokens."""
        *streams, beta, forget, gate = multiply_all([*self._projections, self._beta, self._forget[0], self._gate[0]], x)
        # popped, so that a projection is freed when its convolution has been taken
        q, k, v = (self._convolved(n, streams.pop(0), state.windows[n]) for n in range(3))
        log_decay = self._log_decay(_chain(self._forget[1:], forget))
        row_kernels.sigmoid_rows(beta)
        if len(x) == 1:
            out = np.empty_like(v)
            token = (q[0], k[0], v[0], log_decay[0], beta[0], out[0])
            self._team.run(partial(delta_kernels.delta_step, state.delta, *token), len(state.delta))
        else:
            out = self._chunk(state.delta, q, k, v, log_decay, beta)
        gate = _chain(self._gate[1:], gate).reshape(out.shape)

        def part(start: int, stop: int) -> None:
            rows = out[start:stop].reshape(-1, out.shape[2])
            self._norm.in_place(rows)
            row_kernels.multiply_sigmoid_rows(rows, gate[start:stop].reshape(rows.shape))

        self._team.run(part, len(x))
        return self._output(out.reshape(len(x), -1))

    def _convolved(self, stream: int, projected: F32, window: F32) -> F32:
        """q, k or v [T, channels] after convolution, SiLU and (q and k) norm: [T, heads, head size]."""
        kda = self._config
        out = np.empty((len(projected), kda.n_heads, kda.head_dim), dtype=np.float32)
        length = (kda.head_dim**-0.5, 1.0, None)[stream]

        def part(start: int, stop: int) -> None:
            mine = out[start:stop]
            delta_kernels.conv_silu_rows(
                window, self._convolutions[stream], projected, start, mine.reshape(len(mine), -1)
            )
            if length is not None:
                gates.l2_norm(mine.reshape(-1, kda.head_dim), L2_NORM_EPS, length)

        self._team.run(part, len(out))
        delta_kernels.shift_window(window, projected)
        return out

    def _log_decay(self, raw: F32) -> F32:
        """What the forget projections gave, [T, channels] → logarithms of decays, in place: [T, heads, head size]."""
        raw = raw.reshape(len(raw), *self._dt_bias.shape)
        bound = self._config.gate_lower_bound

        def part(start: int, stop: int) -> None:
            for each in raw[start:stop]:
                if bound is None:
                    delta_kernels.decay_softplus(each, self._dt_bias, self._rate, each)
                else:
                    delta_kernels.decay_bounded(each, self._dt_bias, self._rate, bound, each)

        self._team.run(part, len(raw))
        return raw

    def _chunk(self, state: F32, q: F32, k: F32, v: F32, log_decay: F32, beta: F32) -> F32:
        """The delta rule over T tokens: q, k, v and log_decay [T, heads, head size], beta [T, heads] → like v."""
        out = np.empty_like(v)

        def part(first_head: int, end_head: int) -> None:
            for start in range(0, len(q), BLOCK_TOKENS):
                block = slice(start, min(start + BLOCK_TOKENS, len(q)))
                _delta_block(state, q, k, v, log_decay, beta, out, block, slice(first_head, end_head))

        self._team.run(part, len(state))
        return out


def _delta_block(
    state: F32, q: F32, k: F32, v: F32, log_decay: F32, beta: F32, out: F32, tokens: slice, heads: slice
) -> None:
    """The delta rule for some tokens and heads of state [heads, dk, dv], beta [T, heads] and the rest [T, heads, d]."""
    n_tokens, n_heads, width = tokens.stop - tokens.start, heads.stop - heads.start, q.shape[2]
    scaled_q, scaled_k, inverse_k = np.empty((3, n_heads, n_tokens, width), dtype=np.float32)
    edges = np.empty((n_heads, 2, width), dtype=np.float32)
    at = (tokens.start, heads.start)
    delta_kernels.scale_by_decay(q, k, log_decay, *at, scaled_q, scaled_k, inverse_k, edges)
    mine = state[heads]
    steep = np.flatnonzero(edges.min(axis=(1, 2)) < _LEAST_DECAY)
    before = mine[steep]
    mine *= edges[:, 0, :, None]
    keys = inverse_k.transpose(0, 2, 1)
    corrections = v[tokens, heads].transpose(1, 0, 2) - scaled_k @ mine
    delta_kernels.solve_corrections(scaled_k @ keys, beta[tokens, heads], corrections)
    seen = np.where(np.tri(n_tokens, dtype=bool), scaled_q @ keys, np.float32(0))
    out[tokens, heads] = (scaled_q @ mine + seen @ corrections).transpose(1, 0, 2)
    mine += keys @ corrections
    mine *= edges[:, 1, :, None]
    mine[steep] = before
    for head in steep + heads.start:
        for t in range(tokens.start, tokens.stop):
            delta_kernels.delta_step(state, q[t], k[t], v[t], log_decay[t], beta[t], out[t], head, head + 1)


def _gate_names(kda: KdaConfig) -> tuple[str, ...]:
    return ("g_proj",) if kda.full_rank_gate else ("g_a_proj", "g_b_proj")


def _chain(matrices: list[Matrix], x: F32) -> F32:
    for matrix in matrices:
        x = matrix(x)
    return x


def _taps(trunk: Trunk, name: str, kda: KdaConfig) -> F32:
    """Convolution weights as [kernel, channels]."""
    return np.ascontiguousarray(trunk.array(name).reshape(kda.width, kda.conv_kernel).T)


def _per_head(trunk: Trunk, name: str, n_heads: int) -> F32:
    """The first `n_heads` numbers of a tensor; what follows is padding and must be zero."""
    flat = trunk.array(name).reshape(-1)
    if flat[n_heads:].any():
        raise FormatError(
            f"{trunk.path}: {name}: the model has {n_heads} heads, but the {flat.size} stored numbers are not zero "
            "behind them; the head count or the tensor is wrong"
        )
    return flat[:n_heads]
