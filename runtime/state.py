"""What a sequence remembers between two tokens, per layer: delta-attention state or latent cache, all f32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from container.model import KdaConfig, MlaConfig, ModelConfig
from runtime.gates import F32

_FIRST_CAPACITY = 64  # positions a latent cache has room for at first; then it doubles


class KdaState:
    """A delta-attention layer: its matrix per head and the last inputs of its three convolutions."""

    def __init__(self, config: KdaConfig) -> None:
        # [heads, dk, dv], zero before the first token
        self.delta: F32 = np.zeros((config.n_heads, config.head_dim, config.head_dim), dtype=np.float32)
        # [q k v, kernel - 1, channels], oldest input first
        self.windows: F32 = np.zeros((3, config.conv_kernel - 1, config.width), dtype=np.float32)

    @property
    def n_bytes(self) -> int:
        """Memory of this state; it does not grow."""
        return self.delta.nbytes + self.windows.nbytes


class LatentCache:
    """A latent-attention layer: per position the normed latent, then the shared part of the keys."""

    def __init__(self, config: MlaConfig) -> None:
        self._width = config.kv_lora_rank + config.qk_rope_head_dim
        self._rows: F32 = np.empty((0, self._width), dtype=np.float32)
        self._length = 0

    @property
    def rows(self) -> F32:
        """What has been appended: [positions, latent + rope], a view."""
        return self._rows[: self._length]

    @property
    def n_bytes(self) -> int:
        """Memory of this cache, room for more positions included."""
        return self._rows.nbytes

    def append(self, latent: F32, rotary: F32) -> None:
        """Add the position of `latent` [latent] and `rotary` [rope]."""
        if self._length == len(self._rows):
            grown = np.empty((max(_FIRST_CAPACITY, 2 * self._length), self._width), dtype=np.float32)
            grown[: self._length] = self._rows
            self._rows = grown
        self._rows[self._length, : latent.size] = latent
        self._rows[self._length, latent.size :] = rotary
        self._length += 1


@dataclass
class SequenceState:
    """All layers of one sequence, and how many tokens it has seen."""

    layers: list[KdaState | LatentCache]
    position: int = 0

    @classmethod
    def empty(cls, model: ModelConfig) -> SequenceState:
        """The state before the first token."""
        return cls(
            [KdaState(model.kda) if model.is_kda(layer) else LatentCache(model.mla) for layer in range(model.n_layers)]
        )

    @property
    def n_bytes(self) -> int:
        """Memory of all layers' states."""
        return sum(layer.n_bytes for layer in self.layers)
