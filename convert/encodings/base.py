"""How a logical tensor is stored in a checkpoint: which parts it has on disk and how rows of them become floats.

One file per encoding. A part is a tensor of its own in the shard; reading goes by row ranges, so that no
matrix has to be whole in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from container.shards import ShardTensor

F32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Matrix = tuple[int, int]  # rows, cols


class Encoding(Protocol):
    """One way to store a matrix [rows, cols]."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def part_names(self, tensor: str) -> tuple[str, ...]:
        """Names on disk of the parts that together hold `tensor`."""

    def problems(self, parts: Sequence[ShardTensor], shape: tuple[int, ...]) -> list[str]:
        """What stands against reading these parts as a tensor of `shape`: wrong dtype or shape. Empty when fine."""

    def byte_ranges(self, parts: Sequence[ShardTensor], matrix: Matrix, start: int, stop: int) -> list[tuple[int, int]]:
        """(start byte, bytes) inside each part that rows `start` to `stop` need."""

    def decode(self, raw: Sequence[Bytes], dtypes: Sequence[str], rows: int, cols: int) -> F32Array:
        """The bytes of those ranges → f32 [rows, cols]. NaN and infinity pass through; the caller refuses them."""
