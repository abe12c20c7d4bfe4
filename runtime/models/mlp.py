"""Norm, gated activation and plain MLP: the pieces that every layer of the family has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from container.model import ModelConfig
from runtime import gates
from runtime.gates import F32
from runtime.matrix import Matrix
from runtime.trunk import Needs, Trunk, dimensions

Activation = Callable[[F32, F32], F32]  # (gate, up) -> product


class RmsNorm:
    """x · weight / root of (mean square + tolerance)."""

    def __init__(self, weight: F32, tolerance: float) -> None:
        self._weight = weight
        self._tolerance = tolerance

    def __call__(self, x: F32) -> F32:
        """Normalise x [n], or each row of x [rows, n]."""
        out = np.empty_like(x)
        rows = x.reshape(-1, self._weight.size)
        gates.rms_norm(rows, self._weight, self._tolerance, out.reshape(rows.shape))
        return out


def activation(config: ModelConfig) -> Activation:
    """The model's gated activation, for routed and shared experts and dense layers alike."""
    return _silu if config.hidden_act == "silu" else _situ(config.situ_beta, config.situ_linear_beta or 0.0)


def _silu(gate: F32, up: F32) -> F32:
    out = np.empty_like(gate)
    gates.gate_silu(gate, up, out)
    return out


def _situ(beta: float, linear_beta: float) -> Activation:
    def situ(gate: F32, up: F32) -> F32:
        out = np.empty_like(gate)
        gates.gate_situ(gate, up, beta, linear_beta, out)
        return out

    return situ


class GatedMlp:
    """down(activation(gate x, up x))."""

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix, act: Activation) -> None:
        self._gate, self._up, self._down = gate, up, down
        self._act = act

    @staticmethod
    def needs(at: str, width: int, inner: int) -> Needs:
        """Tensors under the name prefix `at`."""
        return dimensions(
            {
                f"{at}gate_proj.weight": (inner, width),
                f"{at}up_proj.weight": (inner, width),
                f"{at}down_proj.weight": (width, inner),
            }
        )

    @classmethod
    def load(cls, trunk: Trunk, at: str, act: Activation) -> GatedMlp:
        """Read the tensors that `needs` lists."""
        gate, up, down = (trunk.matrix(f"{at}{kind}_proj.weight") for kind in ("gate", "up", "down"))
        return cls(gate, up, down, act)

    def __call__(self, x: F32) -> F32:
        """x [width] → [width]."""
        return self._down.matvec(self._act(self._gate.matvec(x), self._up.matvec(x)))
