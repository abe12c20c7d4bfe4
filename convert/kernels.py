"""Numba loops of the converter. Each has an obvious numpy version in the tests that it must equal."""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# What the compiler may do to floating-point sums: fuse multiply and add; for long sums also add in lanes.
FUSE = {"contract", "nsz"}
REORDER = {"contract", "nsz", "reassoc"}
# Vectors per block of the search: 8 dimensions × 512 × 4 bytes fill a third of a 48 KiB first-level cache.
BLOCK = 512


def _use_widest_registers() -> None:
    """LLVM stops at 256-bit registers by default, even where there are 512; the search gains 1.4 × from them.

    Left alone where the user chose features by NUMBA_CPU_FEATURES.
    """
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and numba.config.CPU_FEATURES is None:  # type: ignore[attr-defined]
        numba.config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"  # type: ignore[attr-defined]


_use_widest_registers()


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


@numba.njit(cache=True, nogil=True, fastmath=FUSE)
def encode_residual(vectors: Array, entries: Array, codes: Array, residual: Array) -> None:
    """Greedy residual search: codes [n, stages] of `vectors` [n, 8], and what the chosen `entries` leave over.

    `entries` is [stages, n, 8] with n even. A block of vectors lies dimension by dimension in the first-level
    cache while all stages run over it.
    """
    x = np.zeros((8, BLOCK), dtype=np.float32)
    chosen = np.empty(BLOCK, dtype=np.int32)
    for start in range(0, len(vectors), BLOCK):
        count = min(BLOCK, len(vectors) - start)
        for n in range(count):
            for d in range(8):
                x[d, n] = vectors[start + n, d]
        for stage in range(len(entries)):
            _nearest(x, entries[stage], chosen)
            for n in range(count):
                code = chosen[n]
                codes[start + n, stage] = code
                for d in range(8):
                    x[d, n] -= entries[stage, code, d]
        for n in range(count):
            for d in range(8):
                residual[start + n, d] = x[d, n]


@numba.njit(cache=True, nogil=True, fastmath=FUSE)
def _nearest(x: Array, book: Array, chosen: Array) -> None:
    """Numbers of the entries of `book` [n, 8] nearest to the columns of x [8, BLOCK]; of equals the first.

    The nearest entry c has the largest x·c - |c|²/2. The innermost loop runs over vectors and fills the registers;
    two entries at a time halve the loads. It always runs over the whole block, used or not, so that every
    vector sees the same instructions wherever it stands.
    """
    best = np.full(BLOCK, -np.inf, dtype=np.float32)
    for c in range(0, len(book), 2):
        a, b = book[c], book[c + 1]
        half_a = half_b = np.float32(0)
        for d in range(8):
            half_a -= np.float32(0.5) * a[d] * a[d]
            half_b -= np.float32(0.5) * b[d] * b[d]
        a0, a1, a2, a3, a4, a5, a6, a7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        b0, b1, b2, b3, b4, b5, b6, b7 = b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]
        for n in range(BLOCK):
            x0, x1, x2, x3 = x[0, n], x[1, n], x[2, n], x[3, n]
            x4, x5, x6, x7 = x[4, n], x[5, n], x[6, n], x[7, n]
            dot_a = half_a + x0 * a0 + x1 * a1 + x2 * a2 + x3 * a3 + x4 * a4 + x5 * a5 + x6 * a6 + x7 * a7
            dot_b = half_b + x0 * b0 + x1 * b1 + x2 * b2 + x3 * b3 + x4 * b4 + x5 * b5 + x6 * b6 + x7 * b7
            found, code = best[n], chosen[n]
            code = np.int32(c) if dot_a > found else code
            found = dot_a if dot_a > found else found
            code = np.int32(c + 1) if dot_b > found else code
            best[n] = dot_b if dot_b > found else found
            chosen[n] = code


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


@numba.njit(cache=True, nogil=True, fastmath=REORDER)
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
