"""Latent attention (docs/MODELS.md 3.3, absorbed): all of it for one token, the softmax for a tile of queries.

Numba loops on the calling thread, without the interpreter's lock; they check no bounds.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

from runtime.compute.elementary import OPTIONS, exp
from runtime.compute.gates import F32, FAST

_SPAN = 64  # positions that all heads look at before the next ones: they stay in the cache of the processor


@nb.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)
def _scores(cache: F32, queries: F32, h: int, scale: float, begin: int, end: int, scores: F32) -> np.float32:
    """Scores of head h at positions begin to end - 1; the largest is returned."""
    largest = np.float32(-np.inf)
    for t in range(begin, end):
        score = np.float32(0)
        for c in range(cache.shape[1]):
            score += queries[h, c] * cache[t, c]
        scores[t - begin] = score * np.float32(scale)
        largest = max(largest, scores[t - begin])
    return largest


@nb.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)
def _weighted_sum(cache: F32, weights: F32, begin: int, end: int, total: F32) -> None:
    """total [latent] = the beginnings of the rows at positions begin to end - 1, each times its weight."""
    for c in range(total.size):
        total[c] = 0
    for t in range(begin, end):
        for c in range(total.size):
            total[c] += weights[t - begin] * cache[t, c]


@nb.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)
def latent_attention(cache: F32, queries: F32, scale: float, out: F32, start: int, stop: int) -> None:
    """Softmax attention of queries [heads, width] over cache [positions, width]; out [heads, latent].

    For heads start to stop - 1. Scores use the whole width, the weighted sum only its first `latent` elements. The
    softmax runs along: what was summed is scaled down when a larger score turns up. Without the interpreter's lock.
    """
    n_positions, latent = cache.shape[0], out.shape[1]
    largest, totals = np.full(stop - start, -np.inf, dtype=np.float32), np.zeros(stop - start)
    weights, part = np.empty(_SPAN, dtype=np.float32), np.empty(latent, dtype=np.float32)
    for begin in range(0, n_positions, _SPAN):
        end = min(begin + _SPAN, n_positions)
        for h in range(start, stop):
            before = largest[h - start]
            now = max(before, _scores(cache, queries, h, scale, begin, end, weights))
            total = np.float32(0)
            for t in range(end - begin):
                weights[t] = exp(weights[t] - now)
                total += weights[t]
            _weighted_sum(cache, weights, begin, end, part)
            shrunk = exp(before - now) if begin else np.float32(0)
            largest[h - start], totals[h - start] = now, totals[h - start] * shrunk + total
            for c in range(latent):
                out[h, c] = part[c] + (out[h, c] * shrunk if begin else np.float32(0))
    for h in range(start, stop):
        for c in range(latent):
            out[h, c] /= np.float32(totals[h - start])


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
            row[p] = exp(row[p] - top)
            added += row[p]
        row[visible:] = 0
        if visible:
            kept = np.float32(math.exp(largest[t] - top))
            largest[t] = top
            total[t] = total[t] * kept + added
            mixed[t] *= kept
