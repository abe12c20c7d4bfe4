"""The arithmetic that walks stored weights: numba kernels, one thread each, without the interpreter's lock.

Every kernel writes into arrays its caller allocated and checks no bounds: callers pass matching shapes.
Sums run in f32 over independent partial sums (`FAST` lets the compiler split a dot product over vector lanes);
long ones run in two levels, so that rounding grows with the root of a short length. The order of a sum depends
on the shapes alone, so results are repeatable.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import numpy.typing as npt

from container.layout import GROUP_SIZE, TILE_ROWS, VEC_DIM
from runtime.gates import F32, FAST, sigmoid

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]

Q4G_ZERO = 8  # stored nibble of the value 0
HALF_GROUP = GROUP_SIZE // 2
# Vectors (of an expert matrix) or positions (of a latent cache) that are summed before they join the total.
SPAN = 64


# --- trunk matrices -------------------------------------------------------------------------------------------
# Rows may belong to several heads: row i of head h is stored row `h * stride + first + i`. A plain matrix is one
# head. Grouped formats take x in groups, padded with zeros; Q4G takes even and odd elements apart, since a byte
# holds one of each.


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def f32_matvec(values: F32, _scales: F32, x: F32, stride: int, first: int, out: F32) -> None:
    """out[h, i] = row · x[h] for values [rows, cols], x [heads, cols]."""
    for h in range(out.shape[0]):
        for i in range(out.shape[1]):
            row = values[h * stride + first + i]
            total = 0.0
            for start in range(0, row.size, GROUP_SIZE):
                span, factors = row[start : start + GROUP_SIZE], x[h, start : start + GROUP_SIZE]
                part = np.float32(0)
                for c in range(span.size):
                    part += span[c] * factors[c]
                total += np.float64(part)
            out[h, i] = total


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def q8g_matvec(values: I8, scales: F32, x: F32, stride: int, first: int, out: F32) -> None:
    """out[h, i] = row · x[h] for values [rows, groups, 128], scales [rows, groups], x [heads, groups, 128]."""
    for h in range(out.shape[0]):
        for i in range(out.shape[1]):
            row = h * stride + first + i
            total = 0.0
            for g in range(scales.shape[1]):
                part = np.float32(0)
                for c in range(GROUP_SIZE):
                    part += np.float32(values[row, g, c]) * x[h, g, c]
                total += np.float64(scales[row, g] * part)
            out[h, i] = total


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def q4g_matvec(values: U8, scales: F32, x: F32, stride: int, first: int, out: F32) -> None:
    """out[h, i] = row · x[h] for values [rows, groups, 64], scales [rows, groups], x [heads, 2, groups, 64]."""
    for h in range(out.shape[0]):
        for i in range(out.shape[1]):
            row = h * stride + first + i
            total = 0.0
            for g in range(scales.shape[1]):
                part = np.float32(0)
                for c in range(HALF_GROUP):
                    pair = np.int32(values[row, g, c])
                    even = np.float32((pair & 15) - Q4G_ZERO) * x[h, 0, g, c]
                    part += even + np.float32((pair >> 4) - Q4G_ZERO) * x[h, 1, g, c]
                total += np.float64(scales[row, g] * part)
            out[h, i] = total


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def f32_transposed(values: F32, _scales: F32, x: F32, stride: int, first: int, out: F32) -> None:
    """out[h] = Σ_i x[h, i] · row i, for values [rows, cols], out [heads, cols]."""
    out[:] = 0
    for h in range(x.shape[0]):
        for i in range(x.shape[1]):
            row, factor = values[h * stride + first + i], x[h, i]
            for c in range(row.size):
                out[h, c] += factor * row[c]


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def q8g_transposed(values: I8, scales: F32, x: F32, stride: int, first: int, out: F32) -> None:
    """out[h] = Σ_i x[h, i] · row i, for values [rows, groups, 128], out [heads, groups, 128]."""
    out[:] = 0
    for h in range(x.shape[0]):
        for i in range(x.shape[1]):
            row = h * stride + first + i
            for g in range(scales.shape[1]):
                factor = x[h, i] * scales[row, g]
                for c in range(GROUP_SIZE):
                    out[h, g, c] += factor * np.float32(values[row, g, c])


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def q4g_transposed(values: U8, scales: F32, x: F32, stride: int, first: int, out: F32) -> None:
    """out[h] = Σ_i x[h, i] · row i, for values [rows, groups, 64], out [heads, 2, groups, 64]."""
    out[:] = 0
    for h in range(x.shape[0]):
        for i in range(x.shape[1]):
            row = h * stride + first + i
            for g in range(scales.shape[1]):
                factor = x[h, i] * scales[row, g]
                for c in range(HALF_GROUP):
                    pair = np.int32(values[row, g, c])
                    out[h, 0, g, c] += factor * np.float32((pair & 15) - Q4G_ZERO)
                    out[h, 1, g, c] += factor * np.float32((pair >> 4) - Q4G_ZERO)


# --- expert matrices ------------------------------------------------------------------------------------------


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def build_table(codebooks: F32, x: F32, table: F32) -> None:
    """table[v, s, e] = entry e of stage s · x[8v : 8v+8], for codebooks [stages, 8, entries], x [8 · vectors]."""
    for v in range(table.shape[0]):
        for s in range(table.shape[1]):
            row = table[v, s]
            row[:] = 0
            for d in range(VEC_DIM):
                factor = x[v * VEC_DIM + d]
                for e in range(row.size):
                    row[e] += factor * codebooks[s, d, e]


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def _add_vq3r(tile: U8, table: F32, sums: F32) -> None:
    for v in range(tile.shape[0]):
        for r in range(TILE_ROWS):
            sums[r] += table[v, 0, tile[v, r, 0]] + table[v, 1, tile[v, r, 1]] + table[v, 2, tile[v, r, 2]]


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def _add_vq2r(tile: U8, table: F32, sums: F32) -> None:
    for v in range(tile.shape[0]):
        for r in range(TILE_ROWS):
            sums[r] += table[v, 0, tile[v, r, 0]] + table[v, 1, tile[v, r, 1]]


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def _add_vq4p(tile: U8, table: F32, sums: F32) -> None:
    for v in range(tile.shape[0]):
        for r in range(TILE_ROWS):
            bits = np.int32(tile[v, r, 0]) | np.int32(tile[v, r, 1]) << 8 | np.int32(tile[v, r, 2]) << 16
            high = table[v, 0, bits & 63] + table[v, 1, bits >> 6 & 63]
            sums[r] += high + (table[v, 2, bits >> 12 & 63] + table[v, 3, bits >> 18])


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def vq_matvec(tiles: U8, table: F32, scales: F32, out: F32) -> None:
    """out[row] = scales[row] · Σ_v Σ_s table[v, s, index], for tiles [row tiles, vectors, 64, vector bytes].

    The number of stages in `table` tells the format: 2 VQ2R, 3 VQ3R, 4 VQ4P. `out` and `scales` are [rows].
    """
    n_vectors, n_stages = table.shape[0], table.shape[1]
    sums = np.empty(TILE_ROWS, dtype=np.float32)
    total = np.empty(TILE_ROWS, dtype=np.float32)
    for t in range(tiles.shape[0]):
        total[:] = 0
        for start in range(0, n_vectors, SPAN):
            stop = min(start + SPAN, n_vectors)
            sums[:] = 0
            if n_stages == 3:
                _add_vq3r(tiles[t, start:stop], table[start:stop], sums)
            elif n_stages == 2:
                _add_vq2r(tiles[t, start:stop], table[start:stop], sums)
            else:
                _add_vq4p(tiles[t, start:stop], table[start:stop], sums)
            total += sums
        first = t * TILE_ROWS
        for r in range(min(TILE_ROWS, out.size - first)):
            out[first + r] = scales[first + r] * total[r]


# --- delta attention ------------------------------------------------------------------------------------------


@nb.njit(cache=True, nogil=True)
def conv_silu(window: F32, weight: F32, x: F32, out: F32) -> None:
    """Causal convolution per channel, then SiLU; `window` moves on by one input.

    window [kernel - 1, channels] holds the last inputs, oldest first; weight [kernel, channels], whose last tap
    multiplies the current input x [channels].
    """
    n_past = window.shape[0]
    for c in range(x.size):
        total = weight[n_past, c] * x[c]
        for t in range(n_past):
            total += weight[t, c] * window[t, c]
        out[c] = total * sigmoid(total)
    for t in range(n_past - 1):
        window[t] = window[t + 1]
    if n_past:
        window[n_past - 1] = x


@nb.njit(cache=True, nogil=True)
def decay_bounded(raw: F32, bias: F32, rate: F32, bound: float, out: F32) -> None:
    """out = bound · sigmoid(rate[head] · (raw + bias)) (docs/MODELS.md 3.2); all but rate [heads, dk]."""
    for h in range(raw.shape[0]):
        for c in range(raw.shape[1]):
            out[h, c] = np.float32(bound) * sigmoid(rate[h] * (raw[h, c] + bias[h, c]))


@nb.njit(cache=True, nogil=True)
def decay_softplus(raw: F32, bias: F32, rate: F32, out: F32) -> None:
    """out = -rate[head] · softplus(raw + bias): Kimi-Linear's log decay; softplus is linear above 20."""
    for h in range(raw.shape[0]):
        for c in range(raw.shape[1]):
            z = raw[h, c] + bias[h, c]
            soft = z if z > 20 else math.log1p(math.exp(z))
            out[h, c] = -rate[h] * soft


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def delta_step(state: F32, q: F32, k: F32, v: F32, log_decay: F32, beta: F32, out: F32) -> None:
    """One token of the delta rule (docs/MODELS.md 3.2, point 5); `state` [heads, dk, dv] is updated.

    S ← diag(exp(log_decay)) S; d = β (v - Sᵀk); S ← S + k dᵀ; out = Sᵀq. q, k and log_decay [heads, dk],
    v and out [heads, dv], beta [heads]. Sums over dk run in f64, since the state carries their rounding along.
    """
    correction, read = np.empty(v.shape[1]), np.empty(v.shape[1])
    for h in range(state.shape[0]):
        correction[:] = 0
        for i in range(state.shape[1]):
            row, decay = state[h, i], np.float32(math.exp(log_decay[h, i]))
            for j in range(row.size):
                row[j] *= decay
                correction[j] += np.float64(k[h, i]) * row[j]
        for j in range(correction.size):
            correction[j] = beta[h] * (v[h, j] - correction[j])
        read[:] = 0
        for i in range(state.shape[1]):
            row = state[h, i]
            for j in range(row.size):
                row[j] += k[h, i] * correction[j]
                read[j] += np.float64(q[h, i]) * row[j]
        out[h] = read


# --- latent attention -----------------------------------------------------------------------------------------


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def latent_attention(cache: F32, queries: F32, scale: float, out: F32) -> None:
    """Softmax attention of queries [heads, width] over cache [positions, width]; out [heads, latent].

    Scores use the whole width, the weighted sum only its first `latent` elements (docs/MODELS.md 3.3, absorbed).
    """
    n_positions, latent = cache.shape[0], out.shape[1]
    weights = np.empty(n_positions, dtype=np.float32)
    part = np.empty(latent, dtype=np.float32)
    for h in range(queries.shape[0]):
        largest = np.float32(-np.inf)
        for t in range(n_positions):
            score = np.float32(0)
            for c in range(cache.shape[1]):
                score += queries[h, c] * cache[t, c]
            weights[t] = score * np.float32(scale)
            largest = max(largest, weights[t])
        total = 0.0
        for t in range(n_positions):
            weights[t] = math.exp(weights[t] - largest)
            total += weights[t]
        out[h] = 0
        for start in range(0, n_positions, SPAN):
            part[:] = 0
            for t in range(start, min(start + SPAN, n_positions)):
                for c in range(latent):
                    part[c] += weights[t] * cache[t, c]
            out[h] += part
        out[h] /= np.float32(total)
