"""Numba loops of the converter. Each has an obvious numpy version in the tests that it must equal."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@numba.njit(cache=True, nogil=True)
def decode_mxfp4(packed: Array, scales: Array, values: Array, powers: Array, out: Array) -> None:
    """out[r, 2j] and out[r, 2j+1] from the low and high nibble of packed[r, j] times its block's scale."""
    rows, n_bytes = packed.shape
    for r in range(rows):
        for block in range(n_bytes // 16):
            scale = powers[scales[r, block]]
            for j in range(block * 16, block * 16 + 16):
                byte = packed[r, j]
                out[r, 2 * j] = values[byte & 15] * scale
                out[r, 2 * j + 1] = values[byte >> 4] * scale


@numba.njit(cache=True, nogil=True)
def scale_rows(rows: Array, scales: Array) -> int:
    """Divide each row by its root mean square, in place; the divisor goes to `scales` (0 for a zero row).

    Works over the whole f32 range: squares are taken of values already divided by the row's largest.
    Returns the first row that holds NaN or infinity, or -1.
    """
    n_rows, cols = rows.shape
    for r in range(n_rows):
        largest = np.float32(0)
        finite = True
        for c in range(cols):
            magnitude = abs(rows[r, c])
            finite &= magnitude <= np.float32(3.4028235e38)  # false for NaN
            largest = max(largest, magnitude)
        if not finite:
            return r
        scales[r] = largest
        if largest == 0:
            continue
        squares = np.float32(0)
        for c in range(cols):
            value = rows[r, c] / largest
            rows[r, c] = value
            squares += value * value
        ratio = np.float32(math.sqrt(squares / cols))
        for c in range(cols):
            rows[r, c] /= ratio
        scales[r] = largest * ratio
    return -1


@numba.njit(cache=True, nogil=True)
def subtract_entries(residual: Array, codebook: Array, labels: Array, codes: Array, stage: int) -> None:
    """residual[n] -= codebook[labels[n]] and codes[n, stage] = labels[n]; codebook rows have 8 values."""
    for n in range(residual.shape[0]):
        label = labels[n]
        codes[n, stage] = label
        for d in range(8):
            residual[n, d] -= codebook[label, d]


@numba.njit(cache=True, nogil=True)
def move_to_means(residual: Array, codes: Array, stage: int, entries: Array) -> None:
    """Add to each entry the mean residual of the vectors that use it in `stage`; take it off their residuals."""
    n_entries = entries.shape[0]
    means = np.zeros((n_entries, 8))
    counts = np.zeros(n_entries)
    for n in range(residual.shape[0]):
        code = codes[n, stage]
        counts[code] += 1
        for d in range(8):
            means[code, d] += residual[n, d]
    for code in range(n_entries):
        if counts[code] > 0:
            for d in range(8):
                means[code, d] /= counts[code]
                entries[code, d] += np.float32(means[code, d])
    for n in range(residual.shape[0]):
        code = codes[n, stage]
        for d in range(8):
            residual[n, d] -= np.float32(means[code, d])


@numba.njit(cache=True, nogil=True)
def fit_rows(rows: Array, residual: Array, sums: Array) -> None:
    """Per row, with y = rows - residual: sums[r] = (Σ x·y, Σ y·y, Σ x·x) in f64."""
    n_rows, cols = rows.shape
    for r in range(n_rows):
        xy = 0.0
        yy = 0.0
        xx = 0.0
        for c in range(cols):
            x = np.float64(rows[r, c])
            y = x - np.float64(residual[r, c])
            xy += x * y
            yy += y * y
            xx += x * x
        sums[r, 0] = xy
        sums[r, 1] = yy
        sums[r, 2] = xx
