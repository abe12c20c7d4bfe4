"""Group scales of the trunk, searched for the least squared error of what is stored.

amax / 7 spends Q4G's range badly: it never uses -8, and stretches every step for the sake of one weight. So each group
tries a grid of scales amax / divisor, of either sign (a negative scale brings -8 to a positive extreme), then the f16
around the best of each sign. What is judged is what will be stored: an f16 scale, and the integers `pack_rows` chooses
against it. The result is never worse than `amax_scales`, which stays unless something is strictly better.

The grids come from exact optima of Gaussian, Laplace, Student-t, uniform and MXFP4-like groups (docs/LOG.md).
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from container.layout import GROUP_SIZE, TrunkFormat
from container.trunk import GROUPED, F16Array, F32Array, amax_scales
from convert.kernels import REORDER
from convert.simd import N_LANES, add, aligned, fma, load, lowest_lane, minimum, splat, store

Array = npt.NDArray[Any]

# Scales tried at once: two times sixteen lanes, so that one hides the latency of the other.
N_TRIED = 2 * N_LANES
# The f16 tried around each of two candidates; a step of the grid, 0.3 to 0.9 %, spans 3 to 18 of them.
N_NEIGHBOURS = N_TRIED // 2
# Adding and subtracting it rounds an f32 below 2**22 to the nearest integer, ties to even; the nearest to larger ones
# does not matter, since both end at the limit.
ROUND = np.float32(1.5 * 2**23)
# Every non-negative finite f16, each at the index that is its bits.
F16_VALUES = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
F16_LARGEST_BITS, F16_SIGN = 0x7BFF, 0x8000
# Where the arrays of the work space begin, one number to a scale: the scales tried and their errors; the best so far;
# what `_squared_errors` makes of the scales, with limits for the extreme's side and for the other.
SCALES, ERRORS, BEST_SCALES, BEST_ERRORS, NEGATIVE_STEPS, INVERSES, LIMITS = range(0, 7 * N_TRIED, N_TRIED)
WORK_SIZE = LIMITS + 2 * N_TRIED
# Groups are brought near 1 by a power of two before squaring; beyond this one, f16 scales would be infinite in f32.
LEAST_EXPONENT = -100


def searched_scales(rows: F32Array, fmt: TrunkFormat) -> F16Array:
    """Finite weights [rows, cols] f32 → group scales [rows, groups] f16 for `pack_rows`; `fmt` is Q8G or Q4G.

    Scales may be negative. One is 0 only where the whole group is 0, and none is infinite. Each group is searched
    alone, so cutting a tensor into strips of rows changes nothing.
    """
    scales = amax_scales(rows, fmt)
    grouped = GROUPED[fmt]
    _search(
        np.ascontiguousarray(rows),
        _GRIDS[fmt],
        np.float32(grouped.least),
        np.float32(grouped.most),
        F16_VALUES,
        scales.view(np.uint16),
    )
    return scales


def _grid(*divisors: npt.ArrayLike) -> F32Array:
    """Divisors [passes, N_TRIED], neighbours in one lane; negative: the scale's sign is opposite to the extreme's."""
    together = np.concatenate([np.asarray(part, dtype=np.float32) for part in divisors])
    return np.ascontiguousarray(together.reshape(N_TRIED, -1).T)


# Gaussian groups have their optimum between 7.3 and 10.6, nearly always opposite to the extreme, which then takes -8; a
# scale of the extreme's sign is best between 6.9 and 8.8 only. Q8G's lie between 112 and 129. Whole numbers make groups
# exact whose weights are multiples of one step, as MXFP4's are.
_GRIDS = {
    TrunkFormat.Q4G: _grid(
        [-4, -5, -6, -8], -np.geomspace(7, 11.7, 62), [7], np.geomspace(6.9, 8.8, 29)
    ),
    TrunkFormat.Q8G: _grid(np.arange(64, 112), np.geomspace(112, 129, 48)),
}  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _search(rows: Array, grid: Array, least: np.float32, most: np.float32, f16_values: Array, bits: Array) -> None:
    """Replace the scales in `bits` [rows, groups], f16 as uint16, where a better one is found."""
    group = np.empty(GROUP_SIZE, dtype=np.float32)
    sides = np.empty(GROUP_SIZE, dtype=np.int64)
    work = aligned(WORK_SIZE)
    for r in range(bits.shape[0]):
        for g in range(bits.shape[1]):
            weights = rows[r, g * GROUP_SIZE : (g + 1) * GROUP_SIZE]
            amax, unit, negative = _bring_near_one(weights, group, sides)
            if amax > 0:
                _try_grid(group, sides, amax, grid, least, most, work)
                found = _best_stored(group, sides, unit, least, most, f16_values, work)
                # the sign so far is relative to the extreme's; a range like Q8G's, the same on both sides, needs none
                found = abs(found) if least == -most else -found if negative else found
                value = f16_values[abs(found)] if found > 0 else -f16_values[abs(found)]
                before = _stored_error(weights, f16_values[bits[r, g]], least, most)
                if _stored_error(weights, value, least, most) < before:
                    bits[r, g] = found if found > 0 else F16_SIGN - found


@numba.njit(cache=True, nogil=True)
def _bring_near_one(weights: Array, group: Array, sides: Array) -> tuple[np.float32, float, bool]:
    """`group` = |weights| × a power of two, filled up with zeros; `sides` is 0 for the extreme's sign, else 1.

    Returns the largest of `group`, the power of two, and whether the extreme is negative.
    """
    lowest, highest = np.float32(0), np.float32(0)
    for weight in weights:
        lowest = min(lowest, weight)
        highest = max(highest, weight)
    negative = bool(-lowest > highest)
    amax = max(-lowest, highest)
    unit = math.ldexp(1.0, -max(math.frexp(amax)[1], LEAST_EXPONENT))
    group[weights.size :] = 0
    sides[weights.size :] = 0
    for i in range(weights.size):
        group[i] = abs(weights[i]) * unit
        sides[i] = (weights[i] < 0) != negative
    return np.float32(amax * unit), unit, negative


@numba.njit(cache=True, nogil=True)
def _try_grid(
    group: Array, sides: Array, amax: np.float32, grid: Array, least: np.float32, most: np.float32, work: Array
) -> None:
    """The best scale of each lane over the passes of the grid, and its error, to BEST_SCALES and BEST_ERRORS."""
    scales, errors = work[SCALES : SCALES + N_TRIED], work[ERRORS : ERRORS + N_TRIED]
    best_scales, best_errors = work[BEST_SCALES : BEST_SCALES + N_TRIED], work[BEST_ERRORS : BEST_ERRORS + N_TRIED]
    best_errors[:] = np.inf
    for divisors in grid:
        for j in range(N_TRIED):
            scales[j] = amax / divisors[j]
        _squared_errors(group, sides, least, most, work)
        for j in range(N_TRIED):
            better = errors[j] < best_errors[j]
            best_scales[j] = scales[j] if better else best_scales[j]
            best_errors[j] = errors[j] if better else best_errors[j]


@numba.njit(cache=True, nogil=True)
def _best_stored(
    group: Array, sides: Array, unit: float, least: np.float32, most: np.float32, f16_values: Array, work: Array
) -> int:
    """Bits of the best f16 around the best of `_try_grid`; negative where its sign is opposite to the extreme's.

    Around the best of each sign, so that both are tried where f16 has fewer scales than the grid; around the two best
    lanes where the range is the same on both sides.
    """
    first = _set_neighbours(0, unit, least != -most, f16_values, work)
    second = _set_neighbours(N_NEIGHBOURS, unit, least != -most, f16_values, work)
    _squared_errors(group, sides, least, most, work)
    best = _lowest(work, ERRORS)
    bits = first + best if best < N_NEIGHBOURS else second + best - N_NEIGHBOURS
    return bits if work[SCALES + best] > 0 else -bits


@numba.njit(cache=True, nogil=True)
def _set_neighbours(start: int, unit: float, by_sign: bool, f16_values: Array, work: Array) -> int:
    """Make SCALES from `start` on the f16 around the best lane, and strike it out (`by_sign`: all of its sign).

    Returns the bits of the first of them.
    """
    best = _lowest(work, BEST_ERRORS)
    scale = work[BEST_SCALES + best]
    for j in range(N_TRIED):
        if j == best or (by_sign and work[BEST_SCALES + j] * scale > 0):
            work[BEST_ERRORS + j] = np.inf
    middle = _nearest_f16(abs(scale) / unit)
    first = min(max(middle - N_NEIGHBOURS // 2, 1), F16_LARGEST_BITS + 1 - N_NEIGHBOURS)
    for j in range(N_NEIGHBOURS):
        work[SCALES + start + j] = np.sign(scale) * (f16_values[first + j] * unit)
    return first


@numba.njit(cache=True, nogil=True)
def _lowest(work: Array, start: int) -> int:
    """Which of N_TRIED numbers from `start` on is the smallest; of equals the first."""
    a = int(lowest_lane(load(work, start)))
    b = N_LANES + int(lowest_lane(load(work, start + N_LANES)))
    return a if work[start + a] <= work[start + b] else b


@numba.njit(cache=True, nogil=True)
def _squared_errors(group: Array, sides: Array, least: np.float32, most: np.float32, work: Array) -> None:
    """Of all SCALES the error Σ (weight - integer × scale)² over the group, in f32, to ERRORS.

    Works on magnitudes: a weight on the side where its integer is positive ends at `most`, on the other at -least.
    Its integer is w / scale + ROUND - ROUND.
    """
    for j in range(N_TRIED):
        scale = work[SCALES + j]
        work[NEGATIVE_STEPS + j] = -abs(scale)
        work[INVERSES + j] = np.float32(1) / abs(scale)
        work[LIMITS + j] = most if scale > 0 else -least
        work[LIMITS + N_TRIED + j] = -least if scale > 0 else most
    step_a, step_b = load(work, NEGATIVE_STEPS), load(work, NEGATIVE_STEPS + N_LANES)
    inverse_a, inverse_b = load(work, INVERSES), load(work, INVERSES + N_LANES)
    up, down = splat(ROUND), splat(-ROUND)
    total_a, total_b = splat(np.float32(0)), splat(np.float32(0))
    for i in range(GROUP_SIZE):
        weight, limit = splat(group[i]), LIMITS + sides[i] * N_TRIED
        a = minimum(add(fma(weight, inverse_a, up), down), load(work, limit))
        b = minimum(add(fma(weight, inverse_b, up), down), load(work, limit + N_LANES))
        a, b = fma(a, step_a, weight), fma(b, step_b, weight)
        total_a, total_b = fma(a, a, total_a), fma(b, b, total_b)
    store(work, ERRORS, total_a)
    store(work, ERRORS + N_LANES, total_b)


@numba.njit(cache=True, nogil=True)
def _nearest_f16(scale: float) -> int:
    """Bits of the finite f16 nearest to a positive scale, at least those of the smallest."""
    mantissa, exponent = math.frexp(scale)
    if exponent < -13:
        n = int(np.rint(math.ldexp(scale, 24)))
    else:
        n = ((exponent + 14) << 10) + int(np.rint((2 * mantissa - 1) * 1024))
    return min(max(n, 1), F16_LARGEST_BITS)


@numba.njit(cache=True, nogil=True, fastmath=REORDER)
def _stored_error(weights: Array, scale: np.float32, least: np.float32, most: np.float32) -> float:
    """Squared error in f64 of the integers `pack_rows` chooses against `scale`; integer × scale is exact in f32."""
    total = 0.0
    for i in range(weights.size):
        integer = min(max(np.rint(weights[i] / scale), least), most)
        error = np.float64(weights[i]) - np.float64(integer) * np.float64(scale)
        total += error * error
    return total
