"""Sixteen f32 lanes for numba kernels: what the compiler's own vectoriser does not find, written out.

A value of type `Lanes` lives in one 512-bit register, or in two or four where registers are narrower. The
functions below can only be called from compiled code. Each becomes a few LLVM instructions on <16 x float>
(LLVM language reference), so they run on every processor that numba knows.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default
from numba.np import arrayobj

# numba annotates `intrinsic` with the compiler's arguments instead of the caller's, and these two not at all.
intrinsic: Any = extending.intrinsic
make_array: Any = arrayobj.make_array
get_or_insert_function: Any = cgutils.get_or_insert_function

N_LANES = 16
# Above every cost that a search compares, and still finite.
LARGEST = np.float32(3e38)

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_LANES = ir.VectorType(_FLOAT, N_LANES)
_BITS = ir.VectorType(_INT, N_LANES)
_SHUFFLE = ir.VectorType(_INT, N_LANES)
_F32_BYTES = 4


def _use_widest_registers() -> None:
    """LLVM stops at 256-bit registers by default, even where there are 512; searches gain 1.4 × from them.

    Left alone where the user chose features by NUMBA_CPU_FEATURES.
    """
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and numba.config.CPU_FEATURES is None:  # type: ignore[attr-defined]
        numba.config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"  # type: ignore[attr-defined]


_use_widest_registers()


class LanesType(types.Type):
    """The numba type of sixteen f32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_default(LanesType)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, numba_type: LanesType) -> None:
        super().__init__(manager, numba_type, _LANES)  # type: ignore[no-untyped-call]


LANES = LanesType()


def _call(builder: Any, name: str, result: Any, *values: Any, **options: Any) -> Any:
    """Call of an LLVM intrinsic function."""
    function_type = ir.FunctionType(result, [value.type for value in values])
    return builder.call(get_or_insert_function(builder.module, function_type, name), values, **options)


def _splat(builder: ir.IRBuilder, value: Any, vector: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_SHUFFLE, [0] * N_LANES))


def _pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any) -> Any:
    data = make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.PointerType(_LANES))


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Lanes array[index : index + 16] of a flat f32 array."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments)
        return builder.load(pointer, align=_F32_BYTES)

    return LANES(array, types.intp), emit


@intrinsic
def store(typing_context: Any, array: Any, index: Any, lanes: Any) -> Any:
    """array[index : index + 16] = lanes, in a flat f32 array."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_value, index_value, value = arguments
        pointer = _pointer(context, builder, signature.args[0], array_value, index_value)
        builder.store(value, pointer, align=_F32_BYTES)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), emit


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """The same f32 in every lane."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0], _LANES)

    return LANES(types.float32), emit


@intrinsic
def add(typing_context: Any, a: Any, b: Any) -> Any:
    """a + b."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return LANES(a, b), emit


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a × b + c, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", _LANES, *arguments)

    return LANES(a, b, c), emit


@intrinsic
def minimum(typing_context: Any, a: Any, b: Any) -> Any:
    """The smaller of a and b."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = arguments
        return builder.select(builder.fcmp_ordered("<", a, b), a, b)

    return LANES(a, b), emit


@intrinsic
def where_less(typing_context: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """In each lane `yes` where a < b, else `no`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, yes, no = arguments
        return builder.select(builder.fcmp_ordered("<", a, b), yes, no)

    return LANES(a, b, yes, no), emit


@intrinsic
def tagged(typing_context: Any, lanes: Any, mask: Any, tag: Any) -> Any:
    """The lanes with the bits of `mask` replaced by those of `tag`; both i32, tag within mask."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, mask, tag = arguments
        kept = builder.and_(builder.bitcast(value, _BITS), builder.not_(_splat(builder, mask, _BITS)))
        return builder.bitcast(builder.or_(kept, _splat(builder, tag, _BITS)), _LANES)

    return LANES(lanes, types.int32, types.int32), emit


@intrinsic
def lowest_lane(typing_context: Any, lanes: Any) -> Any:
    """Number of the lane that holds the smallest value; of equals the first."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        lowest = _splat(
            builder, _call(builder, "llvm.vector.reduce.fmin.v16f32", _FLOAT, value, fastmath=("nnan",)), _LANES
        )
        mask = builder.bitcast(builder.fcmp_ordered("==", value, lowest), ir.IntType(N_LANES))
        return builder.zext(builder.cttz(mask, ir.Constant(ir.IntType(1), 0)), ir.IntType(64))

    return types.int64(lanes), emit


@intrinsic
def transpose(typing_context: Any, source: Any, source_index: Any, target: Any, target_index: Any, stride: Any) -> Any:
    """target[target_index + 16 j + i] = source[source_index + stride i + j] for i, j below 16; flat f32 arrays."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_index, target, target_index, stride = arguments
        size = source_index.type
        rows = []
        for i in range(N_LANES):
            index = builder.add(source_index, builder.mul(stride, ir.Constant(size, i)))
            rows.append(builder.load(_pointer(context, builder, signature.args[0], source, index), align=_F32_BYTES))
        # four perfect shuffles of the rows, element by element, make the transpose
        half = N_LANES // 2
        halves = [
            ir.Constant(_SHUFFLE, [x for lane in lanes for x in (lane, lane + N_LANES)])
            for lanes in (range(half), range(half, N_LANES))
        ]
        for _ in range(4):
            rows = [builder.shuffle_vector(rows[i], rows[i + half], order) for i in range(half) for order in halves]
        _store_rows(context, builder, signature.args[2], target, target_index, rows)
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp, types.intp), emit


