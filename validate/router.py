"""What storing the router does: which choices change when the container's router reads the source's states."""

from __future__ import annotations

import torch
from torch import Tensor

from container.model import ModelConfig
from validate.reference.model import ReferenceOutput
from validate.reference.moe import route
from validate.reference.tensors import TensorSource, Weights
from validate.report import RouterLayer, RouterReport


class RouterCount:
    """Counts over any number of runs of the source model."""

    def __init__(self, stored: TensorSource, model: ModelConfig) -> None:
        """`stored` are the container's tensors."""
        self.stored = stored
        self.model = model
        self._n_tokens = 0
        self._n_tokens_changed = 0
        self._layers = {layer: [0, 0] for layer in model.moe_layers}  # changed choices, tokens with a changed choice

    def add(self, source: ReferenceOutput) -> None:
        """Route the inputs of each of the source's routers by the stored weights and bias, and compare.

        Raises CheckError when a router is missing or has another shape.
        """
        any_changed = torch.zeros(len(source.hidden), dtype=torch.bool)
        for layer, chosen in source.routing.items():
            n_changed = changed_choices(chosen, self._choices(layer, source.router_inputs[layer]))
            self._layers[layer][0] += int(n_changed.sum())
            self._layers[layer][1] += int((n_changed > 0).sum())
            any_changed |= n_changed > 0
        self._n_tokens += len(any_changed)
        self._n_tokens_changed += int(any_changed.sum())

    def report(self) -> RouterReport:
        """What was counted so far."""
        n_choices = self._n_tokens * self.model.moe.top_k
        layers = [
            RouterLayer(layer=layer, n_choices=n_choices, n_changed=n_changed, n_tokens_changed=n_tokens)
            for layer, (n_changed, n_tokens) in self._layers.items()
        ]
        return RouterReport(
            n_choices=n_choices * len(layers),
            n_changed=sum(layer.n_changed for layer in layers),
            n_tokens=self._n_tokens,
            n_tokens_changed=self._n_tokens_changed,
            layers=layers,
        )

    def _choices(self, layer: int, x: Tensor) -> Tensor:
        """The stored router's experts [T, k] for inputs x [T, H]."""
        own, n_experts = (
            Weights(self.stored, x.dtype, f"model.layers.{layer}.block_sparse_moe."),
            self.model.moe.n_experts,
        )
        bias = own.fetch("gate.e_score_correction_bias", (n_experts,))
        return route(own.linear(x, "gate", n_experts), bias, self.model.moe).ids


def changed_choices(ours: Tensor, theirs: Tensor) -> Tensor:
    """How many of each token's experts `ours` [T, k] are not among `theirs` [T, k], in whatever order: [T]."""
    return (ours[:, :, None] != theirs[:, None, :]).all(-1).sum(-1)
