"""What the engine expects of a model, whatever its architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.gates import F32
from runtime.state import SequenceState


@dataclass
class StepTrace:
    """What one token did on its way, for comparison with another implementation."""

    # residual stream after each layer, [hidden]; with attention residuals the prefix sum
    layers: list[F32] = field(default_factory=list)
    # layer -> ids of the chosen experts, ascending
    routing: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)


class Model(Protocol):
    """A loaded model."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""

    def new_state(self) -> SequenceState:
        """The state before the first token."""

    def advance(self, state: SequenceState, token_id: int, trace: StepTrace | None = None) -> F32:
        """Take one token, which the caller has checked, and return what the head reads, [hidden]; `state` moves on."""

    def logits(self, hidden: F32) -> F32:
        """Logits [vocab_size] of the next token from what `advance` returned."""
