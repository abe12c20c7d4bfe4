"""The loops of delta attention (docs/MODELS.md 3.2): convolution, decays, the delta rule for one token and in blocks.

Numba loops on the calling thread, without the interpreter's lock; they check no bounds. What a head gets, or a token of
the convolution, does not depend on which others the same call takes.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from runtime.compute.elementary import OPTIONS, exp, sigmoid, softplus
from runtime.compute.gates import F32, FAST


@nb.njit(cache=True, nogil=True, error_model="numpy")
def decay_bounded(raw: F32, bias: F32, rate: F32, bound: float, out: F32) -> None:
    """out = bound · sigmoid(rate[head] · (raw + bias)) (docs/MODELS.md 3.2); all but rate [heads, dk]."""
    for h in range(raw.shape[0]):
        for c in range(raw.shape[1]):
            out[h, c] = np.float32(bound) * sigmoid(rate[h] * (raw[h, c] + bias[h, c]))


@nb.njit(cache=True, nogil=True, error_model="numpy")
def decay_softplus(raw: F32, bias: F32, rate: F32, out: F32) -> None:
    """out = -rate[head] · softplus(raw + bias): Kimi-Linear's log decay."""
    for h in range(raw.shape[0]):
        for c in range(raw.shape[1]):
            out[h, c] = -rate[h] * softplus(raw[h, c] + bias[h, c])


@nb.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)
def delta_step(state: F32, q: F32, k: F32, v: F32, log_decay: F32, beta: F32, out: F32, start: int, stop: int) -> None:
    """One token of the delta rule (docs/MODELS.md 3.2, point 5) for heads start to stop - 1.

    S ← diag(exp(log_decay)) S; d = β (v - Sᵀk); S ← S + k dᵀ; out = Sᵀq. `state` [heads, dk, dv] is updated; q, k
    and log_decay [heads, dk], v and out [heads, dv], beta [heads]. Sums over dk run in f64, since the state carries
    their rounding along.
    """
    n_rows, n_columns = state.shape[1], state.shape[2]
    correction, read = np.empty(n_columns), np.empty(n_columns)
    for h in range(start, stop):
        for j in range(n_columns):
            correction[j] = read[j] = 0
        for i in range(n_rows):
            key, decay = np.float64(k[h, i]), exp(log_decay[h, i])
            for j in range(n_columns):
                state[h, i, j] *= decay
                correction[j] += key * state[h, i, j]
        for j in range(n_columns):
            correction[j] = beta[h] * (v[h, j] - correction[j])
        for i in range(n_rows):
            key, query = np.float64(k[h, i]), np.float64(q[h, i])
            for j in range(n_columns):
                state[h, i, j] += np.float32(key * correction[j])
                read[j] += query * state[h, i, j]
        for j in range(n_columns):
            out[h, j] = read[j]


@nb.njit(**OPTIONS)
def conv_silu_rows(window: F32, weight: F32, x: F32, start: int, out: F32) -> None:
    """Convolution over time, then SiLU, of some tokens of the chunk x [T, channels]: out [tokens, channels].

    The tokens are those from `start` on. window [kernel - 1, channels] holds the inputs before the chunk, oldest first,
    and is not changed.
    """
    n_past, n_channels = window.shape
    for t in range(out.shape[0]):
        for c in range(n_channels):
            out[t, c] = weight[n_past, c] * x[start + t, c]
        for tap in range(n_past):
            at = start + t + tap - n_past
            if at >= 0:
                for c in range(n_channels):
                    out[t, c] += weight[tap, c] * x[at, c]
            else:
                for c in range(n_channels):
                    out[t, c] += weight[tap, c] * window[n_past + at, c]
        for c in range(n_channels):
            out[t, c] *= sigmoid(out[t, c])


@nb.njit(**OPTIONS)
def shift_window(window: F32, x: F32) -> None:
    """The last inputs, oldest first, after those of the chunk x [T, channels]: window [kernel - 1, channels]."""
    n_past, n_tokens = window.shape[0], x.shape[0]
    for t in range(n_past):
        at = n_tokens + t - n_past
        for c in range(window.shape[1]):
            window[t, c] = x[at, c] if at >= 0 else window[n_past + at, c]


@nb.njit(**OPTIONS)
def scale_by_decay(
    q: F32,
    k: F32,
    log_decay: F32,
    start: int,
    first_head: int,
    scaled_q: F32,
    scaled_k: F32,
    inverse_k: F32,
    edges: F32,
) -> None:
    """Queries and keys of one block as they meet each other and the state.

    q, k and log_decay [T, heads, dk]; the block begins at token `start` and head `first_head`. With P_t the product of
    the decays up to token t, divided by its value at the block's middle: scaled_q = q · P, scaled_k = k · P and
    inverse_k = k / P, each [block heads, block tokens, dk]. `edges` [block heads, 2, dk]: decay from before the block
    to its middle, and from the middle to its end.
    """
    n_heads, n_tokens, width = scaled_q.shape
    middle = n_tokens // 2
    for h in range(n_heads):
        head = first_head + h
        for c in range(width):
            edges[h, 0, c] = 1
            edges[h, 1, c] = 1
        for t in range(middle, n_tokens):
            for c in range(width):
                decay = edges[h, 1, c] * exp(log_decay[start + t, head, c])
                edges[h, 1, c] = decay
                scaled_q[h, t, c] = q[start + t, head, c] * decay
                scaled_k[h, t, c] = k[start + t, head, c] * decay
                inverse_k[h, t, c] = k[start + t, head, c] / decay
        for t in range(middle - 1, -1, -1):
            for c in range(width):
                decay = edges[h, 0, c]
                scaled_q[h, t, c] = q[start + t, head, c] / decay
                scaled_k[h, t, c] = k[start + t, head, c] / decay
                inverse_k[h, t, c] = k[start + t, head, c] * decay
                edges[h, 0, c] = decay * exp(log_decay[start + t, head, c])


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def solve_corrections(overlap: F32, beta: F32, corrections: F32) -> None:
    """Forward substitution d_t = β_t (d_t - Σ_{s<t} overlap[t, s] d_s), in place in `corrections`.

    corrections [heads, tokens, dv], overlap [heads, tokens, tokens], of which what lies below the
    diagonal is read; beta [tokens, heads].
    """
    for h in range(corrections.shape[0]):
        for t in range(corrections.shape[1]):
            row = corrections[h, t]
            for s in range(t):
                factor, earlier = overlap[h, t, s], corrections[h, s]
                for j in range(row.size):
                    row[j] -= factor * earlier[j]
            for j in range(row.size):
                row[j] *= beta[t, h]
