"""What the engine expects of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.compute.gates import F32
from runtime.models.recall import Recall
from runtime.state import SequenceState


@dataclass
class StepTrace:
    """What T tokens that were taken at once did on their way, for comparison with another implementation."""

    # residual stream after each layer, [T, hidden]; with attention residuals the prefix sum
    layers: list[F32] = field(default_factory=list)
    # layer -> ids of the chosen experts, ascending: [T, k]
    routing: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)


class Model(Protocol):
    """A loaded model."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""

    @property
    def recall(self) -> Recall:
        """How good the guesses at the next layer's experts were so far."""

    def new_state(self, capacity: int) -> SequenceState:
        """The state before the first of at most `capacity` tokens."""

    def advance(self, state: SequenceState, ids: Sequence[int], trace: StepTrace | None = None) -> F32:
        """Take T ≥ 1 tokens at once, which the caller has checked, room in `state` for them too; `state` moves on.

        Returns what the head reads, [T, hidden].
        """

    def logits(self, hidden: F32) -> F32:
        """Logits [T, vocab_size] of the tokens after those whose `advance` returned `hidden` [T, hidden]."""
