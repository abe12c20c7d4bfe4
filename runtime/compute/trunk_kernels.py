"""Products with trunk matrices as they are stored, for one token: numba loops over some of the rows.

Kernels run on the calling thread, without the interpreter's lock, write into arrays their caller allocated and
check no bounds: callers pass matching shapes. Rows may belong to several heads: row i of head h is stored row
`h * stride + first + i`; a plain matrix is one head. Scales are the bits of f16 numbers, as stored. Grouped formats
take x in groups, padded with zeros, and Q4G in an order of its own (`in_words`).

Sums run in f32 over short spans in independent partial sums, and the spans are added up in f64, so that rounding
does not grow with the length. The order of a sum depends on the shapes alone.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from container.layout import GROUP_SIZE
from container.trunk import Q4G_ZERO
from runtime.compute.gates import F32, FAST
from runtime.compute.lanes import (
    NIBBLE_FACTORS,
    add_scaled,
    add_wide,
    dot_bytes,
    dot_nibbles,
    prefetch,
    wide_sum,
    wide_zeros,
    widened,
    zeros,
)

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
I8 = npt.NDArray[np.int8]

HALF_GROUP = GROUP_SIZE // 2
# Weights come from memory once a token: they are asked for this early, in cache lines of 64 bytes.
_AHEAD_BYTES = 4096
_SPAN = 8  # groups that are summed before they join the total


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def f32_matvec(values: F32, _scales: U16, x: F32, stride: int, first: int, out: F32, start: int, stop: int) -> None:
    """out[h, i] = row · x[h] for values [rows, cols], x [heads, cols]; elements start to stop - 1 of all."""
    count = out.shape[1]
    for item in range(start, stop):
        h = item // count
        i = item - h * count
        row = values[h * stride + first + i]
        total = 0.0
        for begin in range(0, row.size, GROUP_SIZE):
            span, factors = row[begin : begin + GROUP_SIZE], x[h, begin : begin + GROUP_SIZE]
            part = np.float32(0)
            for c in range(span.size):
                part += span[c] * factors[c]
            total += np.float64(part)
        out[h, i] = total


@nb.njit(cache=True, nogil=True)
def q8g_matvec(values: I8, scales: U16, x: F32, stride: int, first: int, out: F32, start: int, stop: int) -> None:
    """The same for values [rows, groups, 128], scales [rows, groups], x [heads, groups, 128]."""
    count, n_groups = out.shape[1], scales.shape[1]
    flat, factors = values.reshape(-1), x.reshape(-1)
    for item in range(start, stop):
        h = item // count
        i = item - h * count
        row = h * stride + first + i
        total = wide_zeros()
        for begin in range(0, n_groups, _SPAN):
            part = zeros()
            for g in range(begin, min(begin + _SPAN, n_groups)):
                at, factor = (row * n_groups + g) * GROUP_SIZE, (h * n_groups + g) * GROUP_SIZE
                prefetch(flat, at + _AHEAD_BYTES)
                prefetch(flat, at + _AHEAD_BYTES + GROUP_SIZE // 2)
                part = add_scaled(part, widened(scales[row, g]), dot_bytes(flat, at, factors, factor))
            total = add_wide(total, part)
        out[h, i] = wide_sum(total)


@nb.njit(cache=True, nogil=True)
def q4g_matvec(values: U8, scales: U16, x: F32, stride: int, first: int, out: F32, start: int, stop: int) -> None:
    """The same for values [rows, groups, 64], scales [rows, groups], x [heads, groups, 128] as `in_words` leaves it."""
    count, n_groups = out.shape[1], scales.shape[1]
    flat, factors = values.reshape(-1), x.reshape(-1)
    for item in range(start, stop):
        h = item // count
        i = item - h * count
        row = h * stride + first + i
        total = wide_zeros()
        for begin in range(0, n_groups, _SPAN):
            part = zeros()
            for g in range(begin, min(begin + _SPAN, n_groups)):
                at, factor = (row * n_groups + g) * HALF_GROUP, (h * n_groups + g) * GROUP_SIZE
                prefetch(flat, at + _AHEAD_BYTES)
                part = add_scaled(part, widened(scales[row, g]), dot_nibbles(flat, at, factors, factor))
            total = add_wide(total, part)
        out[h, i] = wide_sum(total)


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def f32_transposed(values: F32, _scales: U16, x: F32, stride: int, first: int, out: F32, start: int, stop: int) -> None:
    """out[h] = Σ_i x[h, i] · row i for heads start to stop - 1, for values [rows, cols], out [heads, cols]."""
    for h in range(start, stop):
        out[h] = 0
        for i in range(x.shape[1]):
            row, factor = values[h * stride + first + i], x[h, i]
            for c in range(row.size):
                out[h, c] += factor * row[c]


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def q8g_transposed(values: I8, scales: U16, x: F32, stride: int, first: int, out: F32, start: int, stop: int) -> None:
    """The same for values [rows, groups, 128], out [heads, groups, 128]."""
    for h in range(start, stop):
        out[h] = 0
        for i in range(x.shape[1]):
            row = h * stride + first + i
            for g in range(scales.shape[1]):
                factor = x[h, i] * widened(scales[row, g])
                for c in range(GROUP_SIZE):
                    out[h, g, c] += factor * np.float32(values[row, g, c])


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def q4g_transposed(values: U8, scales: U16, x: F32, stride: int, first: int, out: F32, start: int, stop: int) -> None:
    """The same for values [rows, groups, 64], out [heads, 2, groups, 64]."""
    for h in range(start, stop):
        out[h] = 0
        for i in range(x.shape[1]):
            row = h * stride + first + i
            for g in range(scales.shape[1]):
                factor = x[h, i] * widened(scales[row, g])
                for c in range(HALF_GROUP):
                    pair = np.int32(values[row, g, c])
                    out[h, 0, g, c] += factor * np.float32((pair & 15) - Q4G_ZERO)
                    out[h, 1, g, c] += factor * np.float32((pair >> 4) - Q4G_ZERO)


@nb.njit(cache=True, nogil=True)
def in_words(x: F32, out: F32) -> None:
    """x [heads, cols] → out [heads, groups, 128], zeros behind, as `dot_nibbles` takes it.

    Element 8 l + k of a group, whose nibble is number k of 32-bit word l, comes to 16 k + l.
    """
    for h in range(out.shape[0]):
        for g in range(out.shape[1]):
            for k in range(8):
                factor = np.float32(NIBBLE_FACTORS[k])
                for word in range(16):
                    c = g * GROUP_SIZE + 8 * word + k
                    out[h, g, 16 * k + word] = x[h, c] * factor if c < x.shape[1] else np.float32(0)
