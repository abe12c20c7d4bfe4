"""Trunk tensors as the runtime keeps them: quantised as stored, multiplied without ever being unpacked.

`Trunk` reads tensors of an opened container by name and refuses, in one message, a container that lacks some or
has them in another shape. The embedding stays on disk: `EmbeddingRows` reads one row per token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from container.errors import FormatError, IntegrityError
from container.layout import GROUP_SIZE, TRUNK_NAME, TrunkFormat, align_up
from container.manifest import TrunkEntry
from container.reader import ContainerReader
from container.trunk import unpack_rows
from runtime import kernels

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Shape = tuple[int, ...]
# what a model needs: tensor name without prefix -> the shapes it may have
Needs = dict[str, tuple[Shape, ...]]

# per format: how the kernels see the stored values, the product with rows, and with their transpose
_DTYPES: dict[TrunkFormat, npt.DTypeLike] = {
    TrunkFormat.F32: "<f4",
    TrunkFormat.Q8G: np.int8,
    TrunkFormat.Q4G: np.uint8,
}
_MATVEC: dict[TrunkFormat, Callable[..., None]] = {
    TrunkFormat.F32: kernels.f32_matvec,
    TrunkFormat.Q8G: kernels.q8g_matvec,
    TrunkFormat.Q4G: kernels.q4g_matvec,
}
_TRANSPOSED: dict[TrunkFormat, Callable[..., None]] = {
    TrunkFormat.F32: kernels.f32_transposed,
    TrunkFormat.Q8G: kernels.q8g_transposed,
    TrunkFormat.Q4G: kernels.q4g_transposed,
}
_CRC_CHUNK_BYTES = 16 << 20


class Matrix:
    """A trunk matrix [rows, cols] in its stored bytes, with group scales widened to f32.

    `values` are [rows, row_bytes] uint8 as stored, `scales` [rows, groups] f16 ([rows, 0] for F32).
    """

    def __init__(self, values: U8, scales: npt.NDArray[np.float16], cols: int, fmt: TrunkFormat) -> None:
        self.fmt = fmt
        self.rows, self.cols = len(values), cols
        self._scales = scales.astype(np.float32)
        self._values = values.view(_DTYPES[fmt])
        if fmt is not TrunkFormat.F32:
            self._values = self._values.reshape(*scales.shape, -1)

    def matvec(self, x: F32) -> F32:
        """The product with x [cols], as [rows]."""
        return self.matvec_heads(x.reshape(1, -1), stride=0, first=0, count=self.rows).reshape(-1)

    def matvec_heads(self, x: F32, *, stride: int, first: int, count: int) -> F32:
        """Rows `h * stride + first` and the `count - 1` after them, times x[h]: x [heads, cols] → [heads, count]."""
        self._check(x, self.cols, stride, first, count)
        out = np.empty((len(x), count), dtype=np.float32)
        _MATVEC[self.fmt](self._values, self._scales, self._in_groups(x), stride, first, out)
        return out

    def transposed_heads(self, x: F32, *, stride: int, first: int) -> F32:
        """Sum of rows `h * stride + first + i`, each times x[h, i]: x [heads, count] → [heads, cols]."""
        self._check(x, x.shape[1], stride, first, x.shape[1])
        out = np.empty_like(self._in_groups(np.zeros((len(x), self.cols), dtype=np.float32)))
        _TRANSPOSED[self.fmt](self._values, self._scales, np.ascontiguousarray(x), stride, first, out)
        if self.fmt is TrunkFormat.Q4G:
            out = np.moveaxis(out, 1, -1)
        return np.ascontiguousarray(out.reshape(len(x), -1)[:, : self.cols])

    def _in_groups(self, x: F32) -> F32:
        """x [heads, cols] as the kernels take it: in groups filled up with zeros; for Q4G even and odd apart."""
        if self.fmt is TrunkFormat.F32:
            return np.ascontiguousarray(x)
        padded = align_up(self.cols, GROUP_SIZE)
        if padded != self.cols:
            wide = np.zeros((len(x), padded), dtype=np.float32)
            wide[:, : self.cols] = x
            x = wide
        if self.fmt is TrunkFormat.Q8G:
            return np.ascontiguousarray(x.reshape(len(x), -1, GROUP_SIZE))
        return np.ascontiguousarray(np.moveaxis(x.reshape(len(x), -1, GROUP_SIZE // 2, 2), -1, 1))

    def _check(self, x: F32, width: int, stride: int, first: int, count: int) -> None:
        """The kernels check nothing, so a caller's mistake must end here."""
        last = (len(x) - 1) * stride + first + count
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != width or first < 0 or last > self.rows:
            raise ValueError(
                f"{x.dtype} {list(x.shape)} with stride {stride}, first {first}, count {count} does not fit a matrix "
                f"of {self.rows} × {self.cols}"
            )


