"""Encoding rows of an expert matrix: scale, search stage by stage, refit the channel scale.

Greedy residual search over the f16-rounded entries: what is stored is what is searched. A strip of whole tiles
is encoded at a time, so strips can run on several threads and the result does not depend on how many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from container.indices import pack_indices
from container.layout import VEC_DIM, ExpertQuant
from container.trunk import stored_scales
from convert.kernels import encode_residual, fit_rows, scale_rows

F16Array = npt.NDArray[np.float16]
F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EncodedRows:
    """One strip of r rows: index bytes in tile order, channel scales, each row's error, and which entries it uses."""

    indices: npt.NDArray[np.uint8]
    scales: F16Array  # [r]
    squared_errors: F64Array  # [r], ‖w - w'‖²
    squared_norms: F64Array  # [r], ‖w‖²
    usage: npt.NDArray[np.int64]  # [stages, entries]: how often each entry is chosen


def encode_vectors(vectors: F32Array, entries: F32Array) -> tuple[npt.NDArray[np.uint8], F32Array]:
    """Greedy residual search in `entries` [stages, n, 8]: codes [n, stages] and what they leave over [n, 8]."""
    codes = np.empty((len(vectors), len(entries)), dtype=np.uint8)
    residual = np.empty_like(vectors)
    encode_residual(vectors, entries, codes, residual)
    return codes, residual


def encode_rows(rows: F32Array, entries: F32Array, quant: ExpertQuant) -> EncodedRows | int:
    """Encode `rows` [r, cols] (overwritten) with `entries` [stages, n, 8], f16-rounded.

    Returns the number of the first row with NaN or infinity instead, when there is one.
    """
    n_rows, cols = rows.shape
    row_scales = np.empty(n_rows, dtype=np.float64)
    bad = scale_rows(rows, row_scales)
    if bad >= 0:
        return int(bad)
    codes, residual = encode_vectors(rows.reshape(-1, VEC_DIM), entries)
    sums = np.empty((n_rows, 3), dtype=np.float64)
    fit_rows(rows, residual.reshape(n_rows, cols), sums)
    scales, squared_errors, squared_norms = _channel_scales(sums, row_scales)
    indices = pack_indices(codes.reshape(n_rows, cols // VEC_DIM, -1), quant)
    usage = np.stack([np.bincount(stage, minlength=entries.shape[1]) for stage in codes.T])
    return EncodedRows(indices, scales, squared_errors, squared_norms, usage)


def _channel_scales(sums: F64Array, scale: F64Array) -> tuple[F16Array, F64Array, F64Array]:
    """Least-squares channel scales as stored, with each row's squared error and squared norm.

    With x the scaled row and y its decoded entries, the best factor is Σxy / Σyy; where that is not positive
    (nothing to fit) the row scale stays. Error of a row: scale² Σxx − 2 s·scale Σxy + s² Σyy.
    """
    xy, yy, xx = sums.T
    factor = np.ones_like(xy)
    np.divide(xy, yy, out=factor, where=(yy > 0) & (xy > 0))
    stored = stored_scales(scale * factor)
    s = stored.astype(np.float64)
    errors = scale * scale * xx - 2 * s * scale * xy + s * s * yy
    return stored, np.maximum(errors, 0), scale * scale * xx
