"""How often the experts guessed ahead were among those the router then chose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class Recall:
    """Hits by rank of the guess: rank 0 is the expert thought most likely."""

    def __init__(self, n_ranks: int) -> None:
        self.hits = [0] * n_ranks  # of rank r: guesses that were chosen
        self.trials = 0  # guesses made at each rank: one per token and guessed layer
        self._guesses: dict[int, Ids] = {}

    def guess(self, layer: int, experts: Ids) -> None:
        """Note the guess at the next choice of `layer`, the likeliest expert first."""
        self._guesses[layer] = experts

    def observe(self, layer: int, chosen: Ids) -> None:
        """Compare what `layer` chose with the last guess at it, if there was one."""
        guessed = self._guesses.pop(layer, None)
        if guessed is None:
            return
        self.trials += 1
        for rank in np.flatnonzero(np.isin(guessed, chosen)):
            self.hits[rank] += 1
