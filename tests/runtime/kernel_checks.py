"""What the tests of one-token kernels share: random arrays, the measure of agreement, and teams of threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from runtime.compute.team import Team
from tests.runtime.oracle import F64

F32 = npt.NDArray[np.float32]
TOLERANCE = 1e-6
seeds = st.integers(0, 1 << 32)
ONE = Team(1)
teams = st.sampled_from([Team(2), Team(3)])


def close(found: npt.NDArray[np.floating], expected: F64, weight: F64 | float = 0.0) -> None:
    """Relative to the size of what was summed: a sum that cancels may lose more of itself."""
    size = np.maximum(np.abs(expected), weight)
    assert np.all(np.abs(found - expected) <= TOLERANCE * size + 1e-30)


def normal(rng: np.random.Generator, *shape: int) -> F32:
    """Standard normal f32 numbers."""
    return rng.standard_normal(shape, dtype=np.float32)
