"""Kimi delta attention over a whole sequence, one token after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from container.errors import CheckError
from container.model import L2_NORM_EPS, KdaConfig
from validate.reference.tensors import Weights, rms_norm

# (q, k, v, g, beta) to (outputs, last state), as `delta_recurrence` does it
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

# K3 stores A_log padded with zeros to whole multiples of this many heads
A_LOG_PADDING = 128


def delta_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule from an empty state: outputs [T, heads, dim] and the last state [heads, dim(k), dim(v)].

    q (already scaled), k, v and the log decay g are [T, heads, dim], beta is [T, heads]. Per head and token:
    S ← diag(exp g) S;  S ← S + k (beta · (v - Sᵀk))ᵀ;  o = Sᵀq.
    """
    n_tokens, n_heads, dim = k.shape
    state = v.new_zeros(n_heads, dim, v.shape[2])
    outputs = []
    for t in range(n_tokens):
        state = torch.exp(g[t])[:, :, None] * state
        remembered = torch.einsum("hk,hkv->hv", k[t], state)
        correction = beta[t][:, None] * (v[t] - remembered)
        state = state + k[t][:, :, None] * correction[:, None, :]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs), state


def kda_attention(
    weights: Weights, config: KdaConfig, h: Tensor, norm_eps: float, recurrence: Recurrence = delta_recurrence
) -> Tensor:
    """Delta attention of one layer: normed input h [T, H] to output [T, H].

    `weights` are those under `model.layers.L.self_attn.`; another `recurrence` must compute the same as
    `delta_recurrence`. Sources: Kimi Linear, arXiv 2510.26692; for K3's gate and full-rank output gate its
    modeling_kimi_linear.py.
    """
    by_head = (h.shape[0], config.n_heads, config.head_dim)
    q, k, v = (_project_and_convolve(weights, part, config, h).view(by_head) for part in ("q", "k", "v"))
    q = l2_norm(q) * config.head_dim**-0.5
    k = l2_norm(k)
    g = _log_decay(weights, config, h)
    beta = torch.sigmoid(weights.linear(h, "b_proj", config.n_heads))
    out, _ = recurrence(q, k, v, g, beta)
    normed = rms_norm(out, weights.fetch("o_norm.weight", (config.head_dim,)), norm_eps)
    gated = normed.reshape(h.shape[0], config.width) * torch.sigmoid(_output_gate(weights, config, h))
    return weights.linear(gated, "o_proj", h.shape[1])


def short_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """Causal convolution of each channel by itself: x [T, C], taps [C, K] to [T, C].

    y_t = Σ_j taps[:, j] · x_{t-K+1+j}: the last tap meets the current token; zeros stand before the first.
    """
    n_tokens, kernel = x.shape[0], taps.shape[1]
    padded = torch.cat([x.new_zeros(kernel - 1, x.shape[1]), x])
    out = torch.zeros_like(x)
    for j in range(kernel):
        out += taps[:, j] * padded[j : j + n_tokens]
    return out


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(Σx² + 1e-6) over the last dimension (fla's rule: added to the sum, not compared)."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def softplus_log_decay(a_log: Tensor, z: Tensor) -> Tensor:
    """Kimi-Linear's gate: g = -exp(A_log) · softplus(z), softplus linear above 20."""
    return -torch.exp(a_log) * functional.softplus(z, threshold=20.0)


def bounded_log_decay(a_log: Tensor, z: Tensor, lower_bound: float) -> Tensor:
    """K3's gate: g = lower_bound · sigmoid(exp(A_log) · z), between lower_bound and 0."""
    return lower_bound * torch.sigmoid(torch.exp(a_log) * z)


def _project_and_convolve(weights: Weights, part: str, config: KdaConfig, h: Tensor) -> Tensor:
    projected = weights.linear(h, f"{part}_proj", config.width)
    shapes = (config.width, 1, config.conv_kernel), (config.width, config.conv_kernel)
    taps = weights.fetch(f"{part}_conv1d.weight", *shapes).reshape(shapes[1])
    return functional.silu(short_convolution(projected, taps))


def _log_decay(weights: Weights, config: KdaConfig, h: Tensor) -> Tensor:
    raw = weights.linear(weights.linear(h, "f_a_proj", config.head_dim), "f_b_proj", config.width)
    z = (raw + weights.fetch("dt_bias", (config.width,))).view(-1, config.n_heads, config.head_dim)
    a_log = _a_log(weights, config)[:, None]
    if config.gate_lower_bound is None:
        return softplus_log_decay(a_log, z)
    return bounded_log_decay(a_log, z, config.gate_lower_bound)


def _a_log(weights: Weights, config: KdaConfig) -> Tensor:
    """A_log per head [heads], from Kimi-Linear's [1, 1, heads, 1], also flattened, or K3's vector padded with zeros."""
    heads, padded_heads = config.n_heads, -(-config.n_heads // A_LOG_PADDING) * A_LOG_PADDING
    stored = weights.fetch("A_log", (1, 1, heads, 1), (padded_heads,), (heads,), (1, heads)).flatten()
    n_used = int(torch.count_nonzero(stored[config.n_heads :]))
    if n_used:
        raise CheckError(
            f"reference: tensor `{weights.prefix}A_log` must be zero after its first {config.n_heads} entries "
            f"(one per head), found {n_used} non-zero; the config's head count does not fit this tensor"
        )
    return stored[: config.n_heads]


def _output_gate(weights: Weights, config: KdaConfig, h: Tensor) -> Tensor:
    if config.full_rank_gate:
        return weights.linear(h, "g_proj", config.width)
    return weights.linear(weights.linear(h, "g_a_proj", config.head_dim), "g_b_proj", config.width)
