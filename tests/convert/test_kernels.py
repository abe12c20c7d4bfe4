"""Each compiled loop against its obvious numpy version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal

from convert.encodings.mxfp4 import E2M1, E8M0
from convert.kernels import count_pairs, decode_mxfp4, fit_rows, scale_rows, solve_entries
from tests.checkpoints import unpack_mxfp4
from tests.convert import oracle
from tests.strategies import weights

F32_LARGEST = np.finfo(np.float32).max
F32_SMALLEST = np.float32(1e-45)


def scale(rows):
    """(rows scaled in place, divisors, first bad row)."""
    out, divisors = rows.copy(), np.full(len(rows), np.nan)
    return out, divisors, scale_rows(out, divisors)


def test_mxfp4_decoding():
    rng = np.random.default_rng(0)
    packed = rng.integers(256, size=(5, 48), dtype=np.uint8)
    scales = rng.integers(250, size=(5, 3), dtype=np.uint8)
    out = np.full((5, 96), np.nan, dtype=np.float32)
    decode_mxfp4(packed, scales, E2M1, E8M0, out)
    assert_array_equal(out.view(np.uint32), unpack_mxfp4(packed, scales).view(np.uint32))


@given(rows=weights())
def test_scaling(rows):
    found, divisors, bad = scale(rows)
    expected, expected_divisors = oracle.scaled(rows)
    assert bad == -1
    assert_allclose(divisors, expected_divisors, rtol=1e-12, atol=0)
    assert_allclose(found, expected, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("value", [F32_SMALLEST, 1e-40, 1e-30, 1, 1e30, 1e38, F32_LARGEST])
@pytest.mark.parametrize("fill", ["one", "all"])
def test_scaling_at_both_ends_of_f32(value, fill):
    """The divisor of a row with one smallest subnormal is itself below f32: it must not become 0."""
    rows = np.zeros((1, 512), dtype=np.float32)
    rows[0, 0 if fill == "one" else slice(None)] = value
    found, divisors, bad = scale(rows)
    assert bad == -1
    assert divisors[0] == pytest.approx(float(value) * (512**-0.5 if fill == "one" else 1), rel=1e-6)
    assert np.square(found, dtype=np.float64).mean() == pytest.approx(1, rel=1e-5)


def test_scaling_leaves_zero_rows_alone():
    rows = np.array([[0, -0.0, 0], [1, 2, 3]], dtype=np.float32)
    found, divisors, bad = scale(rows)
    assert (bad, divisors[0]) == (-1, 0)
    assert not found[0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 1, 3])
def test_scaling_finds_the_first_bad_row(value, row):
    rows = np.ones((4, 40), dtype=np.float32)
    rows[row:, 17] = value
    found, _, bad = scale(rows)
    assert bad == row
    assert_array_equal(found[row:], rows[row:])  # untouched, so that the message can count bad weights


@given(data=st.data())
def test_least_squares_entries(data):
    """Many sweeps reach the optimum that numpy's least squares finds over all entries at once."""
    n, n_stages, n_entries = data.draw(st.integers(1, 30)), 2, 3
    vectors = data.draw(hnp.arrays(np.float32, (n, 8), elements=st.floats(-10, 10, width=32)))
    codes = data.draw(hnp.arrays(np.uint8, (n, n_stages), elements=st.integers(0, n_entries - 1)))
    counts = np.zeros((n_stages, n_stages, n_entries, n_entries), dtype=np.int32)
    sums = np.zeros((n_stages, n_entries, 8))
    count_pairs(vectors, codes, counts, sums)
    design = np.zeros((n, n_stages * n_entries))
    for stage in range(n_stages):
        design[np.arange(n), stage * n_entries + codes[:, stage]] = 1
    entries = np.ones((n_stages, n_entries, 8))
    solve_entries(counts, sums, entries, 300)
    best = np.linalg.lstsq(design, vectors.astype(np.float64), rcond=None)[0]
    found = design @ entries.reshape(-1, 8)
    assert_allclose(found, design @ best, rtol=0, atol=1e-3)
    unused = ~design.any(axis=0).reshape(n_stages, n_entries)
    assert (entries[unused] == 1).all()


def test_a_sweep_never_raises_the_error():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((500, 8), dtype=np.float32)
    codes = rng.integers(16, size=(500, 3), dtype=np.uint8)
    counts, sums = np.zeros((3, 3, 16, 16), dtype=np.int32), np.zeros((3, 16, 8))
    count_pairs(vectors, codes, counts, sums)
    entries = rng.standard_normal((3, 16, 8))
    errors = []
    for _ in range(6):
        decoded = sum(entries[stage][codes[:, stage]] for stage in range(3))
        errors.append(float(np.square(vectors - decoded).sum()))
        solve_entries(counts, sums, entries, 1)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


@given(data=st.data())
def test_row_sums(data):
    shape = (data.draw(st.integers(1, 5)), 8 * data.draw(st.integers(1, 20)))
    rows = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-60, 60, width=32)))
    entries = data.draw(hnp.arrays(np.float32, (3, 4, 8), elements=st.floats(-20, 20, width=32)))
    codes = data.draw(hnp.arrays(np.uint8, (shape[0] * shape[1] // 8, 3), elements=st.integers(0, 3)))
    sums = np.full((shape[0], 3), np.nan)
    fit_rows(rows, codes, entries, sums)
    x = rows.astype(np.float64)
    y = sum(entries[stage].astype(np.float64)[codes[:, stage]] for stage in range(3)).reshape(shape)
    expected = np.stack([(x * y).sum(axis=1), (y * y).sum(axis=1), (x * x).sum(axis=1)], axis=1)
    assert_allclose(sums, expected, rtol=1e-5, atol=1e-3)
