"""Gates, activations and norms: numba loops over one vector, written like those of `runtime.kernels`."""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

# Sums may be reordered and products fused; NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz"}


@nb.njit(cache=True, nogil=True)
def sigmoid(x: float) -> np.float32:
    """Logistic function of one f32 number."""
    return np.float32(1) / (np.float32(1) + math.exp(-np.float32(x)))


@nb.njit(cache=True, nogil=True)
def gate_silu(gate: F32, up: F32, out: F32) -> None:
    """out = gate · sigmoid(gate) · up."""
    for c in range(out.size):
        out[c] = gate[c] * sigmoid(gate[c]) * up[c]


@nb.njit(cache=True, nogil=True)
def gate_situ(gate: F32, up: F32, beta: float, linear_beta: float, out: F32) -> None:
    """out = β tanh(gate/β) sigmoid(gate) · λ tanh(up/λ) (docs/MODELS.md 3.7); λ = 0 leaves `up` as it is."""
    b, linear = np.float32(beta), np.float32(linear_beta)
    for c in range(out.size):
        side = up[c] if linear == 0 else linear * math.tanh(up[c] / linear)
        out[c] = b * math.tanh(gate[c] / b) * sigmoid(gate[c]) * side


@nb.njit(cache=True, nogil=True)
def multiply_sigmoid(x: F32, gate: F32, out: F32) -> None:
    """out = x · sigmoid(gate), all [n]."""
    for c in range(out.size):
        out[c] = x[c] * sigmoid(gate[c])


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
