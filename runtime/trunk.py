"""The trunk of an opened container, tensor by tensor.

`Trunk` refuses, in one message, a container that lacks tensors or has them in another shape, and gives those that are
there as views of what `runtime.disk.resident` holds. The embedding stays on disk: `EmbeddingRows` reads rows of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from container.errors import FormatError
from container.layout import TRUNK_NAME, TrunkFormat
from container.manifest import TrunkEntry
from container.reader import ContainerReader
from container.trunk import unpack_rows
from runtime.compute.gates import F32
from runtime.compute.matrix import Matrix, aligned
from runtime.compute.team import Team
from runtime.disk.direct import DirectFiles
from runtime.disk.resident import Progress, ResidentTrunk, check_crc

F16 = npt.NDArray[np.float16]
U8 = npt.NDArray[np.uint8]
Shape = tuple[int, ...]
# what a model needs: tensor name without prefix -> the shapes it may have
Needs = dict[str, tuple[Shape, ...]]

_CRC_CHUNK_BYTES = 4 << 20


class EmbeddingRows:
    """A trunk matrix that stays on disk and is read row by row."""

    def __init__(self, files: DirectFiles, entry: TrunkEntry) -> None:
        self._files = files
        self._entry = entry

    def rows(self, indices: Sequence[int]) -> F32:
        """Rows `indices` [T] as f32 [T, cols]: per distinct row one small read of values and one of scales."""
        distinct, inverse = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True)
        entry, size = self._entry, self._entry.size
        values = np.empty((len(distinct), size.row_bytes), dtype=np.uint8)
        scales = np.empty((len(distinct), size.row_scale_bytes), dtype=np.uint8)
        for n, index in enumerate(distinct.tolist()):
            self._files.read_into(TRUNK_NAME, values[n].data, entry.offset + index * size.row_bytes)
            if entry.scale_offset is not None:
                self._files.read_into(TRUNK_NAME, scales[n].data, entry.scale_offset + index * size.row_scale_bytes)
        return unpack_rows(values, scales.view("<f2"), entry.shape[-1], entry.fmt)[inverse]


class Trunk:
    """Trunk tensors by name (without the container's prefix).

    `load` brings those that stay in memory into it. With `verify` the crc32 of every tensor that has one in the
    manifest is checked when it is read.
    """

    def __init__(
        self,
        reader: ContainerReader,
        files: DirectFiles,
        *,
        team: Team,
        n_threads: int = 1,
        verify: bool = False,
    ) -> None:
        self.path = reader.folder / TRUNK_NAME
        self._reader = reader
        self._files = files
        self._team = team
        self._n_threads = n_threads
        self._verify = verify
        self._resident = ResidentTrunk([])

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

    def load(self, progress: Progress | None = None) -> None:
        """Read what stays in memory, on several threads; `progress` hears of it. Raises FormatError, IntegrityError."""
        self._resident = ResidentTrunk.load(
            self._reader, self._files, n_threads=self._n_threads, verify=self._verify, progress=progress
        )

    def matrix(self, name: str) -> Matrix:
        """A loaded tensor as a matrix of its stored bytes, not copied. Raises FormatError."""
        entry = self._reader.entry(name)
        values, scales = self._stored(entry)
        return Matrix(values, scales, entry.shape[-1], entry.fmt, self._team)

    def array(self, name: str) -> F32:
        """A loaded tensor as f32 in its own shape: F32 as it is, others widened. Raises FormatError."""
        entry = self._reader.entry(name)
        values, scales = self._stored(entry)
        if entry.fmt is TrunkFormat.F32:
            return aligned(values.view("<f4")).reshape(entry.shape)
        return unpack_rows(values, scales, entry.shape[-1], entry.fmt).reshape(entry.shape)

    def embedding(self, name: str) -> EmbeddingRows:
        """The tensor left on disk. Raises FormatError, IntegrityError."""
        entry = self._reader.entry(name)
        if self._verify:
            crc, chunk = 0, np.empty(min(_CRC_CHUNK_BYTES, entry.n_bytes), dtype=np.uint8)
            for start in range(0, entry.n_bytes, _CRC_CHUNK_BYTES):
                view = chunk[: entry.n_bytes - start].data
                self._files.read_into(TRUNK_NAME, view, entry.offset + start)
                crc = zlib.crc32(view, crc)
            check_crc(self._reader, entry, crc)
        return EmbeddingRows(self._files, entry)

    def _stored(self, entry: TrunkEntry) -> tuple[U8, F16]:
        """Values [rows, row_bytes] and scales [rows, groups] ([rows, 0] for F32) of a tensor in memory."""
        size, content = entry.size, self._resident.content(entry)
        values = content[: size.values_bytes].reshape(size.rows, size.row_bytes)
        scales_start = 0 if entry.scale_offset is None else entry.scale_offset - entry.offset
        scales = content[scales_start : scales_start + size.rows * size.row_scale_bytes]
        return values, scales.view("<f2").reshape(size.rows, -1)


def dimensions(needs: Mapping[str, Shape]) -> Needs:
    """Needs with one shape each."""
    return {name: (shape,) for name, shape in needs.items()}
