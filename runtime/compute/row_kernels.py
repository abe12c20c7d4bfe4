"""Numba loops over the rows of many tokens at once, beside the matrix products: gates, mixtures, weighted sums.

Each runs on one thread without the interpreter's lock, writes into its caller's arrays and checks no bounds. Rows of a
result never depend on which other rows the same call computes.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import numpy.typing as npt

from runtime.compute.elementary import OPTIONS, sigmoid
from runtime.compute.gates import F32, FAST

Ids = npt.NDArray[np.int64]


@nb.njit(**OPTIONS)
def sigmoid_rows(x: F32) -> None:
    """sigmoid(x), in place in x [rows, n]."""
    for r in range(x.shape[0]):
        row = x[r]
        for c in range(row.size):
            row[c] = sigmoid(row[c])


@nb.njit(**OPTIONS)
def multiply_sigmoid_rows(x: F32, gate: F32) -> None:
    """x · sigmoid(gate), in place in x; both [rows, n]."""
    for r in range(x.shape[0]):
        row, factors = x[r], gate[r]
        for c in range(row.size):
            row[c] *= sigmoid(factors[c])


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
