"""What an architecture declares: its tensors by name and shape. Everything else follows from that.

One file per family. A family offers `describe(config)`, which turns a canonical config into an
`Architecture`; it is data, so that planning needs no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from container.model import ModelConfig


@unique
class Precision(Enum):
    """How finely a trunk tensor must be kept once it is large enough to be quantised at all."""

    NORMAL = "normal"  # --trunk-bits
    HIGH = "high"  # 8 bits whatever --trunk-bits says: embedding, head, router, vision


@dataclass(frozen=True)
class TrunkTensor:
    """One tensor that is not a routed expert. `layer` is None outside the layers."""

    name: str  # in the container
    source: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    layer: int | None
    precision: Precision = Precision.NORMAL
    flattened: bool = False  # a convolution kernel: stored as [out, in·kh·kw]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the container."""
        if not self.flattened:
            return self.shape
        size = 1
        for dimension in self.shape[1:]:
            size *= dimension
        return (self.shape[0], size)


@dataclass(frozen=True)
class ExpertNames:
    """Checkpoint names of the routed experts' matrices."""

    pattern: str  # with {layer}, {expert} and {matrix}
    matrices: Mapping[str, str]  # kind -> {matrix}

    def source(self, layer: int, expert: int, kind: str) -> str:
        """Name of one expert matrix, as its logical tensor is called."""
        return self.pattern.format(layer=layer, expert=expert, matrix=self.matrices[kind])


@dataclass(frozen=True)
class Architecture:
    """A checkpoint's tensors as the converter sees them."""

    arch: str  # the manifest's `arch`
    tensor_prefix: str  # before `model.` and `lm_head.`
    config: Mapping[str, Any]  # canonical, the manifest's `config`
    model: ModelConfig
    trunk: tuple[TrunkTensor, ...]  # in trunk.bin's order
    experts: ExpertNames
