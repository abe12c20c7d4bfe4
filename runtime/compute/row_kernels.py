"""Numba loops over many tokens at once, beside the matrix products: gates, mixtures, and what attention needs.

Each runs on one thread without the interpreter's lock, writes into its caller's arrays and checks no bounds. Rows of a
result never depend on which other rows the same call computes.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import numpy.typing as npt

from runtime.compute import elementary
from runtime.compute.elementary import OPTIONS
from runtime.compute.gates import F32, FAST

Ids = npt.NDArray[np.int64]


# --- element by element ---------------------------------------------------------------------------------------


@nb.njit(**OPTIONS)
def multiply_sigmoid_rows(x: F32, gate: F32) -> None:
    """x · sigmoid(gate), in place in x; both [rows, n]."""
    for r in range(x.shape[0]):
        row, factors = x[r], gate[r]
        for c in range(row.size):
            row[c] *= elementary.sigmoid(factors[c])


@nb.njit(**OPTIONS)
def add_columns(rows: F32, scales: F32, tokens: Ids, weights: F32, total: F32) -> None:
    """total[r, tokens[n]] += scales[r] · weights[n] · rows[r, n], for no token twice; rows [rows, n], scales [rows]."""
    for r in range(rows.shape[0]):
        target, row, scale = total[r], rows[r], scales[r]
        for n in range(row.size):
            target[tokens[n]] += scale * weights[n] * row[n]


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def mixture_scores(sums: F32, weight: F32, tolerance: float, out: F32) -> None:
    """out[t] = (row · weight) / root of (mean square of the row + tolerance), for sums [T, hidden], out [T]."""
    for t in range(sums.shape[0]):
        squares, product = 0.0, 0.0
        for c in range(sums.shape[1]):
            squares += np.float64(sums[t, c]) * sums[t, c]
            product += np.float64(sums[t, c]) * weight[c]
        out[t] = product / math.sqrt(squares / sums.shape[1] + tolerance)


@nb.njit(**OPTIONS)
def softmax_columns(scores: F32) -> None:
    """Each column of scores [n, T] becomes shares that sum to 1."""
    for t in range(scores.shape[1]):
        largest = scores[0, t]
        for n in range(scores.shape[0]):
            largest = max(largest, scores[n, t])
        total = 0.0
        for n in range(scores.shape[0]):
            scores[n, t] = math.exp(scores[n, t] - largest)
            total += scores[n, t]
        for n in range(scores.shape[0]):
            scores[n, t] /= total


@nb.njit(**OPTIONS)
def add_scaled(rows: F32, factors: F32, out: F32) -> None:
    """out[t] += factors[t] · rows[t], for rows and out [T, n]."""
    for t in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            out[t, c] += factors[t] * rows[t, c]


# --- delta attention over a chunk -----------------------------------------------------------------------------


@nb.njit(**OPTIONS)
def conv_silu_rows(window: F32, weight: F32, x: F32, start: int, out: F32) -> None:
    """`conv_silu` of the tokens from `start` on: x [T, channels] is the whole chunk, out [tokens, channels] theirs.

    window [kernel - 1, channels] holds the inputs before the chunk, oldest first, and is not changed.
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
            out[t, c] *= elementary.sigmoid(out[t, c])


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
                decay = edges[h, 1, c] * elementary.exp(log_decay[start + t, head, c])
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
                edges[h, 0, c] = decay * elementary.exp(log_decay[start + t, head, c])


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


# --- latent attention over a chunk ----------------------------------------------------------------------------


@nb.njit(**OPTIONS)
def running_softmax(scores: F32, n_visible: int, scale: float, largest: F32, total: F32, mixed: F32) -> None:
    """Take one block of positions into a softmax that runs over blocks; `scores` become its weights.

    scores [queries, positions]; query t sees the first `n_visible + t` positions. largest and total [queries] and
    mixed [queries, latent] hold what earlier blocks came to; they are brought to the new largest score.
    """
    for t in range(scores.shape[0]):
        row, visible = scores[t], min(max(n_visible + t, 0), scores.shape[1])
        top = largest[t]
        for p in range(visible):
            row[p] *= np.float32(scale)
            top = max(top, row[p])
        added = 0.0
        for p in range(visible):
            row[p] = elementary.exp(row[p] - top)
            added += row[p]
        row[visible:] = 0
        if visible:
            kept = np.float32(math.exp(largest[t] - top))
            largest[t] = top
            total[t] = total[t] * kept + added
            mixed[t] *= kept
