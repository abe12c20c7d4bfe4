"""The bootstrap against slow loops, theory and known data."""

from __future__ import annotations

import numpy as np
import pytest

from validate import bootstrap
from validate.bootstrap import N_RESAMPLES, SEED, intervals


def test_constant_data_has_no_width():
    counts = np.array([4.0, 4.0, 4.0, 2.0])
    low, high = intervals(0.1 * counts[:, None], counts)[0]
    assert low == pytest.approx(0.1, rel=1e-12)
    assert high - low <= 1e-15


def test_two_windows_by_hand():
    """Means of two draws from {0, 1} are 0, 1/2 and 1 with shares 1/4, 1/2, 1/4."""
    assert intervals(np.array([[0.0], [10.0]]), np.array([10.0, 10.0])).tolist() == [[0.0, 1.0]]


def test_the_slow_way_gives_the_same():
    rng = np.random.default_rng(3)
    counts = np.array([5.0, 5, 5, 5, 5, 2])
    sums = rng.standard_normal((6, 2)) * counts[:, None]
    draws = np.random.default_rng(SEED).integers(6, size=(500, 6))
    means = [[sum(sums[w, k] for w in drawn) / sum(counts[w] for w in drawn) for k in range(2)] for drawn in draws]
    expected = [sorted(column) for column in zip(*means, strict=True)]
    found = intervals(sums, counts, n_resamples=500)
    for k in range(2):  # the 2.5th percentile of 500 sorted numbers lies at place 0.025 · 499 = 12.475
        low, high = expected[k][12:14], expected[k][486:488]
        assert found[k, 0] == pytest.approx(low[0] + 0.475 * (low[1] - low[0]), rel=1e-12)
        assert found[k, 1] == pytest.approx(high[0] + 0.525 * (high[1] - high[0]), rel=1e-12)


def test_strips_do_not_matter(monkeypatch):
    sums, counts = np.random.default_rng(4).standard_normal((7, 1)), np.full(7, 3.0)
    expected = intervals(sums, counts, n_resamples=100)
    monkeypatch.setattr(bootstrap, "STRIP_DRAWS", 50)
    assert (intervals(sums, counts, n_resamples=100) == expected).all()


def test_the_same_every_time_and_another_seed_is_near():
    sums, counts = np.random.default_rng(5).standard_normal((40, 1)), np.ones(40)
    found = intervals(sums, counts)
    assert (found == intervals(sums, counts)).all()
    other = intervals(sums, counts, seed=SEED + 1)
    assert 0 < np.abs(other - found).max() < 0.05 * (found[0, 1] - found[0, 0])


def test_all_columns_see_the_same_draws():
    """Then the interval of a difference is that of the paired difference, and signs mirror it exactly."""
    a = np.random.default_rng(6).standard_normal((20, 1))
    found = intervals(np.hstack([a, -a, 1000 * a]), np.ones(20))
    assert found[1].tolist() == pytest.approx((-found[0, ::-1]).tolist(), rel=1e-9)
    assert found[2] == pytest.approx(1000 * found[0], rel=1e-9)
    assert (found[:1] == intervals(a, np.ones(20))).all()


def test_many_windows_follow_the_normal_law():
    values = np.random.default_rng(7).standard_normal(400) + 3
    low, high = intervals(values[:, None], np.ones(400))[0]
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_coverage_where_positions_of_a_window_depend_on_each_other():
    """16 positions with half their variance in common: windows drawn whole give 95 %, single positions do not."""
    rng = np.random.default_rng(8)
    n_windows, length, n_trials = 40, 16, 300
    whole = single = 0
    for _ in range(n_trials):
        values = rng.standard_normal((n_windows, 1)) + rng.standard_normal((n_windows, length))
        low, high = intervals(values.sum(axis=1)[:, None], np.full(n_windows, float(length)), n_resamples=400)[0]
        whole += low <= 0 <= high
        flat = values.reshape(-1, 1)
        low, high = intervals(flat, np.ones(len(flat)), n_resamples=400)[0]
        single += low <= 0 <= high
    assert 0.90 <= whole / n_trials <= 0.98
    assert single / n_trials < 0.65


def test_no_number_stays_no_number():
    found = intervals(np.array([[1.0, np.nan], [2.0, 1.0], [3.0, 1.0]]), np.ones(3))
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_one_window_is_refused():
    with pytest.raises(ValueError, match="1 window"):
        intervals(np.ones((1, 1)), np.ones(1))


def test_the_constant_that_reports_name():
    assert N_RESAMPLES == 10_000
