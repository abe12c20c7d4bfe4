"""What a sequence remembers between two tokens, per layer: delta-attention state or latent cache, all f32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from container.errors import MoedockError
from container.model import KdaConfig, MlaConfig, ModelConfig
from runtime.compute.gates import F32


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

    def arrays(self) -> dict[str, F32]:
        """Everything it remembers, as views."""
        return {"delta": self.delta, "windows": self.windows}


class LatentCache:
    """A latent-attention layer: per position the normed latent, then the shared part of the keys.

    Room for all positions is taken at once; the system gives pages to those that are written.
    """

    def __init__(self, config: MlaConfig, capacity: int) -> None:
        self._rows: F32 = np.empty((capacity, config.kv_lora_rank + config.qk_rope_head_dim), dtype=np.float32)
        self.length = 0  # positions in use

    @property
    def rows(self) -> F32:
        """The positions in use: [positions, latent + rope], a view."""
        return self._rows[: self.length]

    @property
    def n_bytes(self) -> int:
        """Memory of the positions in use."""
        return self.rows.nbytes

    def arrays(self) -> dict[str, F32]:
        """Everything it remembers, as views."""
        return {"latent": self.rows}

    def append(self, latent: F32, rotary: F32) -> None:
        """Add the positions of `latent` [T, latent] and `rotary` [T, rope]; there must be room for them."""
        added = self._rows[self.length : self.length + len(latent)]
        added[:, : latent.shape[1]] = latent
        added[:, latent.shape[1] :] = rotary
        self.length += len(latent)


@dataclass
class SequenceState:
    """All layers of one sequence, and how many tokens it has seen."""

    layers: list[KdaState | LatentCache]
    capacity: int  # tokens it has room for
    position: int = 0

    @classmethod
    def empty(cls, model: ModelConfig, capacity: int) -> SequenceState:
        """The state before the first of at most `capacity` tokens."""
        return cls(
            [
                KdaState(model.kda) if model.is_kda(layer) else LatentCache(model.mla, capacity)
                for layer in range(model.n_layers)
            ],
            capacity,
        )

    @property
    def n_bytes(self) -> int:
        """Memory of all layers' states, positions not yet used left out."""
        return sum(layer.n_bytes for layer in self.layers)

    def check_room(self, n_tokens: int) -> None:
        """Raises MoedockError where `n_tokens` more do not fit."""
        if self.position + n_tokens > self.capacity:
            raise MoedockError(
                f"the context of {self.capacity} positions is used up: {self.position} are taken and {n_tokens} more "
                f"are asked for; give --ctx {self.position + n_tokens} or more"
            )

    def arrays(self) -> list[tuple[str, F32]]:
        """Name and writable view of everything the layers remember, in a fixed order; C-contiguous."""
        return [
            (f"layers.{number}.{name}", array)
            for number, layer in enumerate(self.layers)
            for name, array in layer.arrays().items()
        ]

    def resume_at(self, position: int) -> None:
        """Become the state after `position` tokens, whose numbers the caller then writes into `arrays`.

        Raises MoedockError where there is no room for as many.
        """
        self.position = 0
        self.check_room(position)
        self.position = position
        for layer in self.layers:
            if isinstance(layer, LatentCache):
                layer.length = position
