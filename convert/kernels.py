"""Numba loops of the converter. Each has an obvious numpy version in the tests that it must equal."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# What the compiler may do to floating-point sums: fuse multiply and add, and add in lanes.
REORDER = {"contract", "nsz", "reassoc"}


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


@numba.njit(cache=True, nogil=True, fastmath=REORDER)
def scale_rows(rows: Array, scales: Array) -> int:
    """Divide each row by its root mean square, in place; the divisor goes to `scales` f64 (0 for a zero row).

    In f64 the squares of no f32 value overflow or vanish, so this holds for the whole range, and a sum that is
    not finite tells of NaN or infinity. Returns the first such row, or -1.
    """
    n_rows, cols = rows.shape
    for r in range(n_rows):
        squares = 0.0
        for c in range(cols):
            value = np.float64(rows[r, c])
            squares += value * value
        if not squares < np.inf:
            return r
        scales[r] = math.sqrt(squares / cols)
        if squares > 0:
            factor = 1 / scales[r]
            for c in range(cols):
                rows[r, c] = rows[r, c] * factor
    return -1


@numba.njit(cache=True, nogil=True, fastmath=REORDER)
def fit_rows(rows: Array, codes: Array, entries: Array, sums: Array) -> None:
    """Per row x of `rows` [r, 8v], with y its decoded `codes` [r·v, stages]: sums[r] = (Σ x·y, Σ y·y, Σ x·x) in f64."""
    n_rows, cols = rows.shape
    n_vectors = cols // 8
    y = np.empty(8, dtype=np.float32)
    for r in range(n_rows):
        xy = 0.0
        yy = 0.0
        xx = 0.0
        for v in range(n_vectors):
            y[:] = 0
            for stage in range(codes.shape[1]):
                code = codes[r * n_vectors + v, stage]
                for d in range(8):
                    y[d] += entries[stage, code, d]
            for d in range(8):
                a, b = np.float64(rows[r, 8 * v + d]), np.float64(y[d])
                xy += a * b
                yy += b * b
                xx += a * a
        sums[r, 0] = xy
        sums[r, 1] = yy
        sums[r, 2] = xx


@numba.njit(cache=True, nogil=True)
def count_pairs(vectors: Array, codes: Array, counts: Array, sums: Array) -> None:
    """What least squares over the entries needs to know of `vectors` [n, 8] and their `codes` [n, stages].

    counts[i, j, a, b], for i <= j: vectors that use entry a of stage i and b of stage j; sums[i, a] [8], in f64: the
    sum of the vectors that use entry a of stage i. Both are added to.
    """
    n_stages = codes.shape[1]
    for n in range(len(vectors)):
        for i in range(n_stages):
            a = codes[n, i]
            for d in range(8):
                sums[i, a, d] += vectors[n, d]
            for j in range(i, n_stages):
                counts[i, j, a, codes[n, j]] += 1


@numba.njit(cache=True, nogil=True)
def solve_entries(counts: Array, sums: Array, entries: Array, n_sweeps: int) -> None:
    """Move `entries` [stages, n, 8] f64 towards the least-squares optimum for given codes, in place.

    One sweep sets each stage in turn to its best place, given the others (block Gauss-Seidel on the normal
    equations, which never raises the error): the mean of what the other stages leave of the vectors that use an
    entry. Entries that nothing uses stay.
    """
    n_stages, n_entries = entries.shape[:2]
    for _ in range(n_sweeps):
        for i in range(n_stages):
            for a in range(n_entries):
                uses = counts[i, i, a, a]
                if uses == 0:
                    continue
                for d in range(8):
                    entries[i, a, d] = sums[i, a, d]
                for j in range(n_stages):
                    if j == i:
                        continue
                    for b in range(n_entries):
                        both = counts[i, j, a, b] if i < j else counts[j, i, b, a]
                        if both:
                            for d in range(8):
                                entries[i, a, d] -= both * entries[j, b, d]
                for d in range(8):
                    entries[i, a, d] /= uses
