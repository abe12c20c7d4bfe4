"""The encoder's arithmetic once more, slow and obvious, in f64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from container.indices import unpack_indices
from container.layout import ExpertQuant

F64 = NDArray[np.float64]


def scaled(rows: NDArray[np.float32]) -> tuple[F64, F64]:
    """Rows divided by their root mean square, and the divisors; a zero row stays zero."""
    wide = rows.astype(np.float64)
    scales = np.sqrt(np.square(wide).mean(axis=1))
    return wide / np.where(scales == 0, 1, scales)[:, None], scales


def squared_distances(vectors: NDArray[Any], entries: NDArray[Any]) -> F64:
    """[n, entries] from the definition."""
    difference = vectors.astype(np.float64)[:, None, :] - entries.astype(np.float64)[None]
    distances: F64 = np.square(difference).sum(axis=-1)
    return distances


def greedy(vectors: NDArray[Any], books: NDArray[Any]) -> tuple[NDArray[np.int64], F64]:
    """Codes [n, stages] and residuals [n, 8]: at each stage the nearest entry."""
    residual = vectors.astype(np.float64)
    codes = np.empty((len(vectors), len(books)), dtype=np.int64)
    for stage, book in enumerate(books):
        codes[:, stage] = squared_distances(residual, book).argmin(axis=1)
        residual = residual - book.astype(np.float64)[codes[:, stage]]
    return codes, residual


def decode(
    indices: NDArray[np.uint8],
    scales: NDArray[np.float16],
    books: NDArray[Any],
    shape: tuple[int, int],
    quant: ExpertQuant,
) -> F64:
    """W[row, 8v : 8v+8] = scale[row] · Σ_stage codebook[stage][index] (docs/FORMAT.md, Expert formats)."""
    codes = unpack_indices(indices, shape, quant)
    total = sum(books[stage].astype(np.float64)[codes[:, :, stage]] for stage in range(quant.n_stages))
    weights: F64 = np.asarray(total).reshape(shape) * scales.astype(np.float64)[:, None]
    return weights


def squared_error(found: F64, rows: NDArray[np.float32]) -> float:
    """Σ (found - rows)²."""
    return float(np.square(found - rows.astype(np.float64)).sum())


def plain_k_means(vectors: NDArray[np.float32], n_entries: int, *, rounds: int, seed: int) -> F64:
    """Lloyd's algorithm from a random start, in its textbook form."""
    points = vectors.astype(np.float64)
    centroids = points[np.random.default_rng(seed).choice(len(points), n_entries, replace=False)].copy()
    for _ in range(rounds):
        nearest = squared_distances(points, centroids).argmin(axis=1)
        for entry in np.unique(nearest):
            centroids[entry] = points[nearest == entry].mean(axis=0)
    return centroids
