"""Each function on sixteen lanes against numpy, bit for bit: ties, both zeros, infinities, any start in an array."""

from __future__ import annotations

import math
from fractions import Fraction

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from convert import simd
from convert.simd import N_LANES, aligned

# Few distinct values, so that ties are common; both zeros, both infinities, subnormals.
EDGES = [0.0, -0.0, 1.0, -1.0, 1.5, -3.25, 2.0**-149, -(2.0**-130), 3e38, -3e38, math.inf, -math.inf]
lanes = hnp.arrays(
    np.float32, N_LANES, elements=st.one_of(st.sampled_from(EDGES), st.floats(width=32, allow_nan=False))
)
small_lanes = hnp.arrays(np.float32, N_LANES, elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0]))
starts = st.integers(0, 40)


@numba.njit
def move(source, source_index, target, target_index):
    simd.store(target, target_index, simd.load(source, source_index))


@numba.njit
def splat(value, out):
    simd.store(out, 0, simd.splat(value))


@numba.njit
def add(a, b, out):
    simd.store(out, 0, simd.add(simd.load(a, 0), simd.load(b, 0)))


@numba.njit
def fma(a, b, c, out):
    simd.store(out, 0, simd.fma(simd.load(a, 0), simd.load(b, 0), simd.load(c, 0)))


@numba.njit
def minimum(a, b, out):
    simd.store(out, 0, simd.minimum(simd.load(a, 0), simd.load(b, 0)))


@numba.njit
def where_less(a, b, yes, no, out):
    simd.store(out, 0, simd.where_less(simd.load(a, 0), simd.load(b, 0), simd.load(yes, 0), simd.load(no, 0)))


@numba.njit
def tagged(a, mask, tag, out):
    simd.store(out, 0, simd.tagged(simd.load(a, 0), mask, tag))


@numba.njit
def lowest_lane(a):
    return simd.lowest_lane(simd.load(a, 0))


@numba.njit
def transpose(source, source_index, target, target_index, stride):
    simd.transpose(source, source_index, target, target_index, stride)


@numba.njit
def sort_rows(array, index):
    simd.sort_rows(array, index)


@numba.njit
def merge_rows(low, low_index, high, high_index):
    simd.merge_rows(low, low_index, high, high_index)


def result(function, *arguments):
    """Sixteen lanes of `function`, which writes them to its last argument."""
    out = np.full(N_LANES, np.nan, dtype=np.float32)
    function(*arguments, out)
    return out


def assert_same_bits(found, expected):
    assert expected.dtype == np.float32
    assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@given(source_index=starts, target_index=starts)
def test_load_and_store_start_anywhere(source_index, target_index):
    source, target = np.arange(60, dtype=np.float32), np.full(60, -1, dtype=np.float32)
    expected = target.copy()
    expected[target_index : target_index + N_LANES] = source[source_index : source_index + N_LANES]
    move(source, source_index, target, target_index)
    assert_same_bits(target, expected)


@given(value=st.one_of(st.sampled_from(EDGES), st.floats(width=32, allow_nan=False)))
def test_splat(value):
    assert_same_bits(result(splat, np.float32(value)), np.full(N_LANES, value, dtype=np.float32))


@given(a=lanes, b=lanes)
def test_add(a, b):
    with np.errstate(over="ignore", invalid="ignore"):
        expected = a + b
    found = result(add, a, b)
    assert_array_equal(np.isnan(found), np.isnan(expected))
    assert_same_bits(found[~np.isnan(found)], expected[~np.isnan(expected)])


