"""The trunk of an opened container, tensor by tensor.

`Trunk` reads tensors of an opened container by name and refuses, in one message, a container that lacks some or
has them in another shape. The embedding stays on disk: `EmbeddingRows` reads one row per token.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from container.errors import FormatError, IntegrityError
from container.layout import TRUNK_NAME
from container.manifest import TrunkEntry
from container.reader import ContainerReader
from container.trunk import unpack_rows
from runtime.matrix import Matrix

F32 = npt.NDArray[np.float32]
Shape = tuple[int, ...]
# what a model needs: tensor name without prefix -> the shapes it may have
Needs = dict[str, tuple[Shape, ...]]

_CRC_CHUNK_BYTES = 16 << 20


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
