"""Training residual codebooks: faiss k-means, stage after stage, on row-scaled vectors of a few experts."""

from __future__ import annotations

import faiss
import numpy as np
import numpy.typing as npt

from container.layout import VEC_DIM, ExpertQuant
from convert.encode import nearest_entries
from convert.kernels import subtract_entries

F32Array = npt.NDArray[np.float32]

# k-means rounds as (vectors, iterations): most of the way on a small part of the sample, the last steps on all
# of it. On Gaussian MXFP4 rows this reaches 18.9 % in a quarter of the time of 40 iterations on everything
# (docs/LOG.md, 2026-11-29).
SCHEDULE = ((65_536, 25), (262_144, 10), (1_048_576, 5))
SAMPLE_VECTORS = SCHEDULE[-1][0]


def train_codebooks(vectors: F32Array, quant: ExpertQuant, *, seed: int) -> npt.NDArray[np.float16]:
    """Residual codebooks [stages, entries, 8] f16 for `vectors` [n, 8], which must be in random order.

    Each stage is trained on what the stages before it left over, measured against their f16 entries, because
    those are what is stored. The same vectors and seed give the same codebooks, whatever the threads.
    """
    residual = vectors.copy()
    codes = np.empty((len(vectors), quant.n_stages), dtype=np.uint8)
    books = np.empty((quant.n_stages, quant.n_entries, VEC_DIM), dtype=np.float16)
    for stage in range(quant.n_stages):
        books[stage] = _k_means(residual, quant.n_entries, seed=seed + stage)
        entries = books[stage].astype(np.float32)
        subtract_entries(residual, entries, nearest_entries(entries)(residual), codes, stage)
    return books


def _k_means(vectors: F32Array, n_entries: int, *, seed: int) -> F32Array:
    """Centroids [n_entries, 8]. With no more vectors than entries, the vectors themselves and zeros."""
    if len(vectors) <= n_entries:
        centroids = np.zeros((n_entries, VEC_DIM), dtype=np.float32)
        centroids[: len(vectors)] = vectors
        return centroids
    found: F32Array | None = None
    for n_vectors, n_iterations in SCHEDULE:
        k_means = faiss.Kmeans(
            VEC_DIM,
            n_entries,
            niter=n_iterations,
            seed=seed,
            # faiss would subsample and warn; the schedule decides how many vectors a round sees
            max_points_per_centroid=len(vectors),
            min_points_per_centroid=1,
        )
        k_means.train(vectors[:n_vectors], init_centroids=found)
        found = k_means.centroids
        if len(vectors) <= n_vectors:
            break
    return np.asarray(found, dtype=np.float32)
