"""Sixteen numbers at a time for numba kernels: what the compiler's own vectoriser does not find, written out.

A value of the numba types `Lanes` (f32) and `WideLanes` (f64) lives in registers. The functions below can only be
called from compiled code; arrays they take are flat and contiguous, and no bounds are checked. Each becomes a few
LLVM instructions on vectors of sixteen (LLVM language reference), so they run on every processor that numba knows.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default
from numba.np import arrayobj

from container.trunk import Q4G_ZERO

# numba annotates `intrinsic` with the compiler's arguments instead of the caller's, and these two not at all.
intrinsic: Any = extending.intrinsic
make_array: Any = arrayobj.make_array
get_or_insert_function: Any = cgutils.get_or_insert_function

N_LANES = 16

_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_BYTE, _INT, _BIT = ir.IntType(8), ir.IntType(32), ir.IntType(1)
_LANES, _WIDE = ir.VectorType(_FLOAT, N_LANES), ir.VectorType(_DOUBLE, N_LANES)
_BYTES, _INTS = ir.VectorType(_BYTE, N_LANES), ir.VectorType(_INT, N_LANES)
_PACKED = ir.VectorType(_BYTE, 48)  # sixteen times three bytes
_LEAST_ALIGNMENT = {_LANES: 4, _BYTES: 1, _INTS: 1, _PACKED: 1}
_TWO_23_BITS = 0x4B000000  # of the f32 number 2²³, whose mantissa counts ones
_NIBBLES_IN_PLACE = 5  # of a 32-bit word, that lie within a mantissa; the other three are moved down once
# What `dot_nibbles` wants x multiplied with, per nibble of a word.
NIBBLE_FACTORS = tuple(16.0 ** -(n % _NIBBLES_IN_PLACE) for n in range(8))
_GATHERS = bool(llvm.get_host_cpu_features().get("avx512f"))


class LanesType(types.Type):
    """The numba type of sixteen f32 or f64 numbers."""


@register_default(LanesType)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, numba_type: LanesType) -> None:
        super().__init__(manager, numba_type, _WIDE if numba_type is WIDE_LANES else _LANES)  # type: ignore[no-untyped-call]


LANES = LanesType(name="Lanes")
WIDE_LANES = LanesType(name="WideLanes")


def _splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * N_LANES))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.v16f64" if a.type == _WIDE else "llvm.fma.v16f32"
    function_type = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(get_or_insert_function(builder.module, function_type, name), [a, b, c])


def _after(builder: Any, index: Any, n: int) -> Any:
    return builder.add(index, ir.Constant(index.type, n))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(make_array(array_type)(context, builder, array).data, [index])


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: ir.VectorType = _LANES) -> Any:
    pointer = builder.bitcast(_pointer(context, builder, array_type, array, index), ir.PointerType(vector))
    return builder.load(pointer, align=_LEAST_ALIGNMENT[vector])


@intrinsic
def widened(typing_context: Any, bits: Any) -> Any:
    """The f32 number of an f16 number's bits, exact for every one of them."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), _FLOAT)

    return types.float32(types.uint16), emit


@intrinsic
def zeros(typing_context: Any) -> Any:
    """Sixteen f32 zeros."""
    return LANES(), lambda context, builder, signature, arguments: ir.Constant(_LANES, [0.0] * N_LANES)


