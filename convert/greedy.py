"""Greedy residual search, the search behind `fast`: at each stage the entry nearest to what is left of the vector."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from convert.simd import LARGEST, N_LANES, aligned, fma, load, minimum, splat, store, where_less

Array = npt.NDArray[Any]

# Vectors per block of the search: 8 dimensions × 512 × 4 bytes fill a third of a 48 KiB first-level cache.
BLOCK = 512


def greedy_search(vectors: npt.NDArray[np.float32], entries: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Codes [n, stages] of `vectors` [n, 8] in `entries` [stages, k, 8]; of equally near entries the first."""
    n_stages, n_entries, _ = entries.shape
    codes = np.empty((len(vectors), n_stages), dtype=np.uint8)
    half_norms = (np.square(entries).sum(axis=-1) / 2).reshape(-1)
    numbers = np.arange(n_entries, dtype=np.float32)
    _search(vectors, entries, -entries.reshape(-1), half_norms, numbers, codes)
    return codes


@numba.njit(cache=True, nogil=True)
def _search(vectors: Array, entries: Array, negative: Array, half_norms: Array, numbers: Array, codes: Array) -> None:
    """A block of vectors lies dimension by dimension in the first-level cache while all stages run over it."""
    n_entries = len(numbers)
    x = aligned(8 * BLOCK)
    x[:] = 0
    chosen = aligned(BLOCK)
    for start in range(0, len(vectors), BLOCK):
        count = min(BLOCK, len(vectors) - start)
        for v in range(count):
            for d in range(8):
                x[d * BLOCK + v] = vectors[start + v, d]
        for stage in range(codes.shape[1]):
            _nearest(x, negative, half_norms, stage * n_entries, numbers, chosen)
            for v in range(count):
                code = int(chosen[v])
                codes[start + v, stage] = code
                for d in range(8):
                    x[d * BLOCK + v] -= entries[stage, code, d]


@numba.njit(cache=True, nogil=True)
def _nearest(x: Array, negative: Array, half_norms: Array, first: int, numbers: Array, chosen: Array) -> None:
    """Numbers of the entries nearest to the columns of x [8, BLOCK]; the codebook's entries begin at `first`.

    The nearest entry c has the smallest |c|²/2 - x·c. Two times sixteen vectors stay in registers while all entries
    pass by. It always runs over the whole block, used or not, so that every vector sees the same instructions
    wherever it stands.
    """
    for v in range(0, BLOCK, 2 * N_LANES):
        a0, a1, a2, a3 = load(x, v), load(x, BLOCK + v), load(x, 2 * BLOCK + v), load(x, 3 * BLOCK + v)
        a4, a5, a6, a7 = load(x, 4 * BLOCK + v), load(x, 5 * BLOCK + v), load(x, 6 * BLOCK + v), load(x, 7 * BLOCK + v)
        w = v + N_LANES
        b0, b1, b2, b3 = load(x, w), load(x, BLOCK + w), load(x, 2 * BLOCK + w), load(x, 3 * BLOCK + w)
        b4, b5, b6, b7 = load(x, 4 * BLOCK + w), load(x, 5 * BLOCK + w), load(x, 6 * BLOCK + w), load(x, 7 * BLOCK + w)
        best_a, best_b = splat(LARGEST), splat(LARGEST)
        code_a, code_b = splat(np.float32(0)), splat(np.float32(0))
        for c in range(len(numbers)):
            half_norm, number, at = splat(half_norms[first + c]), splat(numbers[c]), 8 * (first + c)
            e = splat(negative[at])
            a, b = fma(a0, e, half_norm), fma(b0, e, half_norm)
            e = splat(negative[at + 1])
            a, b = fma(a1, e, a), fma(b1, e, b)
            e = splat(negative[at + 2])
            a, b = fma(a2, e, a), fma(b2, e, b)
            e = splat(negative[at + 3])
            a, b = fma(a3, e, a), fma(b3, e, b)
            e = splat(negative[at + 4])
            a, b = fma(a4, e, a), fma(b4, e, b)
            e = splat(negative[at + 5])
            a, b = fma(a5, e, a), fma(b5, e, b)
            e = splat(negative[at + 6])
            a, b = fma(a6, e, a), fma(b6, e, b)
            e = splat(negative[at + 7])
            a, b = fma(a7, e, a), fma(b7, e, b)
            code_a, best_a = where_less(a, best_a, number, code_a), minimum(a, best_a)
            code_b, best_b = where_less(b, best_b, number, code_b), minimum(b, best_b)
        store(chosen, v, code_a)
        store(chosen, w, code_b)
