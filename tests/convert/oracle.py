"""The encoder's arithmetic once more, slow and obvious, in f64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from container.indices import unpack_indices
from container.layout import ExpertQuant
from convert.beam import ROW_BITS, BeamTables, bucket_groups

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Beam = tuple[tuple[int, ...], np.float32]  # choices so far, what they leave of |x|²


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


def sum_of_entries(codes: NDArray[Any], books: NDArray[Any]) -> F64:
    """What `codes` [n, stages] decode to, [n, 8]."""
    total: F64 = sum(book.astype(np.float64)[codes[:, stage]] for stage, book in enumerate(books))
    return total


def textbook_beam(vectors: NDArray[Any], books: NDArray[Any], width: int) -> NDArray[np.int64]:
    """Codes [n, stages] by a beam search in its textbook form: of all candidates of a stage the best `width`."""
    return np.array([_textbook_beam(vector.astype(np.float64), books, width) for vector in vectors])


def _textbook_beam(vector: F64, books: NDArray[Any], width: int) -> tuple[int, ...]:
    beams: list[tuple[tuple[int, ...], F64]] = [((), vector)]
    for stage, book in enumerate(books):
        errors = squared_distances(np.array([residual for _, residual in beams]), book)
        best = np.argsort(errors, axis=None, kind="stable")[: 1 if stage == len(books) - 1 else width]
        beams = [
            ((*beams[beam][0], entry), beams[beam][1] - book[entry])
            for beam, entry in (divmod(int(candidate), len(book)) for candidate in best)
        ]
    return beams[0][0]


def bucketed_beam(vectors: F32, tables: BeamTables, width: int) -> NDArray[np.int64]:
    """Codes [n, stages] by the beam search that the converter documents, vector by vector, with all its roundings."""
    return np.array([_bucketed_beam(vector, tables, width) for vector in vectors])


def _bucketed_beam(vector: F32, tables: BeamTables, width: int) -> tuple[int, ...]:
    cost = np.float32(0)
    for x in vector:
        cost += x * x
    beams: list[Beam] = [((), cost)]
    for stage in range(tables.n_stages - 1):
        costs = _added_costs(vector, tables, beams) + np.array([[cost] for _, cost in beams])
        beams = _best_buckets(costs, beams, bucket_groups(stage, width), width)
    added = _added_costs(vector, tables, beams)
    costs = added + np.array([[cost] for _, cost in beams])
    # of equal costs the first lane, then the first beam; there the entry that adds least
    _, lane, beam = min((costs[beam, entry], entry % 16, beam) for beam, entry in np.ndindex(costs.shape))
    return (*beams[beam][0], lane + 16 * int(added[beam, lane::16].argmin()))


def _best_buckets(costs: F32, beams: list[Beam], n_groups: int, width: int) -> list[Beam]:
    """Buckets are counted by beam, group and lane; entry = (row · groups + group) · 16 + lane.

    Each keeps its smallest of `costs` [beams, entries], with the row in the lowest bits; of the buckets the smallest
    `width` are kept, with the bucket's number above the row. What these bits leave of a cost is all that remains.
    """
    by_row = costs.reshape(len(beams), -1, n_groups, 16)
    rows = np.arange(by_row.shape[1], dtype=np.uint32)
    smallest = _tagged(by_row, ROW_BITS, rows[:, None, None]).min(axis=1).reshape(-1)
    n_bits = ROW_BITS + (len(smallest) - 1).bit_length()
    row_of = smallest.view(np.uint32) % 2**ROW_BITS
    keys = _tagged(smallest, n_bits, row_of + 2**ROW_BITS * np.arange(len(smallest), dtype=np.uint32))
    kept = []
    for key in np.sort(keys)[:width]:
        bucket, row = divmod(int(key.view(np.uint32)) % 2**n_bits, 2**ROW_BITS)
        beam, place = divmod(bucket, n_groups * 16)
        cost = _tagged(key[None], n_bits, np.uint32([0]))[0]
        kept.append(((*beams[beam][0], row * n_groups * 16 + place), cost))
    return kept


def _tagged(costs: F32, n_bits: int, tags: NDArray[np.uint32]) -> F32:
    """Costs with `tags` for their lowest bits."""
    bits = np.ascontiguousarray(costs).view(np.uint32)
    tagged: F32 = (bits - bits % np.uint32(2**n_bits) + tags).view(np.float32)
    return tagged


def _added_costs(vector: F32, tables: BeamTables, beams: list[Beam]) -> F32:
    """[beams, entries] of the next stage: what each adds to the squared error, in the search's order of addition."""
    stage, n_stages, n_entries = len(beams[0][0]), tables.n_stages, tables.n_entries
    columns = tables.columns.reshape(n_stages, n_entries // 16, 8, 16)[stage]
    products = tables.products.reshape(n_stages, n_stages, n_entries, n_entries)
    dots = tables.norms.reshape(n_stages, n_entries)[stage]
    for d in range(8):  # in f64 the product of two f32 is exact, so this rounds once, like a fused multiply-add
        dots = (columns[:, d].reshape(-1).astype(np.float64) * np.float64(vector[d]) + dots).astype(np.float32)
    added = np.tile(dots, (len(beams), 1))
    for beam, (codes, _) in enumerate(beams):
        for i, code in enumerate(codes):
            added[beam] += products[i, stage, code]
    return added
