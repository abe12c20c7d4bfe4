"""Training residual codebooks: faiss k-means stage after stage, then a joint refinement of all stages.

k-means fits each stage to what the stages before it left over, but not to what the later ones can repair. So
a few rounds follow in which the sample is encoded and every stage's entries move to the least-squares best
place, given the indices and the other stages (block coordinate descent on the joint least-squares problem).
On Gaussian MXFP4 rows k-means alone, however long, ends above 18.85 %; k-means on a small part of the sample and
24 such rounds reach 18.8 % within a second (docs/LOG.md, 2026-11-29).
"""

from __future__ import annotations

import faiss
import numpy as np
import numpy.typing as npt

from container.layout import VEC_DIM, ExpertQuant
from convert.encode import encode_vectors
from convert.kernels import move_to_means

F16Array = npt.NDArray[np.float16]
F32Array = npt.NDArray[np.float32]

# Vectors a training takes. k-means sees the first of them only, and so do the first rounds of refinement.
SAMPLE_VECTORS = 262_144
K_MEANS_VECTORS = 65_536
K_MEANS_ITERATIONS = 10
REFINEMENT_ROUNDS = ((65_536, 12), (262_144, 12))  # (vectors, rounds)
# Some readers take a subnormal f16 entry for zero, so none is stored; entries are around 0.1 to 3.
SMALLEST_NORMAL_F16 = np.float16(2.0**-14)


def train_codebooks(vectors: F32Array, quant: ExpertQuant, *, seed: int) -> F16Array:
    """Residual codebooks [stages, entries, 8] f16 for `vectors` [n, 8], which must be in random order.

    Everything is measured against f16-rounded entries, because those are what is stored. The same vectors and
    seed give the same codebooks, whatever the threads.
    """
    books = np.zeros((quant.n_stages, quant.n_entries, VEC_DIM), dtype=np.float16)
    for stage in range(quant.n_stages):
        _, residual = encode_vectors(vectors[:K_MEANS_VECTORS], books[:stage].astype(np.float32))
        books[stage] = _stored(_k_means(residual, quant.n_entries, seed=seed + stage))
    for n_vectors, n_rounds in REFINEMENT_ROUNDS:
        for _ in range(n_rounds):
            books = _refined(vectors[:n_vectors], books)
    return books


def _refined(vectors: F32Array, books: F16Array) -> F16Array:
    """One round: encode, then move each stage's entries in turn to where they serve their vectors best."""
    entries = books.astype(np.float32)
    codes, residual = encode_vectors(vectors, entries)
    for stage, book in enumerate(entries):
        move_to_means(residual, codes, stage, book)
    return _stored(entries)


def _stored(entries: F32Array) -> F16Array:
    """Entries as they are stored."""
    rounded = entries.astype(np.float16)
    rounded[np.abs(rounded) < SMALLEST_NORMAL_F16] = 0
    return rounded


def _k_means(vectors: F32Array, n_entries: int, *, seed: int) -> F32Array:
    """Centroids [n_entries, 8]. With no more vectors than entries, the vectors themselves and zeros."""
    if len(vectors) <= n_entries:
        centroids = np.zeros((n_entries, VEC_DIM), dtype=np.float32)
        centroids[: len(vectors)] = vectors
        return centroids
    k_means = faiss.Kmeans(
        VEC_DIM,
        n_entries,
        niter=K_MEANS_ITERATIONS,
        seed=seed,
        # faiss would subsample and warn; the sample is as large as it should be
        max_points_per_centroid=len(vectors),
        min_points_per_centroid=1,
    )
    k_means.train(vectors)
    return np.asarray(k_means.centroids, dtype=np.float32)
