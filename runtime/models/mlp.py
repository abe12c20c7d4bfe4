"""Norm, gated activation and plain MLP: the pieces that every layer of the family has."""

from __future__ import annotations

import numpy as np

from container.model import ModelConfig
from runtime.compute import gates
from runtime.compute.gates import F32, Activation
from runtime.compute.matrix import Matrix, multiply_all
from runtime.compute.products import buffers
from runtime.compute.team import Team
from runtime.trunk import Needs, Trunk, dimensions


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

    def in_place(self, x: F32) -> None:
        """Normalise each row of x [rows, n]."""
        gates.rms_norm(x, self._weight, self._tolerance, x)


def activation(config: ModelConfig) -> Activation:
    """The model's gated activation, for routed and shared experts and dense layers alike."""
    return Activation() if config.hidden_act == "silu" else Activation(config.situ_beta, config.situ_linear_beta or 0.0)


class GatedMlp:
    """down(activation(gate x, up x))."""

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix, act: Activation, team: Team) -> None:
        self._gate, self._up, self._down = gate, up, down
        self._act = act
        self._team = team

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
    def load(cls, trunk: Trunk, at: str, act: Activation, team: Team) -> GatedMlp:
        """Read the tensors that `needs` lists."""
        gate, up, down = (trunk.matrix(f"{at}{kind}_proj.weight") for kind in ("gate", "up", "down"))
        return cls(gate, up, down, act, team)

    def __call__(self, x: F32) -> F32:
        """x [T, width] → [T, width]."""
        gate, up = multiply_all([self._gate, self._up], x)

        def part(start: int, stop: int) -> None:
            for row in range(start, stop):
                one = slice(row, row + 1)
                gated = buffers.take("gated", gate.shape[1]).reshape(1, -1)
                self._act(gate[one], up[one], gated)
                gate[one] = gated

        self._team.run(part, len(x))
        return self._down(gate)
