"""The training loop: the reference's layers on batches of text, AdamW, and routers kept in balance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from container.model import ModelConfig
from tests.trained.batches import attention_by_pieces, run_batch
from tests.trained.parameters import ROUTER_BIAS, named_views
from tests.trained.rounding import rounded
from tests.trained.setting import Setting
from validate.reference.tensors import MappingTensors

Report = Callable[[int, float], None]  # step of this phase, from 1, and its loss


@dataclass(frozen=True)
class Dropout:
    """Sets a share of values to zero and enlarges the others, so that the mean stays."""

    share: float
    random: torch.Generator

    def __call__(self, x: Tensor) -> Tensor:
        """`x` with some values set to zero."""
        kept = torch.rand(x.shape, generator=self.random) >= self.share
        return x * kept / (1 - self.share)


@dataclass(frozen=True)
class _Part:
    """What one part of a batch gives."""

    loss: float
    gradients: tuple[Tensor, ...]
    routing: dict[int, Tensor]


N_PARTS = 2  # of a batch, worked on side by side by threads of their own


class Trainer:
    """Parameters on their way. The outcome depends on the setting and on the library's arithmetic, not on timing."""

    def __init__(self, setting: Setting, model: ModelConfig, parameters: dict[str, Tensor], ids: Tensor) -> None:
        """`ids` [N] is the training text; `parameters` are changed in place."""
        self.setting = setting
        self.model = model
        self.parameters = parameters
        self.ids = ids
        self.random = [torch.Generator().manual_seed(N_PARTS * setting.seed + part) for part in range(N_PARTS)]
        self.learnt = [tensor for name, tensor in parameters.items() if not name.endswith(ROUTER_BIAS)]
        for tensor in self.learnt:
            tensor.requires_grad_()
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [tensor for tensor in self.learnt if tensor.ndim > 1], "weight_decay": setting.weight_decay},
                {"params": [tensor for tensor in self.learnt if tensor.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            fused=True,
        )

    def train(
        self, n_steps: int, learning_rate: float, warm_up: int, *, as_stored: bool, report: Report
    ) -> list[float]:
        """`n_steps` steps, with the weights rounded for each if `as_stored`; the loss of each in nats per token."""
        losses = []
        for step in range(n_steps):
            for group in self.optimiser.param_groups:
                group["lr"] = learning_rate * schedule(step, n_steps, warm_up)
            losses.append(self._step(as_stored=as_stored))
            report(step + 1, losses[-1])
        return losses

    def _step(self, *, as_stored: bool) -> float:
        """One step of the optimiser on a batch, whose parts are worked on side by side."""
        with ThreadPoolExecutor(N_PARTS) as pool:
            parts = list(pool.map(lambda random: self._gradients(random, as_stored=as_stored), self.random))
        for tensor, *gradients in zip(self.learnt, *(part.gradients for part in parts), strict=True):
            tensor.grad = torch.stack(gradients).mean(0)
        torch.nn.utils.clip_grad_norm_(self.learnt, self.setting.clip)
        self.optimiser.step()
        self._balance([part.routing for part in parts])
        return sum(part.loss for part in parts) / N_PARTS

    def _gradients(self, random: torch.Generator, *, as_stored: bool) -> _Part:
        inputs, targets = self._windows(random)
        weights = rounded(self.parameters) if as_stored else self.parameters
        source = MappingTensors(named_views(weights))
        dropout = Dropout(self.setting.dropout, random)
        output = run_batch(self.model, source, inputs, attention=attention_by_pieces, dropout=dropout)
        loss = functional.cross_entropy(output.logits, targets.flatten())
        gradients = torch.autograd.grad(loss, self.learnt, materialize_grads=True)
        return _Part(loss.item(), gradients, output.routing)

    def _windows(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows of the text at random places, [sequences, tokens] each: inputs, some replaced, and what follows."""
        setting = self.setting
        starts = torch.randint(len(self.ids) - setting.sequence, (setting.batch // N_PARTS, 1), generator=random)
        windows = self.ids[starts + torch.arange(setting.sequence + 1)]
        inputs, targets = windows[:, :-1], windows[:, 1:]
        others = torch.randint(self.model.vocab_size, inputs.shape, generator=random)
        replace = torch.rand(inputs.shape, generator=random) < setting.replaced
        return torch.where(replace, others, inputs), targets

    @torch.no_grad()
    def _balance(self, routings: list[dict[int, Tensor]]) -> None:
        """Move each expert's bias against its load (DeepSeek-V3, arXiv 2412.19437): up below the mean, else down."""
        for layer in self.model.moe_layers:
            chosen = torch.cat([routing[layer].flatten() for routing in routings])
            load = torch.bincount(chosen, minlength=self.model.moe.n_experts).float()
            bias = self.parameters[f"model.layers.{layer}.block_sparse_moe.{ROUTER_BIAS}"]
            bias += self.setting.bias_step * torch.sign(load.mean() - load)
            bias -= bias.mean()


@torch.no_grad()
def mean_loss(model: ModelConfig, parameters: Mapping[str, Tensor], ids: Tensor, window: int) -> float:
    """Nats per token over whole windows of a text, each from an empty state."""
    windows = ids[: (len(ids) - 1) // window * window].reshape(-1, window)
    targets = ids[1:][: windows.numel()]
    source = MappingTensors(named_views(parameters))
    output = run_batch(model, source, windows, attention=attention_by_pieces)
    return functional.cross_entropy(output.logits, targets).item()


def schedule(step: int, n_steps: int, warm_up: int) -> float:
    """Share of the learning rate: a linear rise over `warm_up` steps, then half a cosine down to a twentieth."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, n_steps - warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
