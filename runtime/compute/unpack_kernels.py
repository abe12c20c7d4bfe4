"""Stored rows to f32, for matrix products of many tokens: group-scaled trunk rows, and index tiles of experts.

Numba loops like those of `runtime.compute.trunk_kernels`: one thread, no interpreter's lock, no bounds checked. The
numbers are those of `container.trunk.unpack_rows` and sums of entries, each operation rounded once.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import extending
from numba.core import types
from numba.np import arrayobj

from container.layout import GROUP_SIZE, VEC_DIM
from container.trunk import Q4G_ZERO
from runtime.compute.elementary import OPTIONS
from runtime.compute.gates import F32

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]

_HALF_GROUP = GROUP_SIZE // 2
_VECTOR = ir.VectorType(ir.FloatType(), VEC_DIM)
_FLOAT_BYTES = 4


# Unpacked rows lie in a flat array, one every `stride` numbers: of an array with gaps between its rows numba knows no
# inner stride when it compiles, and does not vectorise.


@nb.njit(**OPTIONS)
def unpack_q8g(values: I8, scales: F32, cols: int, out: F32, stride: int) -> None:
    """Rows [rows, padded columns] times group scales [rows, groups] → rows of `cols` numbers in the flat `out`."""
    for r in range(scales.shape[0]):
        for g in range(scales.shape[1]):
            first, scale = g * GROUP_SIZE, scales[r, g]
            last = min(first + GROUP_SIZE, cols)
            stored, group = values[r, first:last], out[r * stride + first : r * stride + last]
            for c in range(stored.size):
                group[c] = np.float32(stored[c]) * scale


@nb.njit(**OPTIONS)
def unpack_q4g(values: U8, scales: F32, cols: int, out: F32, stride: int) -> None:
    """Rows of nibbles, low one first, times their group scales [rows, groups] → rows of `cols` in the flat `out`."""
    n_pairs = cols // 2
    for r in range(scales.shape[0]):
        for g in range(scales.shape[1]):
            first, scale = g * _HALF_GROUP, scales[r, g]
            last = min(first + _HALF_GROUP, n_pairs)
            stored, group = values[r, first:last], out[r * stride + 2 * first : r * stride + 2 * last]
            for c in range(stored.size):
                pair = np.int32(stored[c])
                group[2 * c] = np.float32((pair & 15) - Q4G_ZERO) * scale
                group[2 * c + 1] = np.float32((pair >> 4) - Q4G_ZERO) * scale
        if cols % 2:
            nibble = np.int32(values[r, n_pairs]) & 15
            out[r * stride + 2 * n_pairs] = np.float32(nibble - Q4G_ZERO) * scales[r, n_pairs // _HALF_GROUP]


def _put_sum(typing_context: Any, entries: Any, starts: Any, out: Any, position: Any) -> Any:
    """out[position : position + 8] = Σ entries[start : start + 8] over the tuple `starts`; both arrays flat."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entries, starts, out, position = arguments

        def address(array_type: Any, array: Any, index: Any) -> Any:
            data = arrayobj.make_array(array_type)(context, builder, array).data  # type: ignore[no-untyped-call]
            return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())

        total = None
        for n in range(len(signature.args[1])):
            start = builder.extract_value(starts, n)
            entry = builder.load(address(signature.args[0], entries, start), align=_FLOAT_BYTES)
            total = entry if total is None else builder.fadd(total, entry)
        builder.store(total, address(signature.args[2], out, position), align=_FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(entries, starts, out, types.intp), emit


# numba annotates `intrinsic` with the compiler's arguments instead of the caller's
put_sum: Any = extending.intrinsic(_put_sum)


@nb.njit(**OPTIONS)
def unpack_tile(tile: U8, entries: F32, n_stages: int, out: F32, stride: int, n_rows: int) -> None:
    """Index tile [vectors, 64, vector bytes] → its first `n_rows` rows in the flat `out`, one every `stride` numbers.

    `entries` are those of all stages, flat; the number of stages tells the format: 2 VQ2R, 3 VQ3R, 4 VQ4P.
    """
    size = entries.size // n_stages
    for r in range(n_rows):
        for v in range(tile.shape[0]):
            at = r * stride + VEC_DIM * v
            if n_stages == 4:
                bits = np.intp(tile[v, r, 0]) | np.intp(tile[v, r, 1]) << 8 | np.intp(tile[v, r, 2]) << 16
                one, two, three, four = bits & 63, bits >> 6 & 63, bits >> 12 & 63, bits >> 18
                starts = (VEC_DIM * one, size + VEC_DIM * two, 2 * size + VEC_DIM * three, 3 * size + VEC_DIM * four)
                put_sum(entries, starts, out, at)
            else:
                one, two = VEC_DIM * np.intp(tile[v, r, 0]), size + VEC_DIM * np.intp(tile[v, r, 1])
                if n_stages == 3:
                    put_sum(entries, (one, two, 2 * size + VEC_DIM * np.intp(tile[v, r, 2])), out, at)
                else:
                    put_sum(entries, (one, two), out, at)
