"""Encoding rows of an expert matrix: scale, search, refit the channel scale.

The search is over the f16-rounded entries: what is stored is what is searched. A strip of whole tiles is encoded
at a time, so strips can run on several threads and the result does not depend on how many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from container.indices import pack_indices
from container.layout import VEC_DIM, ExpertQuant
from container.trunk import stored_scales
from convert.beam import BeamTables, beam_search
from convert.greedy import greedy_search
from convert.kernels import fit_rows, scale_rows

Codes = npt.NDArray[np.uint8]
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


class Encoder:
    """The codebooks of one kind, ready to encode."""

    def __init__(self, entries: F32Array, quant: ExpertQuant, beam_width: int) -> None:
        """`entries` [stages, n, 8] are f16-rounded; `beam_width` 1 is greedy search."""
        self.entries = entries
        self.quant = quant
        self.beam_width = beam_width
        self._tables = BeamTables.of(entries) if beam_width > 1 else None

    def search(self, vectors: F32Array) -> Codes:
        """Codes [n, stages] of `vectors` [n, 8], row-scaled."""
        if self._tables is None:
            return greedy_search(vectors, self.entries)
        return beam_search(vectors, self._tables, self.beam_width)

    def encode_rows(self, rows: F32Array) -> EncodedRows | int:
        """Encode `rows` [r, cols], which are overwritten.

        Returns the number of the first row with NaN or infinity instead, when there is one.
        """
        n_rows, cols = rows.shape
        row_scales = np.empty(n_rows, dtype=np.float64)
        bad = scale_rows(rows, row_scales)
        if bad >= 0:
            return int(bad)
        codes = self.search(rows.reshape(-1, VEC_DIM))
        sums = np.empty((n_rows, 3), dtype=np.float64)
        fit_rows(rows, codes, self.entries, sums)
        scales, squared_errors, squared_norms = _channel_scales(sums, row_scales)
        indices = pack_indices(codes.reshape(n_rows, cols // VEC_DIM, -1), self.quant)
        usage = np.stack([np.bincount(stage, minlength=self.quant.n_entries) for stage in codes.T])
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
