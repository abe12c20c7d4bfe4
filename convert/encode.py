"""Encoding rows of an expert matrix: scale, search, refit the channel scale, search odd rows again.

The search is over the f16-rounded entries: what is stored is what is searched. A strip of whole tiles is encoded
at a time, so strips can run on several threads and the result does not depend on how many. `make_encoder` gives
an encoder for the processor or, from convert/torch_encode.py, for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from container.indices import pack_indices
from container.layout import TILE_ROWS, VEC_DIM, ExpertQuant
from container.trunk import stored_scales
from convert.beam import BeamTables, beam_search
from convert.device import CPU
from convert.greedy import greedy_search
from convert.kernels import fit_rows, scale_rows
from convert.source import RawRows, SourceTensor
from convert.timing import Timing

Codes = npt.NDArray[np.uint8]
F16Array = npt.NDArray[np.float16]
F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]
SearchAgain = Callable[[Numbers, F64Array], tuple[Codes, F64Array]]  # see improve_odd_rows

# Rows of one strip on the processor: a whole number of index tiles, small enough for a core's cache.
STRIP_ROWS = TILE_ROWS

# Rows are searched again beyond this distance of the best factor from 1, and at most so often. No Gaussian or Laplace
# row of a real width is. Of Student-t rows (3 degrees of freedom) 5 % are, and the error of all rows falls by 0.2 to
# 1.5 points; that of a row with one weight of 100 × its size falls from 67 to 54 %.
ODD_FACTOR, MOST_SEARCHES_AGAIN = 0.03, 8
# A row's search goes on while each lowers its squared error by this part.
WORTH_ANOTHER_SEARCH = 0.01


@dataclass(frozen=True)
class EncodedRows:
    """One strip of r rows: index bytes in tile order, channel scales, each row's error, and which entries it uses."""

    indices: npt.NDArray[np.uint8]
    scales: F16Array  # [r]
    squared_errors: F64Array  # [r], ‖w - w'‖²
    squared_norms: F64Array  # [r], ‖w‖²
    usage: npt.NDArray[np.int64]  # [stages, entries]: how often each entry is chosen


class RowEncoder(Protocol):
    """The codebooks of one kind, ready to encode, on whatever device. Several threads may use one."""

    entries: F32Array  # [stages, n, 8], f16-rounded

    def search(self, vectors: F32Array) -> Codes:
        """Codes [n, stages] of `vectors` [n, 8], row-scaled."""

    def strip_rows(self, cols: int) -> int:
        """How many rows of a matrix it takes at once: a whole number of index tiles."""

    def encode(self, source: SourceTensor, raw: RawRows, timing: Timing) -> EncodedRows | int:
        """Encode rows of `source`, read as `raw`. Returns the first row with NaN or infinity instead, if any."""


def make_encoder(entries: F32Array, quant: ExpertQuant, beam_width: int, device: str = CPU) -> RowEncoder:
    """An encoder for `entries` [stages, n, 8], f16-rounded, on `device`; `beam_width` 1 is greedy search."""
    if device == CPU:
        return Encoder(entries, quant, beam_width)
    # imported only now: the processor's path should not wait for torch to load
    from convert.torch_encode import TorchEncoder

    return TorchEncoder(entries, quant, beam_width, device)


