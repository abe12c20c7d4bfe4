from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from container.layout import GROUP_SIZE, TrunkFormat
from container.trunk import F16_LARGEST, GROUPED, amax_scales, pack_rows, stored_scales, trunk_size, unpack_rows
from tests import strategies

grouped_formats = pytest.mark.parametrize("fmt", list(GROUPED))


def per_group(rows: np.ndarray) -> np.ndarray:
    """[rows, cols] → [rows, groups, 128] in f64, filled up with zeros."""
    wide = np.pad(rows.astype(np.float64), ((0, 0), (0, -rows.shape[1] % GROUP_SIZE)))
    return wide.reshape(len(rows), -1, GROUP_SIZE)


@grouped_formats
@given(rows=strategies.weights())
@example(rows=np.full((1, 1), 1e-45, dtype=np.float32))  # the smallest subnormal
@example(rows=np.full((1, 129), 1e38, dtype=np.float32))
@example(rows=np.array([[127 * 1.49 * 2.0**-24, -1e-6]], dtype=np.float32))  # the nearest f16 scale is far too small
def test_error_is_at_most_half_an_amax_scale(fmt, rows):
    values, scales = pack_rows(rows, fmt)
    assert np.isfinite(scales).all()
    np.testing.assert_array_equal(scales, amax_scales(rows, fmt))
    decoded = unpack_rows(values, scales, rows.shape[1], fmt)
    assert decoded.shape == rows.shape
    assert decoded.dtype == np.float32
    wanted, found, step = per_group(rows), per_group(decoded), scales.astype(np.float64)
    amax = np.abs(wanted).max(axis=-1)
    assert ((scales == 0) == (amax == 0)).all()
    in_range = amax <= step * (GROUPED[fmt].most + 0.5)
    error = np.abs(wanted - found).max(axis=-1)
    assert (error[in_range] <= step[in_range] * 0.5000001).all()
    # what is clipped is only what the largest scale of all cannot reach
    assert (step[~in_range] == F16_LARGEST).all()
    assert (np.abs(found[~in_range]).max(axis=-1, initial=0) <= amax[~in_range]).all()


@grouped_formats
@given(rows=strategies.weights())
def test_stored_size_is_the_planned_one(fmt, rows):
    values, scales = pack_rows(rows, fmt)
    size = trunk_size(rows.shape, fmt)
    assert values.shape == (size.rows, size.row_bytes)
    assert scales.nbytes == size.rows * size.row_scale_bytes
    assert values.nbytes + scales.nbytes == size.total_bytes


@grouped_formats
def test_zero_groups_stay_zero_beside_others(fmt):
    rows = np.zeros((2, 256), dtype=np.float32)
    rows[0, 130] = 3
    values, scales = pack_rows(rows, fmt)
    assert (scales == 0).tolist() == [[True, False], [True, True]]
    np.testing.assert_allclose(unpack_rows(values, scales, 256, fmt), rows, rtol=1e-3)


@grouped_formats
def test_rows_are_packed_alone(fmt):
    """What lets a large tensor be written in pieces: no row depends on another."""
    rows = np.random.default_rng(1).standard_normal((5, 300)).astype(np.float32)
    values, scales = pack_rows(rows, fmt)
    for n in range(5):
        alone = pack_rows(rows[n : n + 1], fmt)
        np.testing.assert_array_equal(alone[0][0], values[n])
        np.testing.assert_array_equal(alone[1][0], scales[n])


@grouped_formats
def test_normal_weights_lose_what_the_bits_cost(fmt):
    """A relative error, so that a format which is self-consistent but coarse is noticed."""
    rows = np.random.default_rng(2).standard_normal((64, 512)).astype(np.float32)
    decoded = unpack_rows(*pack_rows(rows, fmt), 512, fmt)
    error = math.sqrt(float(((rows - decoded) ** 2).sum() / (rows**2).sum()))
    assert error < {TrunkFormat.Q8G: 0.0070, TrunkFormat.Q4G: 0.125}[fmt]


