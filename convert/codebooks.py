"""Training residual codebooks: faiss k-means stage after stage, then all stages together.

k-means fits each stage to what the stages before it left over, but not to what the later ones can repair. So rounds
follow in which the sample is encoded with the very search that the layer will be encoded with, and all entries move to
their least-squares best places for these codes, rounded to f16 as stored, until the error of vectors held
out of the sample stops falling. docs/encoding.md has the measured gain of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from container.layout import VEC_DIM, ExpertQuant
from convert.device import CPU
from convert.encode import Encoder, RowEncoder, make_encoder
from convert.kernels import count_pairs, solve_entries

F16Array = npt.NDArray[np.float16]
F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]

# Of a large sample this part is held out to tell when to stop; a small one is judged by itself.
HELD_OUT_VECTORS = 32_768
SMALLEST_HELD_OUT_SAMPLE = 16_384
K_MEANS_VECTORS = 65_536
K_MEANS_ITERATIONS = 10
CHUNK_VECTORS = 16_384
# Some readers take a subnormal f16 entry for zero, so none is stored; entries are around 0.1 to 3.
SMALLEST_NORMAL_F16 = np.float16(2.0**-14)


# Entries move twice as far as the least-squares optimum for the present codes is away, since the next rounds would move
# them on the same way: half as many rounds. Greedy rounds take one sweep over the stages only, which keeps
# the stages' order of importance, without which greedy codes are poor.
STRETCH = 1.0
GREEDY_SWEEPS, JOINT_SWEEPS = 1, 5
# (vectors, rounds) before a beam is used, and where greedy search is all there is.
GREEDY_START = ((65_536, 10), (131_072, 10))
GREEDY_ALONE = ((65_536, 8), (131_072, 10))
# (vectors, most rounds); None: the whole sample. A series ends after PATIENCE rounds without an error lower by
# WORTH_A_ROUND, squared.
JOINT: tuple[tuple[int | None, int], ...] = ((131_072, 4), (None, 8))
PATIENCE = 3
WORTH_A_ROUND = 1e-4

# `map`, or the method of that name of a thread pool: results in the order of the items.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
Make = Callable[[F16Array], RowEncoder]  # codebooks -> what searches them


def train_codebooks(
    vectors: F32Array, quant: ExpertQuant, *, seed: int, beam_width: int = 1, parallel: Map = map
) -> F16Array:
    """Residual codebooks [stages, entries, 8] f16 for `vectors` [n, 8], which must be in random order.

    Everything is measured against f16-rounded entries, because those are what is stored. The same vectors and
    seed give the same codebooks, however `parallel` spreads the work.
    """
    return refined_codebooks(vectors, initial_codebooks(vectors, quant, seed=seed), quant, beam_width, parallel)


def refined_codebooks(
    vectors: F32Array, books: F16Array, quant: ExpertQuant, beam_width: int, parallel: Map = map, device: str = CPU
) -> F16Array:
    """`books` after all rounds on `vectors`, searched on `device`."""

    def searching(width: int) -> Make:
        return lambda books: make_encoder(books.astype(np.float32), quant, width, device)

    sample, judges = _divided(vectors)
    greedy = partial(_round, make=searching(1), n_sweeps=GREEDY_SWEEPS, parallel=parallel)
    for n_vectors, n_rounds in GREEDY_ALONE if beam_width == 1 else GREEDY_START:
        for left in reversed(range(n_rounds)):
            books = greedy(sample[:n_vectors], books, stretch=STRETCH if left else 0)
    if beam_width > 1:
        for n_joint, at_most in JOINT:
            books = _refined(sample[:n_joint], judges, books, searching(beam_width), at_most, parallel)
    return books


def _divided(vectors: F32Array) -> tuple[F32Array, F32Array]:
    """The sample, and the vectors held out of all training to tell when to stop; a small sample judges itself."""
    n_held_out = min(HELD_OUT_VECTORS, len(vectors) // 8)
    if len(vectors) < SMALLEST_HELD_OUT_SAMPLE:
        return vectors, vectors
    return vectors[:-n_held_out], vectors[-n_held_out:]


def initial_codebooks(vectors: F32Array, quant: ExpertQuant, *, seed: int) -> F16Array:
    """k-means of each stage on what the stages before leave over: [stages, entries, 8] f16."""
    books = np.zeros((quant.n_stages, quant.n_entries, VEC_DIM), dtype=np.float16)
    residual = _divided(vectors)[0][:K_MEANS_VECTORS].copy()
    for stage in range(quant.n_stages):
        books[stage] = _stored(_k_means(residual, quant.n_entries, seed=seed + stage))
        book = books[stage].astype(np.float32)
        codes = Encoder(book[None], quant, beam_width=1).search(residual)
        residual -= book[codes[:, 0]]
    return books


def _refined(sample: F32Array, judges: F32Array, books: F16Array, make: Make, at_most: int, parallel: Map) -> F16Array:
    """The best codebooks of a series of rounds, by the error of `judges`."""
    lowest = _squared_error(judges, books, make, parallel)
    best, idle = books, 0
    for _ in range(at_most):
        books = _round(sample, books, make, JOINT_SWEEPS, parallel, stretch=STRETCH)
        error = _squared_error(judges, books, make, parallel)
        idle = idle + 1 if error > (1 - WORTH_A_ROUND) * lowest else 0
        if error < lowest:
            best, lowest = books, error
        if idle == PATIENCE:
            break
    return best


def _round(sample: F32Array, books: F16Array, make: Make, n_sweeps: int, parallel: Map, *, stretch: float) -> F16Array:
    """Encode the sample, then move all entries towards their least-squares best places, and `stretch` beyond."""
    encoder = make(books)
    n_stages, n_entries, _ = books.shape

    def statistics(vectors: F32Array) -> tuple[npt.NDArray[np.int32], F64Array]:
        counts = np.zeros((n_stages, n_stages, n_entries, n_entries), dtype=np.int32)
        sums = np.zeros(books.shape, dtype=np.float64)
        count_pairs(vectors, encoder.search(vectors), counts, sums)
        return counts, sums

    counts: Any = 0
    sums: Any = 0
    for chunk_counts, chunk_sums in parallel(statistics, _chunks(sample)):
        counts = counts + chunk_counts
        sums = sums + chunk_sums
    before = books.astype(np.float64)
    entries = before.copy()
    solve_entries(counts, sums, entries, n_sweeps)
    return _stored((entries + stretch * (entries - before)).astype(np.float32))


def _squared_error(vectors: F32Array, books: F16Array, make: Make, parallel: Map) -> float:
    """Σ |x - its code's entries|² over all vectors."""
    encoder = make(books)

    def error(part: F32Array) -> float:
        codes = encoder.search(part)
        decoded = sum(entries[codes[:, stage]] for stage, entries in enumerate(encoder.entries))
        return float(np.square(part - decoded, dtype=np.float64).sum())

    return sum(parallel(error, _chunks(vectors)))


def _chunks(vectors: F32Array) -> list[F32Array]:
    return [vectors[start : start + CHUNK_VECTORS] for start in range(0, len(vectors), CHUNK_VECTORS)]


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
