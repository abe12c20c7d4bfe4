"""What runs between the layers: the ordinary residual stream, and K3's attention residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from container.model import ModelConfig
from validate.reference.tensors import Weights, rms_norm


class Residual(Protocol):
    """The state between layers; for each layer the four middle methods are called in this order."""

    value: Tensor  # [T, H], the residual stream (attention residuals: the prefix sum p)

    def attention_input(self, layer: int) -> Tensor:
        """What the layer's attention reads, before its norm."""
        ...

    def add_attention(self, out: Tensor) -> None:
        """Take in the attention's output."""
        ...

    def mlp_input(self, layer: int) -> Tensor:
        """What the layer's feed-forward part reads, before its norm."""
        ...

    def add_mlp(self, out: Tensor) -> None:
        """Take in the feed-forward part's output."""
        ...

    def output(self) -> Tensor:
        """What the final norm reads, after the last layer."""
        ...


class PlainResidual:
    """Every output is added to one running sum."""

    def __init__(self, embedding: Tensor) -> None:
        self.value = embedding

    def attention_input(self, layer: int) -> Tensor:
        """The running sum."""
        return self.value

    def add_attention(self, out: Tensor) -> None:
        """Add to the running sum."""
        self.value = self.value + out

    def mlp_input(self, layer: int) -> Tensor:
        """The running sum."""
        return self.value

    def add_mlp(self, out: Tensor) -> None:
        """Add to the running sum."""
        self.value = self.value + out

    def output(self) -> Tensor:
        """The running sum."""
        return self.value


class AttentionResidual:
    """K3: a prefix sum that is put aside and restarted every `block_size` layers (arXiv 2603.15031).

    `stored` holds what was put aside: first the embedding, then the sum of the outputs of each finished run of
    `block_size` layers. Every reader mixes `stored` and the running sum by a softmax over their scores.
    """

    def __init__(self, embedding: Tensor, weights: Weights, block_size: int, eps: float) -> None:
        self.value = embedding
        self.stored: list[Tensor] = []
        self.weights = weights
        self.block_size = block_size
        self.eps = eps
        self._restart = False

    def attention_input(self, layer: int) -> Tensor:
        """The mix, over what was stored before this layer; at the start of a run the sum is then put aside."""
        h = self._mix(f"model.layers.{layer}.self_attention_res") if self.stored else self.value
        if layer % self.block_size == 0:
            self.stored.append(self.value)
            self._restart = True
        return h

    def add_attention(self, out: Tensor) -> None:
        """Add to the running sum, or begin a new one after the old was put aside."""
        self.value = out if self._restart else self.value + out
        self._restart = False

    def mlp_input(self, layer: int) -> Tensor:
        """The mix, which includes this layer's attention output."""
        return self._mix(f"model.layers.{layer}.mlp_res")

    def add_mlp(self, out: Tensor) -> None:
        """Add to the running sum."""
        self.value = self.value + out

    def output(self) -> Tensor:
        """The last mix."""
        return self._mix("model.output_attn_res")

    def _mix(self, name: str) -> Tensor:
        hidden_size = self.value.shape[1]
        norm = self.weights.fetch(f"{name}_norm.weight", (hidden_size,))
        proj = self.weights.fetch(f"{name}_proj.weight", (1, hidden_size))
        return mix([*self.stored, self.value], norm, proj[0], self.eps)


def mix(vectors: Sequence[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Σ_j softmax_j(proj · RMSnorm(U_j)) · U_j over n vectors of [T, H], to [T, H]; the U_j themselves stay un-normed.

    norm and proj are [H]. Neither a 1/sqrt(H) nor a bias (arXiv 2603.15031).
    """
    stacked = torch.stack(list(vectors))
    shares = torch.softmax(rms_norm(stacked, norm, eps) @ proj, dim=0)
    return (shares[:, :, None] * stacked).sum(0)


def residual_of(config: ModelConfig, weights: Weights, embedding: Tensor) -> Residual:
    """The residual state this model uses, started with the embedding [T, H]."""
    if config.attn_res_block_size is None:
        return PlainResidual(embedding)
    return AttentionResidual(embedding, weights, config.attn_res_block_size, config.rms_norm_eps)
