"""Gates, activations and norms: numba loops, written like those of `runtime.compute.trunk_kernels`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt

from runtime.compute.elementary import OPTIONS, sigmoid, tanh

F32 = npt.NDArray[np.float32]

# Sums may be reordered and products fused; NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz"}


@nb.njit(cache=True, nogil=True, error_model="numpy")
def gated(gate: float, up: float, beta: float, linear_beta: float) -> np.float32:
    """gate · sigmoid(gate) · up where β is 0 (SiLU), else β tanh(gate/β) sigmoid(gate) · λ tanh(up/λ).

    The second is SiTU (docs/MODELS.md 3.7); a linear beta λ of 0 leaves `up` as it is. All f32.
    """
    if beta == 0:
        return np.float32(np.float32(gate) * sigmoid(gate) * np.float32(up))
    b, linear, side = np.float32(beta), np.float32(linear_beta), np.float32(up)
    if linear != 0:
        side = linear * tanh(side / linear)
    return np.float32(b * tanh(np.float32(gate) / b) * sigmoid(gate) * side)


@nb.njit(**OPTIONS)
def _gate_rows(gate: F32, up: F32, beta: float, linear_beta: float, out: F32) -> None:
    """`gated` with a loop for each of its cases: one loop that decides for every number is not vectorised."""
    b, linear = np.float32(beta), np.float32(linear_beta)
    if b == 0:
        for r in range(out.shape[0]):
            for c in range(out.shape[1]):
                out[r, c] = gate[r, c] * sigmoid(gate[r, c]) * up[r, c]
    elif linear == 0:
        for r in range(out.shape[0]):
            for c in range(out.shape[1]):
                out[r, c] = b * tanh(gate[r, c] / b) * sigmoid(gate[r, c]) * up[r, c]
    else:
        for r in range(out.shape[0]):
            for c in range(out.shape[1]):
                side = linear * tanh(up[r, c] / linear)
                out[r, c] = b * tanh(gate[r, c] / b) * sigmoid(gate[r, c]) * side


@dataclass(frozen=True)
class Activation:
    """A model's gated activation with the numbers that `gated` takes."""

    beta: float = 0.0
    linear_beta: float = 0.0

    def __call__(self, gate: F32, up: F32, out: F32) -> None:
        """out = the activation of gate and up, each [rows, n]; `out` may be one of the others: slower."""
        _gate_rows(gate, up, self.beta, self.linear_beta, out)


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def rms_norm(x: F32, weight: F32, tolerance: float, out: F32) -> None:
    """Each row of x [rows, n] divided by the root of (mean square + tolerance), times weight [n]."""
    for r in range(x.shape[0]):
        squares = 0.0
        for c in range(x.shape[1]):
            squares += np.float64(x[r, c]) * x[r, c]
        factor = 1 / math.sqrt(squares / x.shape[1] + tolerance)
        for c in range(x.shape[1]):
            out[r, c] = x[r, c] * factor * weight[c]


@nb.njit(cache=True, nogil=True, fastmath=FAST)
def l2_norm(x: F32, tolerance: float, factor: float) -> None:
    """Each row of x [rows, n] is divided, in place, by the root of (sum of squares + tolerance), times `factor`."""
    for r in range(x.shape[0]):
        squares = 0.0
        for c in range(x.shape[1]):
            squares += np.float64(x[r, c]) * x[r, c]
        scale = factor / math.sqrt(squares + tolerance)
        for c in range(x.shape[1]):
            x[r, c] *= scale
