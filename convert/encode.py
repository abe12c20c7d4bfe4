"""Encoding rows of an expert matrix: scale, search stage by stage, refit the channel scale.

Greedy residual search with faiss's fused k = 1 kernel over the f16-rounded entries: what is stored is what is
searched. A strip of whole tiles is encoded at a time, so strips can run on several threads and the result
does not depend on how many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import faiss
import numpy as np
import numpy.typing as npt

from container.indices import pack_indices
from container.layout import VEC_DIM, ExpertQuant
from container.trunk import stored_scales
from convert.kernels import fit_rows, scale_rows, subtract_entries

F16Array = npt.NDArray[np.float16]
F32Array = npt.NDArray[np.float32]
Search = Callable[[F32Array], npt.NDArray[np.int64]]


def nearest_entries(entries: F32Array) -> Search:
    """A function from vectors [n, 8] to the numbers [n] of their nearest `entries` (L2)."""
    index = faiss.IndexFlatL2(VEC_DIM)
    index.add(entries)

    def search(vectors: F32Array) -> npt.NDArray[np.int64]:
        labels: npt.NDArray[np.int64] = index.search(vectors, 1)[1][:, 0]
        return labels

    return search


class Codebooks:
    """The codebooks of one (layer, kind), [stages, entries, 8] f16, ready to search."""

    def __init__(self, entries: F16Array) -> None:
        self.entries = [np.ascontiguousarray(stage, dtype=np.float32) for stage in entries]
        self.searches = [nearest_entries(stage) for stage in self.entries]


@dataclass(frozen=True)
class EncodedRows:
    """One strip: index bytes in tile order, channel scales, and the strip's part of the error."""

    indices: npt.NDArray[np.uint8]
    scales: F16Array
    squared_error: float
    squared_norm: float


def encode_vectors(vectors: F32Array, books: Codebooks) -> tuple[npt.NDArray[np.uint8], F32Array]:
    """Greedy residual search: codes [n, stages] and what they leave over [n, 8]."""
    residual = vectors.copy()
    codes = np.empty((len(vectors), len(books.entries)), dtype=np.uint8)
    for stage, (entries, search) in enumerate(zip(books.entries, books.searches, strict=True)):
        subtract_entries(residual, entries, search(residual), codes, stage)
    return codes, residual


def encode_rows(rows: F32Array, books: Codebooks, quant: ExpertQuant) -> EncodedRows | int:
    """Encode `rows` [r, cols] (overwritten). Returns the first row with NaN or infinity when there is one."""
    n_rows, cols = rows.shape
    row_scales = np.empty(n_rows, dtype=np.float32)
    bad = scale_rows(rows, row_scales)
    if bad >= 0:
        return int(bad)
    codes, residual = encode_vectors(rows.reshape(-1, VEC_DIM), books)
    sums = np.empty((n_rows, 3), dtype=np.float64)
    fit_rows(rows, residual.reshape(n_rows, cols), sums)
    scales, squared_error, squared_norm = _channel_scales(sums, row_scales)
    indices = pack_indices(codes.reshape(n_rows, cols // VEC_DIM, -1), quant)
    return EncodedRows(indices, scales, squared_error, squared_norm)


def _channel_scales(sums: npt.NDArray[np.float64], row_scales: F32Array) -> tuple[F16Array, float, float]:
    """Least-squares channel scales as stored, with the squared error they leave and the squared norm.

    With x the scaled row and y its decoded entries, the best factor is Σxy / Σyy; where that is not positive
    (nothing to fit) the row scale stays. Error of a row: scale² Σxx − 2 s·scale Σxy + s² Σyy.
    """
    xy, yy, xx = sums.T
    scale = row_scales.astype(np.float64)
    factor = np.ones_like(xy)
    np.divide(xy, yy, out=factor, where=(yy > 0) & (xy > 0))
    stored = stored_scales((scale * factor).astype(np.float32))
    s = stored.astype(np.float64)
    errors = scale * scale * xx - 2 * s * scale * xy + s * s * yy
    return stored, float(np.maximum(errors, 0).sum()), float((scale * scale * xx).sum())
