"""Logits into the next token: the likeliest, or one drawn from a tempered, cut distribution.

softmax(logits / temperature), of which `top_k` keeps the k likeliest tokens and `top_p` then the fewest of the
likeliest whose share of what is left reaches p (the token that crosses p is kept). Equal logits are ordered by id.
All of it is computed in f64, and a draw takes exactly one number from the generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from container.errors import MoedockError, UsageError

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
DAMAGED = "the logits are NaN or infinite, so weights are damaged; --verify says which"
_FIRST_CANDIDATES = 256  # of a vocabulary of 163,840, sorted first; nearly always the share p lies within
_MORE = 16  # times as many when it does not


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Raises UsageError for values that make no sense."""

    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # 1: all tokens
    seed: int | None = None  # None: another one each time

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"the temperature must be a finite number of at least 0, found {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top-k must be at least 1, or 0 for all tokens, found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be above 0 and at most 1, found {self.top_p}")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"the seed must be a whole number of at least 0, found {self.seed}")


class Sampler:
    """Chooses tokens; what it draws next depends on the seed and on the draws so far alone."""

    def __init__(self, sampling: Sampling | None = None) -> None:
        self.sampling = sampling or Sampling()
        self.seed = np.random.SeedSequence().entropy if self.sampling.seed is None else self.sampling.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def state(self) -> dict[str, Any]:
        """The random state as a JSON-able object."""
        return dict(self._random.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state` gave. Raises ValueError for anything else, with nothing changed."""
        fresh = np.random.PCG64(0)
        try:
            fresh.state = state  # type: ignore[assignment]  # checked by the setter
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            raise ValueError(f"no state of a PCG64 generator ({error!r})") from None
        if fresh.state != state:  # the setter keeps what fits of a number
            raise ValueError("no state of a PCG64 generator (a number is out of range)")
        self._random = np.random.Generator(fresh)

    def draw(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token by the `logits` [vocabulary]. Raises MoedockError when one is NaN or infinite."""
        if not np.isfinite(logits).all():
            raise MoedockError(DAMAGED)
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        ids, shares = self.candidates(logits)
        bounds = np.cumsum(shares)
        drawn = int(np.searchsorted(bounds, self._random.random() * bounds[-1], side="right"))
        return int(ids[min(drawn, len(ids) - 1)])

    def candidates(self, logits: npt.NDArray[np.float32]) -> tuple[Ids, F64]:
        """Tokens that may be drawn, likeliest first, and their probabilities; for a temperature above 0."""
        values = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # at tiny temperatures all but the likeliest become -inf, which is meant
            weights = np.exp((values - values.max()) / self.sampling.temperature)
        n_kept = min(self.sampling.top_k or len(values), len(values))
        if self.sampling.top_p < 1:
            ids = _nucleus(values, weights, n_kept, self.sampling.top_p)
        elif n_kept < len(values):
            ids = _likeliest(values, n_kept)
        else:
            ids = np.arange(len(values))
        return ids, weights[ids] / weights[ids].sum()


def _nucleus(values: F64, weights: F64, n_kept: int, share: float) -> Ids:
    """Of the `n_kept` likeliest tokens the fewest that together reach `share` of them all."""
    total = weights.sum() if n_kept == len(values) else weights[_likeliest(values, n_kept)].sum()
    n = min(_FIRST_CANDIDATES, n_kept)
    while True:
        ids = _likeliest(values, n)
        reached = np.flatnonzero(np.cumsum(weights[ids]) >= share * total)
        if len(reached):
            return ids[: reached[0] + 1]
        if n == n_kept:
            return ids  # rounding alone kept the sum below
        n = min(n * _MORE, n_kept)


def _likeliest(values: F64, n: int) -> Ids:
    """The ids of the `n` greatest values, greatest first, equal ones by id."""
    if n < len(values):
        least = np.partition(values, len(values) - n)[len(values) - n]
        ids = np.flatnonzero(values >= least)
    else:
        ids = np.arange(len(values))
    return ids[np.argsort(-values[ids], kind="stable")][:n]
