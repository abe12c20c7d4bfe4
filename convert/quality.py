"""How hard the converter searches: the three qualities, and what each means in work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, unique

from container.layout import ExpertQuant


@dataclass(frozen=True)
class Effort:
    """Widths of the beam, which is how many partial choices it keeps from stage to stage (1: greedy search)."""

    beam_width: int  # for encoding
    training_width: int  # for the rounds that train codebooks
    sample_vectors: int  # that a training takes: more give less error on all others


@unique
class Quality(Enum):
    """Error against speed; the container's format is the same for all."""

    FAST = "fast"
    BALANCED = "balanced"
    BEST = "best"

    def effort(self, quant: ExpertQuant) -> Effort:
        """What this quality does in a format. docs/encoding.md has what each step gains."""
        effort = _EFFORTS[self]
        if self is Quality.BALANCED and quant.n_stages > 3:  # a beam's work grows with the stages
            return replace(effort, beam_width=12, training_width=12)
        return effort


_EFFORTS = {
    Quality.FAST: Effort(beam_width=1, training_width=1, sample_vectors=131_072),
    Quality.BALANCED: Effort(beam_width=16, training_width=16, sample_vectors=524_288),
    Quality.BEST: Effort(beam_width=48, training_width=32, sample_vectors=1_048_576),
}
LARGEST_SAMPLE_VECTORS = max(effort.sample_vectors for effort in _EFFORTS.values())