def rounded_once(a, b, c):
    """a × b + c with exact rational arithmetic, then the nearest f32, ties to even; normal results only."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float32(0)
    exponent = max(math.frexp(float(exact))[1] - 24, -149)
    return np.float32(round(exact * Fraction(2) ** -exponent) * 2.0**exponent)


@given(
    a=hnp.arrays(np.float32, N_LANES, elements=st.floats(-(2**20), 2**20, width=32)),
    b=hnp.arrays(np.float32, N_LANES, elements=st.floats(-(2**20), 2**20, width=32)),
    shift=st.integers(-30, 0),
)
def test_fma_rounds_once(a, b, shift):
    """c nearly cancels a × b, so that a product rounded by itself would show."""
    c = -(a * b)
    c[::2] = np.ldexp(c[::2], shift)
    expected = np.array([rounded_once(*values) for values in zip(a, b, c, strict=True)])
    assert_array_equal(result(fma, a, b, c), expected)


def test_fma_differs_from_two_roundings():
    one_and_a_bit = np.full(N_LANES, 1 + 2.0**-12, dtype=np.float32)
    c = -np.full(N_LANES, 1 + 2.0**-11, dtype=np.float32)
    assert_same_bits(result(fma, one_and_a_bit, one_and_a_bit, c), np.full(N_LANES, 2.0**-24, dtype=np.float32))
    assert not (one_and_a_bit * one_and_a_bit + c).any()


@pytest.mark.parametrize("pick", [lanes, small_lanes], ids=["any", "ties"])
def test_minimum(pick):
    @given(a=pick, b=pick)
    def check(a, b):
        assert_same_bits(result(minimum, a, b), np.where(a < b, a, b))

    check()


@given(a=small_lanes, b=small_lanes, yes=lanes, no=lanes)
def test_where_less(a, b, yes, no):
    assert_same_bits(result(where_less, a, b, yes, no), np.where(a < b, yes, no))


@given(a=lanes, n_bits=st.integers(0, 20), tag=st.integers(0, (1 << 20) - 1))
def test_tagged_replaces_the_masked_bits_only(a, n_bits, tag):
    mask = (1 << n_bits) - 1
    expected = ((a.view(np.uint32) & ~np.uint32(mask)) | np.uint32(tag & mask)).view(np.float32)
    assert_same_bits(result(tagged, a, np.int32(mask), np.int32(tag & mask)), expected)


@given(a=lanes)
def test_tags_do_not_change_the_order_of_what_differs_above_them(a):
    """Of both signs: the bits above a tag decide, wherever they differ."""
    a = np.sort(a)
    mask = 0xFFF
    for tags in ((0, mask), (mask, 0)):
        low, high = (result(tagged, a, np.int32(mask), np.int32(tag)) for tag in tags)
        kept = (a.view(np.uint32) & ~np.uint32(mask)).view(np.float32)
        apart = (kept[:-1] < kept[1:]) & np.isfinite(a[:-1]) & np.isfinite(a[1:])
        assert (low[:-1] < high[1:])[apart].all()


@given(a=st.one_of(small_lanes, lanes))
def test_lowest_lane(a):
    """The first lane of the smallest value; both zeros are equal."""
    assert lowest_lane(a) == int(np.flatnonzero(a == a.min())[0])


@pytest.mark.parametrize("lane", range(N_LANES))
def test_lowest_lane_in_every_place(lane):
    a = np.full(N_LANES, 5, dtype=np.float32)
    a[lane] = -7
    assert lowest_lane(a) == lane
    a[lane:] = -7
    assert lowest_lane(a) == lane


@given(source_index=st.integers(0, 9), target_index=st.integers(0, 9), stride=st.integers(0, 40))
def test_transpose(source_index, target_index, stride):
    """Any start and stride: rows apart, side by side, overlapping, or all the same."""
    source = np.arange(9 + 15 * 40 + N_LANES, dtype=np.float32)
    target = np.full(9 + N_LANES * N_LANES + 5, -1, dtype=np.float32)
    expected = target.copy()
    for j in range(N_LANES):
        for i in range(N_LANES):
            expected[target_index + N_LANES * j + i] = source[source_index + stride * i + j]
    transpose(source, source_index, target, target_index, stride)
    assert_same_bits(target, expected)


blocks = hnp.arrays(
    np.float32, (N_LANES, N_LANES), elements=st.one_of(st.integers(0, 5), st.floats(width=32, allow_nan=False))
)


@given(rows=blocks, index=st.integers(0, 20))
def test_sort_rows(rows, index):
    array = np.full(20 + rows.size + 7, -1, dtype=np.float32)
    array[index : index + rows.size] = rows.reshape(-1)
    expected = array.copy()
    expected[index : index + rows.size] = np.sort(rows, axis=0).reshape(-1)
    sort_rows(array, index)
    assert_array_equal(array, expected)


def test_sorting_all_zeros_and_ones():
    """A network that sorts all of these sorts everything (zero-one principle, Knuth 5.3.4)."""
    numbers = np.arange(1 << N_LANES).reshape(-1, 1, N_LANES)
    columns = (numbers >> np.arange(N_LANES)[:, None] & 1).astype(np.float32)
    array = columns.reshape(-1).copy()
    for index in range(0, array.size, N_LANES * N_LANES):
        sort_rows(array, index)
    assert_array_equal(array.reshape(columns.shape), np.sort(columns, axis=1))


@given(low=blocks, high=blocks, low_index=st.integers(0, 9), high_index=st.integers(0, 9))
def test_merge_rows(low, high, low_index, high_index):
    low_array, high_array = np.zeros(300, dtype=np.float32), np.zeros(300, dtype=np.float32)
    low_part = low_array[low_index : low_index + low.size].reshape(low.shape)
    high_part = high_array[high_index : high_index + high.size].reshape(high.shape)
    low_part[:], high_part[:] = np.sort(low, axis=0), np.sort(high, axis=0)
    merge_rows(low_array, low_index, high_array, high_index)
    together = np.sort(np.concatenate([low, high]), axis=0)
    assert_array_equal(low_part, together[:N_LANES])
    assert_array_equal(high_part, together[N_LANES:])


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 1000, 4096])
def test_aligned_arrays_begin_on_a_cache_line(size):
    """Several of each at once, since one could lie right by chance."""
    arrays = [aligned(size) for _ in range(8)]
    for number, array in enumerate(arrays):
        assert (array.shape, array.dtype) == ((size,), np.float32)
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
