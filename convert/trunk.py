"""Writing trunk tensors into their planned slices of trunk.bin, in strips of rows so that memory stays flat."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from container.layout import TrunkFormat
from container.trunk import pack_rows, unpack_rows
from convert.group_scales import searched_scales
from convert.plan import TrunkSlice
from convert.relative_error import RelativeError
from convert.source import RawRows, SourceTensor
from convert.threads import map_ahead
from convert.timing import Timing

# A strip's f32 copy has 8 MB; a handful of temporaries of this size exist per thread.
STRIP_WEIGHTS = 1 << 21


@dataclass(frozen=True)
class WrittenTensor:
    """What one trunk tensor's slice holds now."""

    crc32: int
    relative_error: float


@dataclass(frozen=True)
class _Strip:
    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    squared_error: float
    squared_norm: float


def write_tensor(
    source: SourceTensor, item: TrunkSlice, descriptor: int, threads: ThreadPoolExecutor, timing: Timing
) -> WrittenTensor:
    """Read, quantise and write one tensor; `descriptor` is trunk.bin opened for writing.

    Raises WeightError, naming tensor and row, for NaN or infinity; OSError when the disk is full.
    """
    entry = item.entry
    source = source.reshaped(entry.shape)

    def pack(strip: tuple[int, RawRows]) -> _Strip:
        return _pack_strip(source, *strip, entry.fmt, timing)

    position, crc = entry.offset, 0
    scales, error = [], RelativeError()
    for strip in map_ahead(threads, pack, _read_strips(source, timing), ahead=2):
        with timing.step("write"):
            _write(descriptor, strip.values.reshape(-1), position)
            crc = zlib.crc32(strip.values.reshape(-1).data, crc)
        position += strip.values.nbytes
        scales.append(strip.scales)
        error.add(strip.squared_error, strip.squared_norm)
    if entry.scale_offset is not None:
        scale_bytes = np.concatenate(scales).astype("<f2", copy=False).reshape(-1).view(np.uint8)
        _write(descriptor, scale_bytes, entry.scale_offset)
        crc = zlib.crc32(scale_bytes.data, crc)
    return WrittenTensor(crc, error.value)


def _read_strips(source: SourceTensor, timing: Timing) -> Iterator[tuple[int, RawRows]]:
    rows, cols = source.matrix
    strip_rows = max(1, STRIP_WEIGHTS // cols)
    for start in range(0, rows, strip_rows):
        with timing.step("read"):
            raw = source.read(start, min(rows, start + strip_rows))
        yield start, raw


def _pack_strip(source: SourceTensor, start: int, raw: RawRows, fmt: TrunkFormat, timing: Timing) -> _Strip:
    with timing.step("dequantise"):
        rows = source.decode(raw)
        finite = np.isfinite(rows)
    if not finite.all():
        raise source.bad_weight(start + int(np.argmin(finite.all(axis=1))), rows)
    with timing.step("encode"):
        searched = None if fmt is TrunkFormat.F32 else searched_scales(rows, fmt)
        values, scales = pack_rows(rows, fmt, searched)
        error = unpack_rows(values, scales, rows.shape[1], fmt) - rows
        squared_error = float(np.square(error, dtype=np.float64).sum())
        squared_norm = float(np.square(rows, dtype=np.float64).sum())
    return _Strip(values, scales, squared_error, squared_norm)


def _write(descriptor: int, data: npt.NDArray[np.uint8], offset: int) -> None:
    view, done = data.data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