def _exchange(builder: Any, values: list[Any], i: int, j: int) -> None:
    """Put the smaller of two lanes first."""
    a, b = values[i], values[j]
    less = builder.fcmp_ordered("<", a, b)
    values[i], values[j] = builder.select(less, a, b), builder.select(less, b, a)


def _sort_bitonic(builder: Any, values: list[Any]) -> None:
    """Sort lanes that rise and then fall, or fall and then rise (Batcher's bitonic merger)."""
    gap = len(values) // 2
    while gap:
        for i in range(len(values)):
            if not i & gap:
                _exchange(builder, values, i, i + gap)
        gap //= 2


def _sort(builder: Any, values: list[Any]) -> None:
    """Sort lanes (Batcher's odd-even merge sort: 63 comparisons of sixteen)."""
    n, span = len(values), 1
    while span < n:
        gap = span
        while gap:
            for first in range(gap % span, n - gap, 2 * gap):
                for i in range(first, min(first + gap, n - gap)):
                    if i // (2 * span) == (i + gap) // (2 * span):
                        _exchange(builder, values, i, i + gap)
            gap //= 2
        span *= 2


def _load_rows(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> list[Any]:
    pointers = [
        _pointer(context, builder, array_type, array, builder.add(index, ir.Constant(index.type, N_LANES * i)))
        for i in range(N_LANES)
    ]
    return [builder.load(pointer, align=_F32_BYTES) for pointer in pointers]


def _store_rows(context: Any, builder: Any, array_type: Any, array: Any, index: Any, rows: list[Any]) -> None:
    for i, row in enumerate(rows):
        at = builder.add(index, ir.Constant(index.type, N_LANES * i))
        builder.store(row, _pointer(context, builder, array_type, array, at), align=_F32_BYTES)


@intrinsic
def sort_rows(typing_context: Any, array: Any, index: Any) -> Any:
    """Sort array[index + 16 i + lane] over i below 16, each lane by itself, smallest first; a flat f32 array."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index = arguments
        rows = _load_rows(context, builder, signature.args[0], array, index)
        _sort(builder, rows)
        _store_rows(context, builder, signature.args[0], array, index, rows)
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@intrinsic
def merge_rows(typing_context: Any, low: Any, low_index: Any, high: Any, high_index: Any) -> Any:
    """Of two times sixteen rows, sorted as `sort_rows` does, `low` gets the smaller half and `high` the rest."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        low_type, _, high_type, _ = signature.args
        low, low_index, high, high_index = arguments
        low_rows = _load_rows(context, builder, low_type, low, low_index)
        high_rows = _load_rows(context, builder, high_type, high, high_index)[::-1]
        for i in range(N_LANES):
            pair = [low_rows[i], high_rows[i]]
            _exchange(builder, pair, 0, 1)
            low_rows[i], high_rows[i] = pair
        for rows in (low_rows, high_rows):
            _sort_bitonic(builder, rows)
        _store_rows(context, builder, low_type, low, low_index, low_rows)
        _store_rows(context, builder, high_type, high, high_index, high_rows)
        return context.get_dummy_value()

    return types.void(low, types.intp, high, types.intp), emit


@numba.njit
def aligned(size: int) -> Any:
    """A flat f32 array [size] on a 64-byte boundary, where loads of sixteen lanes cross no cache line. Not cleared."""
    spare = np.empty(size + N_LANES, dtype=np.float32)
    skip = -(spare.ctypes.data // _F32_BYTES) % N_LANES
    return spare[skip : skip + size]
