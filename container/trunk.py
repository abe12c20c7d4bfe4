"""Trunk tensor formats F32, Q8G and Q4G: floats ⇄ bytes, one pair per format, and the sizes of both.

Grouped formats hold integer values, rows padded to whole groups of 128, then one f16 scale per group
(docs/FORMAT.md, trunk.bin): weight = value × scale. The integers are chosen against the scale as it is
stored, in f16, which is never inf and never 0 under a non-zero weight; it may be negative. Where no weight lies beyond
the range of the integers, |weight - decoded| is at most half a scale; a weight beyond it is clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from container.layout import GROUP_SIZE, TrunkFormat, align_up

F32Array = npt.NDArray[np.float32]
F16Array = npt.NDArray[np.float16]
Bytes = npt.NDArray[np.uint8]

Q4G_ZERO = 8  # stored nibble of the value 0
F16_LARGEST = np.float32(65504.0)
F16_SMALLEST = np.float32(2.0**-24)


@dataclass(frozen=True)
class Grouped:
    """The numbers of one grouped format."""

    bits: int
    least: int
    most: int

    @property
    def group_bytes(self) -> int:
        """Bytes of the values of one group."""
        return GROUP_SIZE * self.bits // 8


GROUPED: dict[TrunkFormat, Grouped] = {
    TrunkFormat.Q8G: Grouped(bits=8, least=-127, most=127),
    TrunkFormat.Q4G: Grouped(bits=4, least=-8, most=7),
}


@dataclass(frozen=True)
class TrunkSize:
    """Bytes of a stored tensor: values first, then (grouped formats) the scales."""

    rows: int
    row_bytes: int
    row_scale_bytes: int

    @property
    def values_bytes(self) -> int:
        """Bytes of all values."""
        return self.rows * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.rows * (self.row_bytes + self.row_scale_bytes)


def trunk_size(shape: tuple[int, ...], fmt: TrunkFormat) -> TrunkSize:
    """Stored size of a tensor; rows are the product of all dimensions but the last."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    if fmt is TrunkFormat.F32:
        return TrunkSize(rows, 4 * cols, 0)
    groups = align_up(cols, GROUP_SIZE) // GROUP_SIZE
    return TrunkSize(rows, groups * GROUPED[fmt].group_bytes, 2 * groups)


def pack_rows(rows: F32Array, fmt: TrunkFormat, scales: F16Array | None = None) -> tuple[Bytes, F16Array]:
    """Weights [rows, cols] f32 → (values [rows, row_bytes] uint8, group scales [rows, groups] f16).

    `scales` are the group scales to store, of either sign, finite, 0 only for a group of zeros; by default those of
    `amax_scales`. F32 has no scales: the second array is empty. The weights must be finite; the caller checks, since
    only it knows the tensor's name. Raises ValueError for scales of another shape.
    """
    if fmt is TrunkFormat.F32:
        values = np.ascontiguousarray(rows, dtype="<f4").view(np.uint8)
        return values, np.empty((len(rows), 0), dtype=np.float16)
    grouped = GROUPED[fmt]
    groups = _grouped(rows)
    if scales is None:
        scales = _amax_scales(groups, grouped.most)
    elif scales.shape != groups.shape[:-1]:
        raise ValueError(f"{list(scales.shape)} scales do not fit {list(groups.shape[:-1])} groups")
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))[..., None]
    values_i8 = np.clip(np.rint(groups / divisor), grouped.least, grouped.most).astype(np.int8)
    flat = values_i8.reshape(len(rows), -1)
    if grouped.bits == 8:
        return flat.view(np.uint8), scales
    nibbles = (flat + Q4G_ZERO).astype(np.uint8)
    packed: Bytes = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    return packed, scales


def unpack_rows(values: Bytes, scales: F16Array, cols: int, fmt: TrunkFormat) -> F32Array:
    """Stored values [rows, row_bytes] and scales [rows, groups] → weights [rows, cols] f32."""
    if fmt is TrunkFormat.F32:
        return np.ascontiguousarray(values).view("<f4").astype(np.float32)
    if GROUPED[fmt].bits == 8:
        integers = values.view(np.int8).astype(np.float32)
    else:
        nibbles = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)
        integers = nibbles.astype(np.float32) - Q4G_ZERO
    groups = integers.reshape(len(values), -1, GROUP_SIZE) * scales.astype(np.float32)[..., None]
    return cast(F32Array, groups.reshape(len(values), -1)[:, :cols])


def amax_scales(rows: F32Array, fmt: TrunkFormat) -> F16Array:
    """Weights [rows, cols] f32 → the smallest group scales [rows, groups] f16 that clip nothing: amax / 127 or / 7."""
    return _amax_scales(_grouped(rows), GROUPED[fmt].most)


def stored_scales(scales: npt.NDArray[np.floating[Any]]) -> F16Array:
    """Non-negative scales rounded to f16: at most the largest finite f16, and 0 only where the scale is 0."""
    bounded = np.clip(scales, F16_SMALLEST, F16_LARGEST)
    return np.where(scales == 0, np.float32(0), bounded).astype(np.float16)


def _amax_scales(groups: F32Array, most: int) -> F16Array:
    """amax / most in f16; one step up where rounding down (among subnormals) would clip the largest weight."""
    amax = np.abs(groups).max(axis=-1, initial=0.0)
    scales = stored_scales(amax / np.float32(most))
    too_small = scales.astype(np.float32) * np.float32(most + 0.5) < amax
    return np.where(too_small & (scales < F16_LARGEST), np.nextafter(scales, np.float16(F16_LARGEST)), scales)


def _grouped(rows: F32Array) -> F32Array:
    """Rows padded with zeros to whole groups: [rows, groups, GROUP_SIZE]."""
    n_rows, cols = rows.shape
    padded = align_up(cols, GROUP_SIZE)
    if padded != cols:
        wide = np.zeros((n_rows, padded), dtype=np.float32)
        wide[:, :cols] = rows
        rows = wide
    return rows.reshape(n_rows, -1, GROUP_SIZE)