@intrinsic
def wide_zeros(typing_context: Any) -> Any:
    """Sixteen f64 zeros."""
    return WIDE_LANES(), lambda context, builder, signature, arguments: ir.Constant(_WIDE, [0.0] * N_LANES)


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """array[index : index + 16] of an f32 array."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(context, builder, signature.args[0], *arguments)

    return LANES(array, types.intp), emit


@intrinsic
def store(typing_context: Any, array: Any, index: Any, lanes: Any) -> Any:
    """array[index : index + 16] = lanes, in an f32 array."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, value = arguments
        pointer = _pointer(context, builder, signature.args[0], array, index)
        builder.store(value, builder.bitcast(pointer, ir.PointerType(_LANES)), align=_LEAST_ALIGNMENT[_LANES])
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), emit


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], which need not exist, before it is read."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _BYTE.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [address, _INT, _INT, _INT])
        function = get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
        pointer = builder.bitcast(_pointer(context, builder, signature.args[0], *arguments), address)
        read, near, data = (ir.Constant(_INT, n) for n in (0, 2, 1))
        builder.call(function, [pointer, read, near, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@intrinsic
def add(typing_context: Any, a: Any, b: Any) -> Any:
    """a + b, both f32."""
    return LANES(a, b), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def add_scaled(typing_context: Any, total: Any, factor: Any, lanes: Any) -> Any:
    """total + factor × lanes, rounded once; `factor` is one f32 number."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, factor, lanes = arguments
        return _fma(builder, _splat(builder, factor, _LANES), lanes, total)

    return LANES(total, types.float32, lanes), emit


@intrinsic
def add_wide(typing_context: Any, total: Any, lanes: Any) -> Any:
    """total + lanes, f64 and f32."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, lanes = arguments
        return builder.fadd(total, builder.fpext(lanes, _WIDE))

    return WIDE_LANES(total, lanes), emit


@intrinsic
def wide_sum(typing_context: Any, lanes: Any) -> Any:
    """The sum of sixteen f64 numbers, halves added to halves."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, n = arguments[0], N_LANES
        while n > 1:
            n //= 2
            low, high = (ir.Constant(ir.VectorType(_INT, n), list(lanes)) for lanes in (range(n), range(n, 2 * n)))
            value = builder.fadd(builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high))
        return builder.extract_element(value, ir.Constant(_INT, 0))

    return types.float64(lanes), emit


def _sum_of_products(builder: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """The lanes' sums of products, in four sums that do not wait for each other."""
    sums = [builder.fmul(*pair) for pair in pairs[:4]]
    for n, (a, b) in enumerate(pairs[4:]):
        sums[n % 4] = _fma(builder, a, b, sums[n % 4])
    return builder.fadd(builder.fadd(sums[0], sums[1]), builder.fadd(sums[2], sums[3]))


@intrinsic
def dot_bytes(typing_context: Any, values: Any, index: Any, x: Any, x_index: Any) -> Any:
    """Products of 128 int8 values from `index` on with as many f32 of `x`, added up in lanes."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, index, x, x_index = arguments
        pairs = []
        for n in range(0, 128, N_LANES):
            stored = _load(context, builder, signature.args[0], values, _after(builder, index, n), _BYTES)
            factor = _load(context, builder, signature.args[2], x, _after(builder, x_index, n))
            pairs.append((builder.sitofp(builder.sext(stored, _INTS), _LANES), factor))
        return _sum_of_products(builder, pairs)

    return LANES(values, types.intp, x, types.intp), emit


@intrinsic
def dot_nibbles(typing_context: Any, values: Any, index: Any, x: Any, x_index: Any) -> Any:
    """Products of 128 nibbles less 8, 64 bytes from `index` on, with as many f32 of `x`, added up in lanes.

    Nibble k of the sixteen 32-bit words meets x[x_index + 16 k : x_index + 16 k + 16], which `NIBBLE_FACTORS[k]` has
    been multiplied into: a nibble is not moved, but becomes the mantissa of 2²³ + 16^p · nibble where it stands, at
    place p, and the f32 difference to 2²³ + 16^p · 8 is exact.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, index, x, x_index = arguments
        words = _load(context, builder, signature.args[0], values, index, _INTS)
        upper = builder.lshr(words, ir.Constant(_INTS, [4 * _NIBBLES_IN_PLACE] * N_LANES))
        pairs = []
        for n in range(8):
            place = n % _NIBBLES_IN_PLACE
            mask, one = ir.Constant(_INTS, [15 << 4 * place] * N_LANES), ir.Constant(_INTS, [_TWO_23_BITS] * N_LANES)
            zero = ir.Constant(_LANES, [2.0**23 + 16.0**place * Q4G_ZERO] * N_LANES)
            nibbles = builder.and_(words if n < _NIBBLES_IN_PLACE else upper, mask)
            weights = builder.fsub(builder.bitcast(builder.or_(nibbles, one), _LANES), zero)
            pairs.append((weights, _load(context, builder, signature.args[2], x, _after(builder, x_index, 16 * n))))
        return _sum_of_products(builder, pairs)

    return LANES(values, types.intp, x, types.intp), emit


def _gathered(builder: Any, table: Any, offsets: Any) -> Any:
    """table[offsets], sixteen f32 numbers."""
    if not _GATHERS:
        result = ir.Constant(_LANES, ir.Undefined)
        for n in range(N_LANES):
            lane = ir.Constant(_INT, n)
            entry = builder.load(builder.gep(table, [builder.extract_element(offsets, lane)]), align=4)
            result = builder.insert_element(result, entry, lane)
        return result
    bits, address = ir.VectorType(_BIT, N_LANES), _BYTE.as_pointer()
    function_type = ir.FunctionType(_LANES, [_LANES, address, _INTS, bits, _INT])
    gather = get_or_insert_function(builder.module, function_type, "llvm.x86.avx512.mask.gather.dps.512")
    nothing, everywhere = ir.Constant(_LANES, [0.0] * N_LANES), ir.Constant(bits, [1] * N_LANES)
    return builder.call(gather, [nothing, builder.bitcast(table, address), offsets, everywhere, ir.Constant(_INT, 4)])


def _look_up(
    typing_context: Any, total: Any, table: Any, start: Any, codes: Any, index: Any, n_stages: Any, first: Any
) -> Any:
    """total + table[start + 256 · stage + code] for the sixteen codes from `index` on, one byte each.

    The stages take turns: lane n is one of stage (first + n) mod n_stages. Literals `n_stages` and `first`.
    """
    turns = [(first.literal_value + n) % n_stages.literal_value for n in range(N_LANES)]
    stages = ir.Constant(_INTS, [256 * stage for stage in turns])

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, table, start, codes, index = arguments[:5]
        code = builder.zext(_load(context, builder, signature.args[3], codes, index, _BYTES), _INTS)
        pointer = _pointer(context, builder, signature.args[1], table, start)
        return builder.fadd(total, _gathered(builder, pointer, builder.add(code, stages)))

    return LANES(total, table, types.intp, codes, types.intp, n_stages, first), emit


look_up: Any = extending.intrinsic(prefer_literal=True)(_look_up)


@intrinsic
def look_up_packed(typing_context: Any, total: Any, table: Any, start: Any, codes: Any, index: Any) -> Any:
    """total + Σ_s table[start + 64 s + code s] for sixteen times four 6-bit codes, 48 bytes from `index` on."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, table, start, codes, index = arguments
        packed = _load(context, builder, signature.args[3], codes, index, _PACKED)
        # three bytes and a zero for every lane
        order = [3 * n + byte if byte < 3 else 48 for n in range(N_LANES) for byte in range(4)]
        apart = builder.shuffle_vector(
            packed, ir.Constant(_PACKED, [0] * 48), ir.Constant(ir.VectorType(_INT, 64), order)
        )
        bits = builder.bitcast(apart, _INTS)
        pointer = _pointer(context, builder, signature.args[1], table, start)
        parts = []
        for stage in range(4):
            shift, mask, first = (ir.Constant(_INTS, [n] * N_LANES) for n in (6 * stage, 63, 64 * stage))
            code = builder.add(builder.and_(builder.lshr(bits, shift), mask), first)
            parts.append(_gathered(builder, pointer, code))
        return builder.fadd(total, builder.fadd(builder.fadd(*parts[:2]), builder.fadd(*parts[2:])))

    return LANES(total, table, types.intp, codes, types.intp), emit
