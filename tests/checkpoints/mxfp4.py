"""MXFP4: 4-bit floats (E2M1) with one power-of-two scale per 32 consecutive input columns (OCP MX 1.0).

Byte [row, j] holds column 2j in its low nibble and column 2j + 1 in its high one. A nibble is a sign bit over
a magnitude code; the scale byte e means 2^(e - 127).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP = 32
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
SCALE_BIAS = 127
LARGEST_EXPONENT = 2  # 6 = 1.5 * 2^2
ROWS_AT_ONCE = 64  # keeps the temporaries of a wide matrix inside the processor's cache


def pack_mxfp4(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack [rows, cols] into bytes [rows, cols / 2] and scale bytes [rows, cols / 32].

    Scale exponent = floor(log2(largest magnitude of the group)) - 2, so magnitudes between 6 and 8 times the
    scale saturate at 6; other values go to the nearest code, ties to the even one. Raises ValueError when cols
    is no multiple of 32.
    """
    rows, cols = weights.shape
    if cols % GROUP:
        raise ValueError(f"{cols} columns are no multiple of {GROUP}")
    packed = np.empty((rows, cols // 2), dtype=np.uint8)
    scales = np.empty((rows, cols // GROUP), dtype=np.uint8)
    for first in range(0, rows, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        groups = np.asarray(weights[part], dtype=np.float32).reshape(-1, cols // GROUP, GROUP)
        exponents = _scale_exponents(groups)
        scales[part] = exponents + SCALE_BIAS
        codes = _nibbles(np.ldexp(groups, -exponents[..., None])).reshape(-1, cols)
        packed[part] = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed, scales


def unpack_mxfp4(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The float32 matrix [rows, cols] behind `pack_mxfp4`'s pair, by table look-up."""
    rows, n_bytes = packed.shape
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, n_bytes * 2)
    values = np.where(codes & 8, -1, 1).astype(np.float32) * MAGNITUDES[codes & 7]
    steps = np.ldexp(np.float32(1), scales.astype(np.int32) - SCALE_BIAS)
    decoded: NDArray[np.float32] = values * np.repeat(steps, GROUP, axis=1)
    return decoded


def _scale_exponents(groups: NDArray[np.float32]) -> NDArray[np.int32]:
    largest = np.abs(groups).max(axis=-1)
    _, exponents = np.frexp(largest)  # largest = m * 2^e with 0.5 <= m < 1, hence floor(log2) = e - 1
    chosen = np.where(largest > 0, exponents - 1 - LARGEST_EXPONENT, 0)
    return np.clip(chosen, 1 - SCALE_BIAS, SCALE_BIAS).astype(np.int32)


def _nibbles(scaled: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest E2M1 code of each value; the grid's steps are 0.5 below 2, 1 below 4 and 2 above."""
    magnitude = np.minimum(np.abs(scaled), MAGNITUDES[-1])
    code = np.rint(np.where(magnitude < 2, magnitude * 2, np.where(magnitude < 4, magnitude, magnitude / 2)))
    code += np.where(magnitude < 2, 0, np.where(magnitude < 4, 2, 4)).astype(np.float32)
    nibbles: NDArray[np.uint8] = code.astype(np.uint8) | np.signbit(scaled).astype(np.uint8) << 3
    return nibbles
