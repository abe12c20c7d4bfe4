"""Plain tensors: BF16, F16 or F32, one part under the tensor's own name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from container.shards import DTYPE_BITS, ShardTensor
from convert.encodings.base import Bytes, F32Array, Matrix

READABLE = ("BF16", "F16", "F32")


class Plain:
    """Values as they are."""

    name = "plain"

    def part_names(self, tensor: str) -> tuple[str, ...]:
        """The tensor itself."""
        return (tensor,)

    def problems(self, parts: Sequence[ShardTensor], shape: tuple[int, ...]) -> list[str]:
        """Wrong dtype or shape."""
        (part,) = parts
        found = []
        if part.dtype not in READABLE:
            found.append(f"tensor {part.name}: dtype {part.dtype}, expected one of {', '.join(READABLE)}")
        if part.shape != shape:
            found.append(f"tensor {part.name}: shape {list(part.shape)}, expected {list(shape)}")
        return found

    def byte_ranges(self, parts: Sequence[ShardTensor], matrix: Matrix, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows lie back to back."""
        row_bytes = matrix[1] * DTYPE_BITS[parts[0].dtype] // 8
        return [(start * row_bytes, (stop - start) * row_bytes)]

    def decode(self, raw: Sequence[Bytes], dtypes: Sequence[str], rows: int, cols: int) -> F32Array:
        """Exact: bf16 and f16 are subsets of f32."""
        (data,) = raw
        if dtypes[0] == "BF16":
            values = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = data.view("<f2" if dtypes[0] == "F16" else "<f4").astype(np.float32)
        return values.reshape(rows, cols)
