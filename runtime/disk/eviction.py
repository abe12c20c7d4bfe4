"""Which cached expert to give up: the least frequently and recently used of a sample. Pure bookkeeping, no memory.

An expert's score is how much it was used lately, on two time scales, less how far off its layer's turn is:

    score = short + 0.2 · long - 0.3 · distance
    short, long = Σ over past uses of 2^(-age / half life), with half lives of 4 and 300 tokens
    distance    = share of the cycle of layers that passes before the expert's layer is asked again, in [0, 1)

The short scale follows the text at hand, the long one what the model prefers at all times; layers come in a fixed
cycle, so the last term is known and not guessed. The constants were chosen on a recorded routing of 300 tokens
(`python -m tests.benchmarks.cache_trace` prints what they are worth).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SHORT_HALF_LIFE, LONG_HALF_LIFE = 4.0, 300.0  # tokens
LONG_WEIGHT, DISTANCE_WEIGHT = 0.2, 0.3
SAMPLE_SIZE = 256  # slots looked at for one eviction
LEARNT_TOKENS = 50.0  # what learnt counts weigh at most, so that a new text can overrule them
_N_CANDIDATES = 16  # evictions that one sample serves, while no layer asks for experts
_EXPECTED = 1e6  # above every score: read ahead and about to be asked for

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class EvictionPolicy:
    """Counts the uses of every expert of a model, and picks what to evict.

    A key is a layer's position among `layers` times `n_experts`, plus the expert.
    """

    def __init__(self, layers: Sequence[int], n_experts: int, *, seed: int = 0) -> None:
        self.layers, self.n_experts = list(layers), n_experts
        self._positions = {layer: position for position, layer in enumerate(layers)}
        n_keys = len(layers) * n_experts
        self._short, self._long = np.zeros(n_keys), np.zeros(n_keys)
        self._seen = np.zeros(n_keys, dtype=np.int64)  # token of the last use
        self._uses = np.zeros(n_keys, dtype=np.int64)
        self._expected: Keys = np.empty(0, dtype=np.int64)
        self._bonus = np.zeros(n_keys)
        self._candidates: list[tuple[int, int]] = []  # (slot, key) of the last sample, the first to go last
        self._now = 0  # tokens so far
        self._position = len(layers) - 1  # whose turn it is
        self._random = np.random.default_rng(seed)

    @property
    def n_tokens(self) -> int:
        """Tokens that passed the layers so far."""
        return self._now

    def key(self, layer: int, expert: int) -> int:
        """The key of an expert. Raises KeyError for a layer that is none of the model's."""
        return self._positions[layer] * self.n_experts + expert

    def expert(self, key: int) -> tuple[int, int]:
        """(layer, expert) of a key."""
        position, expert = divmod(key, self.n_experts)
        return self.layers[position], expert

    def use(self, layer: int, experts: Sequence[int], uses: Sequence[int] | None = None, n_tokens: int = 1) -> None:
        """A layer asks for distinct `experts`, for `n_tokens` tokens; `uses[i]` of them, or all, want `experts[i]`."""
        position = self._positions[layer]
        if position <= self._position:
            self._now += n_tokens
        self._position = position
        keys = position * self.n_experts + np.asarray(experts, dtype=np.int64)
        counts = np.full(len(keys), n_tokens) if uses is None else np.asarray(uses, dtype=np.int64)
        age = self._now - self._seen[keys]
        for values, half_life in ((self._short, SHORT_HALF_LIFE), (self._long, LONG_HALF_LIFE)):
            values[keys] = values[keys] * np.exp2(-age / half_life) + counts * _mean_weight(n_tokens, half_life)
        self._seen[keys] = self._now
        self._uses[keys] += counts
        self._expect(np.empty(0, dtype=np.int64))

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Keep these, if it can be, until a layer asks for experts again, or others are expected."""
        self._expect(self._positions[layer] * self.n_experts + np.asarray(experts, dtype=np.int64))

    def victim(self, keys: Keys, evictable: npt.NDArray[np.bool_]) -> int | None:
        """Slot to evict among those that are `evictable`, slot i holding `keys[i]`; None if none is."""
        while self._candidates:
            slot, key = self._candidates.pop()
            if evictable[slot] and keys[slot] == key:
                return slot
        slots = self._random.integers(0, len(keys), SAMPLE_SIZE) if len(keys) > SAMPLE_SIZE else np.arange(len(keys))
        slots = slots[evictable[slots]]
        if not len(slots):
            slots = np.flatnonzero(evictable)  # what a sample may have missed
        order = np.argsort(-self._scores(keys[slots]), kind="stable")[-_N_CANDIDATES:]
        slots = slots[order]
        self._candidates = list(zip(slots.tolist(), keys[slots].tolist(), strict=True))
        return self._candidates.pop()[0] if self._candidates else None

    def learn(self, uses: npt.NDArray[np.int64], n_tokens: int) -> None:
        """Begin with what former runs counted: `uses` per key, in `n_tokens` tokens; damped to a short run's weight."""
        self._long += uses * (min(n_tokens, LEARNT_TOKENS) / max(n_tokens, 1))

    def hottest(self) -> Keys:
        """Keys that were used, the most promising first."""
        keys = np.flatnonzero(self._long)
        return keys[np.argsort(-self._scores(keys), kind="stable")]

    def counted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(uses, token of the last use) of each key since the beginning; what was learnt is not in it."""
        return self._uses.copy(), self._seen.copy()

    def _expect(self, keys: Keys) -> None:
        self._bonus[self._expected] = 0
        self._expected = keys
        self._bonus[keys] = _EXPECTED
        self._candidates.clear()

    def _scores(self, keys: Keys) -> Floats:
        age = self._now - self._seen[keys]
        n_layers = len(self._positions)
        distance = (keys // self.n_experts - self._position - 1) % n_layers / n_layers
        scores: Floats = self._short[keys] * np.exp2(age * (-1 / SHORT_HALF_LIFE))
        scores += LONG_WEIGHT * self._long[keys] * np.exp2(age * (-1 / LONG_HALF_LIFE))
        scores += self._bonus[keys]
        scores -= DISTANCE_WEIGHT * distance
        return scores


def _mean_weight(n_tokens: int, half_life: float) -> float:
    """Mean of 2^(-age / half life) over the last `n_tokens` tokens: what a use in a chunk counts for at its end."""
    ratio = 2.0 ** (-1 / half_life)
    return float((1 - ratio**n_tokens) / (1 - ratio) / n_tokens)
