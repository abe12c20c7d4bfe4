"""How far a mean over a text could have come out otherwise: the bootstrap over windows, in numpy alone.

Positions of one window depend on each other, so whole windows are drawn, never single positions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

# The ends of an interval then move by less than 1 % of its width from seed to seed.
N_RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 20
# Drawn at once: 8 MB of window numbers.
STRIP_DRAWS = 1 << 20


def intervals(sums: F64, counts: F64, *, n_resamples: int = N_RESAMPLES, seed: int = SEED) -> F64:
    """Ends [K, 2] of the intervals of K means that were taken over the same W windows.

    `sums` [W, K] are each window's sums, `counts` [W] its numbers of positions; a mean is Σ sums / Σ counts. Windows
    are drawn with replacement, the same draws for all K, and the ends are the percentiles that leave
    (1 - `CONFIDENCE`) / 2 on either side (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
    They cover the choice of windows, as if these had been drawn from many alike; with few windows they are too
    narrow. A sum that is NaN makes its interval NaN. Raises ValueError for fewer than two windows.
    """
    n_windows = len(sums)
    if n_windows < 2:
        raise ValueError(f"{n_windows} window(s) say nothing about how windows differ")
    rng = np.random.default_rng(seed)
    means = np.empty((n_resamples, sums.shape[1]))
    strip = max(1, STRIP_DRAWS // n_windows)
    for start in range(0, n_resamples, strip):
        drawn = rng.integers(n_windows, size=(min(strip, n_resamples - start), n_windows))
        totals = np.stack([column[drawn].sum(axis=1) for column in sums.T], axis=1)
        means[start : start + len(drawn)] = totals / counts[drawn].sum(axis=1)[:, None]
    tail = (1 - CONFIDENCE) / 2
    return np.quantile(means, [tail, 1 - tail], axis=0).T