class Encoder:
    """The codebooks of one kind, ready to encode on the processor."""

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

    def strip_rows(self, cols: int) -> int:
        """The same for every matrix."""
        return STRIP_ROWS

    def encode(self, source: SourceTensor, raw: RawRows, timing: Timing) -> EncodedRows | int:
        """Encode rows of `source`, read as `raw`. Returns the first row with NaN or infinity instead, if any."""
        with timing.step("dequantise"):
            rows = source.decode(raw)
        with timing.step("encode"):
            return self.encode_rows(rows)

    def encode_rows(self, rows: F32Array) -> EncodedRows | int:
        """Encode `rows` [r, cols], which are overwritten.

        Returns the number of the first row with NaN or infinity instead, when there is one.
        """
        row_scales = np.empty(len(rows), dtype=np.float64)
        bad = scale_rows(rows, row_scales)
        if bad >= 0:
            return int(bad)
        codes, sums = self._fitted(rows)

        def search_again(numbers: Numbers, divisors: F64Array) -> tuple[Codes, F64Array]:
            return self._fitted((rows[numbers] / divisors[:, None]).astype(np.float32))

        improve_odd_rows(codes, sums, row_scales, search_again)
        return encoded_rows(codes, sums, row_scales, self.quant)

    def _fitted(self, rows: F32Array) -> tuple[Codes, F64Array]:
        """Codes [r, vectors, stages] of `rows` [r, cols], already scaled, and the sums [r, 3] of `fit_rows`."""
        n_rows, cols = rows.shape
        codes = self.search(rows.reshape(-1, VEC_DIM))
        sums = np.empty((n_rows, 3), dtype=np.float64)
        fit_rows(rows, codes, self.entries, sums)
        return codes.reshape(n_rows, cols // VEC_DIM, -1), sums


def improve_odd_rows(codes: Codes, sums: F64Array, row_scales: F64Array, search_again: SearchAgain) -> None:
    """Search rows whose best channel scale is far from the row scale again, scaled by it, while that lowers the error.

    Such a row has outliers beyond the codebooks' reach, or another shape than the sample had. `search_again` gets
    numbers of rows and what to divide them by, as first scaled, and returns their codes and sums; what is better
    replaces `codes`, `sums` and `row_scales` in place.
    """
    first_scales, divisors = row_scales.copy(), _best_factors(sums)
    odd = np.flatnonzero(np.abs(divisors - 1) > ODD_FACTOR)
    for _ in range(MOST_SEARCHES_AGAIN):
        if len(odd) == 0:
            return
        found_codes, found_sums = search_again(odd, divisors[odd])
        scales = first_scales[odd] * divisors[odd]
        errors, found_errors = _least_errors(sums[odd], row_scales[odd]), _least_errors(found_sums, scales)
        better, much_better = found_errors < errors, found_errors < (1 - WORTH_ANOTHER_SEARCH) * errors
        codes[odd[better]], sums[odd[better]] = found_codes[better], found_sums[better]
        row_scales[odd[better]] = scales[better]
        odd = odd[much_better]
        divisors[odd] *= _best_factors(sums[odd])


def encoded_rows(codes: Codes, sums: F64Array, row_scales: F64Array, quant: ExpertQuant) -> EncodedRows:
    """What was found for r rows as it is stored: `codes` [r, vectors, stages], `sums` [r, 3] of `fit_rows`."""
    scales, squared_errors, squared_norms = _channel_scales(sums, row_scales)
    stages = codes.reshape(-1, quant.n_stages).T
    usage = np.stack([np.bincount(stage, minlength=quant.n_entries) for stage in stages])
    return EncodedRows(pack_indices(codes, quant), scales, squared_errors, squared_norms, usage)


def _channel_scales(sums: F64Array, row_scales: F64Array) -> tuple[F16Array, F64Array, F64Array]:
    """Least-squares channel scales as stored, with each row's squared error and squared norm."""
    stored = stored_scales(row_scales * _best_factors(sums))
    errors = _squared_errors(sums, row_scales, stored.astype(np.float64))
    return stored, errors, row_scales * row_scales * sums[:, 2]


def _best_factors(sums: F64Array) -> F64Array:
    """Best channel scale over row scale, Σxy / Σyy; 1 where that is not positive and there is nothing to fit."""
    xy, yy, _ = sums.T
    factors: F64Array = np.ones(len(sums))
    np.divide(xy, yy, out=factors, where=(yy > 0) & (xy > 0))
    return factors


def _squared_errors(sums: F64Array, row_scales: F64Array, channel_scales: F64Array) -> F64Array:
    """r² Σxx − 2 r c Σxy + c² Σyy of rows r x, with x scaled by the row scale r, stored as c y."""
    xy, yy, xx = sums.T
    errors: F64Array = row_scales**2 * xx - 2 * channel_scales * row_scales * xy + channel_scales**2 * yy
    return np.maximum(errors, 0)


def _least_errors(sums: F64Array, row_scales: F64Array) -> F64Array:
    """Squared errors with the best channel scale, before it is rounded to what can be stored."""
    return _squared_errors(sums, row_scales, row_scales * _best_factors(sums))