@given(rows=strategies.weights(), seed=st.integers(0, 2**32 - 1))
@grouped_formats
def test_integers_are_the_nearest_under_any_scale(fmt, rows, seed):
    """Scales of either sign, also far too small: what lies beyond the range ends at its end."""
    grouped, rng = GROUPED[fmt], np.random.default_rng(seed)
    given_scales = (amax_scales(rows, fmt) * rng.choice([-1, -0.25, 0.5, 1], (len(rows), 1))).astype(np.float16)
    values, scales = pack_rows(rows, fmt, given_scales)
    np.testing.assert_array_equal(scales, given_scales)
    wanted, step = per_group(rows), scales.astype(np.float64)[..., None]
    found = per_group(unpack_rows(values, scales, rows.shape[1], fmt))
    lowest, highest = np.sort([grouped.least * step, grouped.most * step], axis=0)
    usable = step[..., 0] != 0
    nearest = np.abs(np.clip(wanted, lowest, highest) - found) <= 0.5000001 * np.abs(step)
    assert nearest[usable].all()


def test_bytes_under_a_negative_scale():
    row = np.zeros((1, 128), dtype=np.float32)
    row[0, :6] = [4, -3.5, 0.5, -0.5, 9, -9]  # -8, 7, -1, 1, and both ends
    values, scales = pack_rows(row, TrunkFormat.Q4G, np.array([[-0.5]], dtype=np.float16))
    assert values.tobytes() == bytes.fromhex("f0 97 f0") + b"\x88" * 61
    assert scales.tobytes() == bytes.fromhex("00b8")
    assert unpack_rows(values, scales, 6, TrunkFormat.Q4G).tolist() == [[4, -3.5, 0.5, -0.5, 4, -3.5]]
    values, _ = pack_rows(row, TrunkFormat.Q8G, np.array([[-0.5]], dtype=np.float16))
    assert values.tobytes() == bytes.fromhex("f8 07 ff 01 ee 12") + bytes(122)


@grouped_formats
def test_scales_of_another_shape_are_refused(fmt):
    rows = np.ones((2, 256), dtype=np.float32)
    with pytest.raises(ValueError, match=r"\[1, 2\] scales do not fit \[2, 2\] groups"):
        pack_rows(rows, fmt, np.ones((1, 2), dtype=np.float16))


@given(rows=strategies.weights())
def test_f32_is_exact(rows):
    values, scales = pack_rows(rows, TrunkFormat.F32)
    assert scales.shape == (len(rows), 0)
    np.testing.assert_array_equal(unpack_rows(values, scales, rows.shape[1], TrunkFormat.F32), rows)


def test_stored_scales_round_to_f16_and_stay_usable():
    wanted = np.array([0, 1e-45, 1e-9, 2.0**-24, 1 / 3, 65504, 65520, 1e38], dtype=np.float32)
    expected = [0, 2.0**-24, 2.0**-24, 2.0**-24, float(np.float16(1 / 3)), 65504, 65504, 65504]
    assert stored_scales(wanted).tolist() == expected


@pytest.mark.parametrize(
    ("shape", "fmt", "sizes"),
    [
        ((7,), TrunkFormat.F32, (1, 28, 0)),
        ((2, 3, 5), TrunkFormat.F32, (6, 20, 0)),
        ((4, 128), TrunkFormat.Q8G, (4, 128, 2)),
        ((4, 129), TrunkFormat.Q8G, (4, 256, 4)),
        ((4, 129), TrunkFormat.Q4G, (4, 128, 4)),
        ((163840, 7168), TrunkFormat.Q8G, (163840, 7168, 112)),
    ],
)
def test_sizes(shape, fmt, sizes):
    size = trunk_size(shape, fmt)
    assert (size.rows, size.row_bytes, size.row_scale_bytes) == sizes
    assert size.total_bytes == sizes[0] * (sizes[1] + sizes[2])
