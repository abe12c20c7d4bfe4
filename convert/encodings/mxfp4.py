"""MXFP4 pairs: U8 `<name>_packed` (two E2M1 values a byte) and U8 `<name>_scale` (E8M0, one per 32 columns).

Source: docs/MODELS.md 6.1 (OCP MX formats; compressed-tensors' mxfp4-pack-quantized). Low nibble is the even
column; a scale byte e means 2^(e-127), also for e = 0; e = 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from container.shards import ShardTensor
from convert.encodings.base import Bytes, F32Array, Matrix
from convert.kernels import decode_mxfp4

BLOCK = 32  # columns that share one scale

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
with np.errstate(over="ignore"):
    E8M0 = np.ldexp(np.float32(1), np.arange(256) - 127).astype(np.float32)
E8M0[255] = np.nan


class Mxfp4:
    """Packed 4-bit floats with power-of-two block scales."""

    name = "MXFP4"

    def part_names(self, tensor: str) -> tuple[str, ...]:
        """Values, then scales."""
        return (f"{tensor}_packed", f"{tensor}_scale")

    def problems(self, parts: Sequence[ShardTensor], shape: tuple[int, ...]) -> list[str]:
        """Wrong dtype or shape."""
        if len(shape) != 2 or shape[1] % BLOCK:
            return [
                f"tensor {parts[0].name}: MXFP4 needs a matrix with columns in blocks of {BLOCK}, not {list(shape)}"
            ]
        found = []
        for part, divisor in zip(parts, (2, BLOCK), strict=True):
            expected = (shape[0], shape[1] // divisor)
            if part.dtype != "U8":
                found.append(f"tensor {part.name}: dtype {part.dtype}, expected U8")
            if part.shape != expected:
                found.append(f"tensor {part.name}: shape {list(part.shape)}, expected {list(expected)}")
        return found

    def byte_ranges(self, parts: Sequence[ShardTensor], matrix: Matrix, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows lie back to back in both parts."""
        cols = matrix[1]
        return [(start * cols // d, (stop - start) * cols // d) for d in (2, BLOCK)]

    def decode(self, raw: Sequence[Bytes], dtypes: Sequence[str], rows: int, cols: int) -> F32Array:
        """value × 2^(e-127): exact in f32 up to its range, beyond it infinite."""
        packed, scales = raw
        decoded = np.empty((rows, cols), dtype=np.float32)
        decode_mxfp4(packed.reshape(rows, -1), scales.reshape(rows, -1), E2M1, E8M0, decoded)
        return decoded
