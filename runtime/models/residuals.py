"""How the outputs of attention and MLP come together: an ordinary residual stream, or attention residuals.

Attention residuals (docs/MODELS.md 3.8): every few layers the running sum is put aside and a new one begins; what a
sublayer reads is a softmax mixture of all sums put aside and the running one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from container.model import ModelConfig
from runtime.compute import row_kernels
from runtime.compute.gates import F32
from runtime.compute.team import Team
from runtime.trunk import Needs, Trunk, dimensions


class Stream(Protocol):
    """The residual stream of T tokens on their way through the layers; everything is [T, hidden]."""

    @property
    def value(self) -> F32:
        """The running sum."""

    def attention_input(self, layer: int) -> F32:
        """What the attention of `layer` reads, before its norm; called once per layer, in order."""

    def mlp_input(self, layer: int) -> F32:
        """What the MLP of `layer` reads, before its norm."""

    def add(self, output: F32) -> None:
        """Take in the output of a sublayer, which is the caller's no more."""

    def final(self) -> F32:
        """What the head reads, before its norm."""


class PlainStream:
    """p ← p + sublayer(p)."""

    def __init__(self, embedding: F32) -> None:
        self.value = embedding

    def attention_input(self, _layer: int) -> F32:
        """The running sum."""
        return self.value

    def mlp_input(self, _layer: int) -> F32:
        """The running sum."""
        return self.value

    def add(self, output: F32) -> None:
        """Add to the running sum."""
        self.value = self.value + output

    def final(self) -> F32:
        """The running sum."""
        return self.value


class Mixer:
    """One learnt mixture of the sums of a token."""

    def __init__(self, trunk: Trunk, at: str, config: ModelConfig, team: Team) -> None:
        """Read the tensors that `needs` lists: a norm's weight and a projection to one score, fused in f32."""
        self._team = team
        self._weight = trunk.array(f"{at}_norm.weight") * trunk.array(f"{at}_proj.weight").reshape(-1)
        self._tolerance = config.rms_norm_eps

    @staticmethod
    def needs(at: str, config: ModelConfig) -> Needs:
        """Tensors whose names begin with `at`."""
        return dimensions({f"{at}_norm.weight": (config.hidden_size,), f"{at}_proj.weight": (1, config.hidden_size)})

    def __call__(self, sums: list[F32]) -> F32:
        """Softmax mixture of `sums`, each [T, hidden] and mixed as it is; only the scores see them normalised."""
        scores = np.empty((len(sums), len(sums[0])), dtype=np.float32)
        mixed = np.zeros_like(sums[0])

        def part(start: int, stop: int) -> None:
            mine = scores[:, start:stop]
            for each, score in zip(sums, mine, strict=True):
                row_kernels.mixture_scores(each[start:stop], self._weight, self._tolerance, score)
            row_kernels.softmax_columns(mine)
            for each, share in zip(sums, mine, strict=True):
                row_kernels.add_scaled(each[start:stop], share, mixed[start:stop])

        self._team.run(part, len(mixed))
        return mixed


class AttentionResiduals:
    """The mixers of all layers and of the head."""

    def __init__(self, trunk: Trunk, config: ModelConfig, block_size: int, team: Team) -> None:
        """Read the tensors that `needs` lists."""
        self.block_size = block_size
        # layer 0 has a mixer for its attention too, but there is nothing yet to mix with
        self.attention = {
            layer: Mixer(trunk, f"model.layers.{layer}.self_attention_res", config, team)
            for layer in range(1, config.n_layers)
        }
        self.mlp = [Mixer(trunk, f"model.layers.{layer}.mlp_res", config, team) for layer in range(config.n_layers)]
        self.output = Mixer(trunk, "model.output_attn_res", config, team)

    @staticmethod
    def needs(config: ModelConfig) -> Needs:
        """Tensors of all mixers that are used."""
        needs = Mixer.needs("model.output_attn_res", config)
        for layer in range(config.n_layers):
            if layer > 0:
                needs |= Mixer.needs(f"model.layers.{layer}.self_attention_res", config)
            needs |= Mixer.needs(f"model.layers.{layer}.mlp_res", config)
        return needs


class MixedStream:
    """The running sum, which may have just begun, and the sums put aside before it."""

    def __init__(self, residuals: AttentionResiduals, embedding: F32) -> None:
        self._residuals = residuals
        self._running: F32 | None = embedding
        self._aside: list[F32] = []

    @property
    def value(self) -> F32:
        """The running sum."""
        if self._running is None:
            raise ValueError("the running sum was put aside and nothing was added since")
        return self._running

    def attention_input(self, layer: int) -> F32:
        """The mixture before the running sum is put aside, where it is time to do so."""
        mixed = self._residuals.attention[layer]([*self._aside, self.value]) if self._aside else self.value
        if layer % self._residuals.block_size == 0:
            self._aside.append(self.value)
            self._running = None
        return mixed

    def mlp_input(self, layer: int) -> F32:
        """The mixture, this layer's attention included."""
        return self._residuals.mlp[layer]([*self._aside, self.value])

    def add(self, output: F32) -> None:
        """Add to the running sum, or begin it."""
        self._running = output if self._running is None else self._running + output

    def final(self) -> F32:
        """The head's mixture."""
        return self._residuals.output([*self._aside, self.value])