class EmbeddingRows:
    """A trunk matrix that stays on disk and is read row by row."""

    def __init__(self, reader: ContainerReader, entry: TrunkEntry) -> None:
        self._reader = reader
        self._entry = entry

    def row(self, index: int) -> F32:
        """Row `index` as f32 [cols], by one small read of its values and one of its scales."""
        values, scales = self._reader.read_trunk_rows(self._entry, index, index + 1)
        return unpack_rows(values, scales, self._entry.shape[-1], self._entry.fmt).reshape(-1)


class Trunk:
    """Trunk tensors by name (without the container's prefix).

    With `verify` the crc32 of every tensor that has one in the manifest is checked when it is opened.
    """

    def __init__(self, reader: ContainerReader, *, verify: bool = False) -> None:
        self.path = reader.folder / TRUNK_NAME
        self._reader = reader
        self._verify = verify

    def require(self, needs: Needs) -> None:
        """Raises one FormatError that names every tensor that is missing or has none of the shapes it may have."""
        problems = []
        for name, shapes in needs.items():
            expected = " or ".join(str(list(shape)) for shape in shapes)
            try:
                entry = self._reader.entry(name)
            except FormatError:
                problems.append(f"{self._reader.manifest.tensor_prefix}{name} is missing (expected {expected})")
                continue
            if entry.shape not in shapes:
                problems.append(f"{entry.name} has shape {list(entry.shape)}, expected {expected}")
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise FormatError(
                f"{self.path}: the model needs {len(problems)} tensor(s) that are not there as "
                f"expected; convert the checkpoint again{listed}"
            )

    def matrix(self, name: str) -> Matrix:
        """The tensor as a matrix of its stored bytes. Raises FormatError, IntegrityError."""
        entry = self._reader.entry(name)
        size = entry.size
        values = self._reader.read_trunk_range(entry, 0, size.values_bytes)
        rest = self._reader.read_trunk_range(entry, size.values_bytes, entry.n_bytes - size.values_bytes)
        if self._verify:
            self._check_crc(entry, zlib.crc32(rest.data, zlib.crc32(values.data)))
        scales_start = 0 if entry.scale_offset is None else entry.scale_offset - entry.offset - size.values_bytes
        scales = rest[scales_start : scales_start + size.rows * size.row_scale_bytes].view("<f2")
        values = values.reshape(size.rows, size.row_bytes)
        return Matrix(values, scales.reshape(size.rows, -1), entry.shape[-1], entry.fmt)

    def array(self, name: str) -> F32:
        """A small tensor as f32 in its own shape, whatever its format. Raises FormatError, IntegrityError."""
        entry = self._reader.entry(name)
        if self._verify:
            self._check_crc(entry, zlib.crc32(self._reader.read_trunk(entry).data))
        values, scales = self._reader.read_trunk_rows(entry, 0, entry.size.rows)
        return unpack_rows(values, scales, entry.shape[-1], entry.fmt).reshape(entry.shape)

    def embedding(self, name: str) -> EmbeddingRows:
        """The tensor left on disk. Raises FormatError, IntegrityError."""
        entry = self._reader.entry(name)
        if self._verify:
            crc = 0
            for start in range(0, entry.n_bytes, _CRC_CHUNK_BYTES):
                n_bytes = min(_CRC_CHUNK_BYTES, entry.n_bytes - start)
                crc = zlib.crc32(self._reader.read_trunk_range(entry, start, n_bytes).data, crc)
            self._check_crc(entry, crc)
        return EmbeddingRows(self._reader, entry)

    def _check_crc(self, entry: TrunkEntry, found: int) -> None:
        if entry.crc32 is not None and found != entry.crc32:
            raise IntegrityError(
                f"{self.path}: {entry.name}: crc32 is {found:#010x}, the manifest says "
                f"{entry.crc32:#010x}: damaged tensor; convert the checkpoint again or fetch the file anew"
            )


def dimensions(needs: Mapping[str, Shape]) -> Needs:
    """Needs with one shape each."""
    return {name: (shape,) for name, shape in needs.items()}
