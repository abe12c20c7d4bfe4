"""A checkpoint's tensors as matrices of floats, read by row ranges, whatever encoding holds them."""

from __future__ import annotations

import math
from collections.abc import Container as Names
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from container.checkpoint import Checkpoint
from container.errors import SourceError, WeightError
from container.shards import ShardTensor
from convert.encodings import ENCODINGS
from convert.encodings.base import Bytes, Encoding, F32Array

RawRows = tuple[Bytes, ...]


def find_encoding(tensor: str, names: Names[str]) -> Encoding:
    """The encoding under which `names` hold `tensor`.

    Raises SourceError when no encoding finds all its parts, or more than one does.
    """
    found = [encoding for encoding in ENCODINGS if all(part in names for part in encoding.part_names(tensor))]
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(f"tensor {tensor}: stored more than once, as {' and as '.join(e.name for e in found)}")
    present = [part for encoding in ENCODINGS for part in encoding.part_names(tensor) if part in names]
    if present:
        raise SourceError(f"tensor {tensor}: incomplete, only {', '.join(present)} exists")
    raise SourceError(f"tensor {tensor}: missing")


def shards_of(tensor: str, checkpoint: Checkpoint) -> frozenset[str]:
    """The shards that hold any part of `tensor` under any encoding."""
    parts = (part for encoding in ENCODINGS for part in encoding.part_names(tensor))
    return frozenset(checkpoint.weight_map[part] for part in parts if part in checkpoint)


@dataclass(frozen=True)
class SourceTensor:
    """One logical tensor of an opened checkpoint, seen as a matrix: rows are all dimensions but the last."""

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    parts: tuple[ShardTensor, ...]

    @classmethod
    def open(cls, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> SourceTensor:
        """Find and check a tensor. Raises SourceError when it is absent, or its dtype or shape is not right."""
        encoding = find_encoding(name, checkpoint)
        parts = tuple(checkpoint.entry(part) for part in encoding.part_names(name))
        problems = encoding.problems(parts, shape)
        if problems:
            raise SourceError("; ".join(problems))
        return cls(checkpoint, name, shape, encoding, parts)

    def reshaped(self, shape: tuple[int, ...]) -> SourceTensor:
        """The same values, row-major, under another shape (a convolution kernel seen as a matrix)."""
        return SourceTensor(self.checkpoint, self.name, shape, self.encoding, self.parts)

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols)."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def n_bytes(self) -> int:
        """Bytes of all parts on disk."""
        return sum(part.n_bytes for part in self.parts)

    def read(self, start: int = 0, stop: int | None = None) -> RawRows:
        """Raw bytes of rows `start` to `stop` (default: all), one array per part."""
        rows = self.matrix[0]
        ranges = self.encoding.byte_ranges(self.parts, self.matrix, start, rows if stop is None else stop)
        return tuple(
            self.checkpoint.read(part.name, offset, n_bytes)
            for part, (offset, n_bytes) in zip(self.parts, ranges, strict=True)
        )

    def slice(self, raw: RawRows, start: int, stop: int) -> RawRows:
        """The bytes of rows `start` to `stop` out of the bytes of all rows."""
        ranges = self.encoding.byte_ranges(self.parts, self.matrix, start, stop)
        return tuple(data[offset : offset + n_bytes] for data, (offset, n_bytes) in zip(raw, ranges, strict=True))

    def decode(self, raw: RawRows) -> F32Array:
        """Raw rows → f32 [rows, cols]; not checked for NaN."""
        rows = raw[0].size * self.matrix[0] // self.parts[0].n_bytes
        return self.encoding.decode(raw, [part.dtype for part in self.parts], rows, self.matrix[1])

    def bad_weight(self, row: int, rows: npt.NDArray[np.float32]) -> WeightError:
        """The error for a row (counted from the tensor's first) of `rows` that is not finite."""
        return WeightError(
            f"{self.checkpoint.folder}: tensor {self.name}: row {row} holds NaN or infinity "
            f"({int((~np.isfinite(rows)).sum())} such weights seen); the checkpoint is damaged or not a release"
        )
