"""The loops of delta attention for one token (docs/MODELS.md 3.2): decays and the delta rule.

Numba loops on the calling thread, without the interpreter's lock; they check no bounds.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from runtime.compute.elementary import exp, sigmoid, softplus
from runtime.compute.gates import F32, FAST


@nb.njit(cache=True, nogil=True, error_model="numpy")
def decay_bounded(raw: F32, bias: F32, rate: F32, bound: float, out: F32) -> None:
    """out = bound · sigmoid(rate[head] · (raw + bias)) (docs/MODELS.md 3.2); all but rate [heads, dk]."""
    for h in range(raw.shape[0]):
        for c in range(raw.shape[1]):
            out[h, c] = np.float32(bound) * sigmoid(rate[h] * (raw[h, c] + bias[h, c]))


@nb.njit(cache=True, nogil=True, error_model="numpy")
def decay_softplus(raw: F32, bias: F32, rate: F32, out: F32) -> None:
    """out = -rate[head] · softplus(raw + bias): Kimi-Linear's log decay."""
    for h in range(raw.shape[0]):
        for c in range(raw.shape[1]):
            out[h, c] = -rate[h] * softplus(raw[h, c] + bias[h, c])


@nb.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)
def delta_step(state: F32, q: F32, k: F32, v: F32, log_decay: F32, beta: F32, out: F32, start: int, stop: int) -> None:
    """One token of the delta rule (docs/MODELS.md 3.2, point 5) for heads start to stop - 1.

    S ← diag(exp(log_decay)) S; d = β (v - Sᵀk); S ← S + k dᵀ; out = Sᵀq. `state` [heads, dk, dv] is updated; q, k
    and log_decay [heads, dk], v and out [heads, dv], beta [heads]. Sums over dk run in f64, since the state carries
    their rounding along.
    """
    n_rows, n_columns = state.shape[1], state.shape[2]
    correction, read = np.empty(n_columns), np.empty(n_columns)
    for h in range(start, stop):
        for j in range(n_columns):
            correction[j] = read[j] = 0
        for i in range(n_rows):
            key, decay = np.float64(k[h, i]), exp(log_decay[h, i])
            for j in range(n_columns):
                state[h, i, j] *= decay
                correction[j] += key * state[h, i, j]
        for j in range(n_columns):
            correction[j] = beta[h] * (v[h, j] - correction[j])
        for i in range(n_rows):
            key, query = np.float64(k[h, i]), np.float64(q[h, i])
            for j in range(n_columns):
                state[h, i, j] += np.float32(key * correction[j])
                read[j] += query * state[h, i, j]
        for j in range(n_columns):
            out[h, j] = read[j]
