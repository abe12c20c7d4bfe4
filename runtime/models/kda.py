"""Kimi delta attention for one token (docs/MODELS.md 3.2), with K3's and Kimi-Linear's gates."""

from __future__ import annotations

import numpy as np

from container.errors import FormatError
from container.layout import align_up
from container.model import L2_NORM_EPS, KdaConfig, ModelConfig
from runtime import gates, kernels
from runtime.gates import F32
from runtime.matrix import Matrix
from runtime.models.mlp import RmsNorm
from runtime.state import KdaState
from runtime.trunk import Needs, Trunk, dimensions

_A_LOG_MULTIPLE = 128  # K3 pads its vector of one number per head with zeros to a multiple of this
_STREAMS = ("q", "k", "v")


class DeltaAttention:
    """One delta-attention layer."""

    def __init__(self, trunk: Trunk, at: str, config: ModelConfig) -> None:
        """Read the tensors that `needs` lists. Raises FormatError when a padded A_log is not zero behind its heads."""
        kda = config.kda
        self._config = kda
        self._projections = [trunk.matrix(f"{at}{stream}_proj.weight") for stream in _STREAMS]
        self._convolutions = [_taps(trunk, f"{at}{stream}_conv1d.weight", kda) for stream in _STREAMS]
        self._forget = [trunk.matrix(f"{at}{name}.weight") for name in ("f_a_proj", "f_b_proj")]
        self._gate = [trunk.matrix(f"{at}{name}.weight") for name in _gate_names(kda)]
        self._beta = trunk.matrix(f"{at}b_proj.weight")
        self._output = trunk.matrix(f"{at}o_proj.weight")
        self._norm = RmsNorm(trunk.array(f"{at}o_norm.weight"), config.rms_norm_eps)
        self._dt_bias = trunk.array(f"{at}dt_bias").reshape(kda.n_heads, kda.head_dim)
        self._rate = np.exp(_per_head(trunk, f"{at}A_log", kda.n_heads))

    @staticmethod
    def needs(at: str, config: ModelConfig) -> Needs:
        """Tensors under the name prefix `at`."""
        kda, hidden = config.kda, config.hidden_size
        needs = dimensions(
            {f"{at}{stream}_proj.weight": (kda.width, hidden) for stream in _STREAMS}
            | {
                f"{at}f_a_proj.weight": (kda.head_dim, hidden),
                f"{at}f_b_proj.weight": (kda.width, kda.head_dim),
                f"{at}b_proj.weight": (kda.n_heads, hidden),
                f"{at}o_proj.weight": (hidden, kda.width),
                f"{at}o_norm.weight": (kda.head_dim,),
                f"{at}dt_bias": (kda.width,),
            }
        )
        widths = (hidden,) if kda.full_rank_gate else (hidden, kda.head_dim)
        rows = (kda.width,) if kda.full_rank_gate else (kda.head_dim, kda.width)
        for name, n_rows, width in zip(_gate_names(kda), rows, widths, strict=True):
            needs[f"{at}{name}.weight"] = ((n_rows, width),)
        for stream in _STREAMS:
            shapes = ((kda.width, 1, kda.conv_kernel), (kda.width, kda.conv_kernel))
            needs[f"{at}{stream}_conv1d.weight"] = shapes
        n_heads = kda.n_heads
        # a writer that flattens 4-D tensors like convolution kernels leaves [1, heads] of [1, 1, heads, 1]
        needs[f"{at}A_log"] = ((n_heads,), (1, 1, n_heads, 1), (1, n_heads), (align_up(n_heads, _A_LOG_MULTIPLE),))
        return needs

    def __call__(self, x: F32, state: KdaState) -> F32:
        """x [hidden] → [hidden]; `state` moves on by one token."""
        kda = self._config
        q, k, v = (self._convolved(n, x, state) for n in range(3))
        gates.l2_norm(q, L2_NORM_EPS, kda.head_dim**-0.5)
        gates.l2_norm(k, L2_NORM_EPS, 1.0)
        beta = self._beta.matvec(x)
        gates.multiply_sigmoid(np.ones_like(beta), beta, beta)
        out = np.empty_like(v)
        kernels.delta_step(state.delta, q, k, v, self._log_decay(x), beta, out)
        normed = self._norm(out).reshape(-1)
        gates.multiply_sigmoid(normed, _chain(self._gate, x), normed)
        return self._output.matvec(normed)

    def _convolved(self, stream: int, x: F32, state: KdaState) -> F32:
        """The projection of x after convolution and SiLU: [heads, head size]."""
        projected = self._projections[stream].matvec(x)
        out = np.empty_like(projected)
        kernels.conv_silu(state.windows[stream], self._convolutions[stream], projected, out)
        return out.reshape(self._config.n_heads, self._config.head_dim)

    def _log_decay(self, x: F32) -> F32:
        """Logarithm of the decay per key channel: [heads, head size], never positive."""
        raw = _chain(self._forget, x).reshape(self._dt_bias.shape)
        out = np.empty_like(raw)
        bound = self._config.gate_lower_bound
        if bound is None:
            kernels.decay_softplus(raw, self._dt_bias, self._rate, out)
        else:
            kernels.decay_bounded(raw, self._dt_bias, self._rate, bound, out)
        return out


def _gate_names(kda: KdaConfig) -> tuple[str, ...]:
    return ("g_proj",) if kda.full_rank_gate else ("g_a_proj", "g_b_proj")


def _chain(matrices: list[Matrix], x: F32) -> F32:
    for matrix in matrices:
        x = matrix.matvec(x)
    return x


def _taps(trunk: Trunk, name: str, kda: KdaConfig) -> F32:
    """Convolution weights as [kernel, channels]."""
    return np.ascontiguousarray(trunk.array(name).reshape(kda.width, kda.conv_kernel).T)


def _per_head(trunk: Trunk, name: str, n_heads: int) -> F32:
    """The first `n_heads` numbers of a tensor; what follows is padding and must be zero."""
    flat = trunk.array(name).reshape(-1)
    if flat[n_heads:].any():
        raise FormatError(
            f"{trunk.path}: {name}: the model has {n_heads} heads, but the {flat.size} stored numbers are not zero "
            "behind them; the head count or the tensor is wrong"
        )
    return flat[:n_heads]
