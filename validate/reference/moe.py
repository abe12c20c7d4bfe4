"""Feed-forward parts: the gated MLP, the router and the routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from container.model import ModelConfig, MoeConfig
from validate.reference.tensors import Weights

Activation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """Each token's experts: ids [T, k] in rising order, and their weights [T, k]."""

    ids: Tensor
    weights: Tensor


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta·tanh(gate/beta)·sigmoid(gate) · λ·tanh(up/λ) with λ = linear_beta; without λ plain up (K3's model code)."""
    gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return gated * (up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta))


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return functional.silu(gate) * up


def activation_of(config: ModelConfig) -> Activation:
    """The function of (gate, up) that every MLP and expert of this model uses."""
    if config.hidden_act == "situ":
        return lambda gate, up: situ(gate, up, config.situ_beta, config.situ_linear_beta)
    return gated_silu


def dense_mlp(weights: Weights, x: Tensor, inner: int, activation: Activation) -> Tensor:
    """down(activation(gate x, up x)): [T, H] to [T, H]; `weights` hold gate_proj, up_proj and down_proj."""
    hidden = activation(weights.linear(x, "gate_proj", inner), weights.linear(x, "up_proj", inner))
    return weights.linear(hidden, "down_proj", x.shape[1])


def route(logits: Tensor, bias: Tensor, config: MoeConfig) -> Routing:
    """Choose each token's experts from router logits [T, E] and the choice bias [E] (DeepSeek-V3, arXiv 2412.19437).

    The bias takes part in the choice only; the weights are sigmoid scores, renormalised where configured, times
    the scaling factor.
    """
    scores = torch.sigmoid(logits)
    choice = scores + bias
    if config.n_groups > config.topk_groups:
        choice = _mask_groups(choice, config)
    ids = torch.topk(choice, config.top_k, dim=-1).indices.sort(dim=-1).values
    weights = scores.gather(1, ids)
    if config.renormalize and config.top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids, weights * config.routed_scaling_factor)


def moe(weights: Weights, config: ModelConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Routed and shared experts of one layer: x [T, H] to the output [T, H] and the chosen ids [T, k].

    `weights` are those under `model.layers.L.block_sparse_moe.`. With a latent size (K3) the experts work on
    a projection of x, and the norm stands on their weighted sum (its modeling_kimi_linear.py).
    """
    moe_config, activation = config.moe, activation_of(config)
    logits = weights.linear(x, "gate", moe_config.n_experts)
    bias = weights.fetch("gate.e_score_correction_bias", (moe_config.n_experts,))
    routing = route(logits, bias, moe_config)
    if moe_config.latent_size is None:
        out = _routed_sum(weights, moe_config, x, routing, activation)
    else:
        z = weights.linear(x, "routed_expert_down_proj", moe_config.latent_size)
        out = _routed_sum(weights, moe_config, z, routing, activation)
        if moe_config.latent_norm:
            out = weights.norm(out, "routed_expert_norm", config.rms_norm_eps)
        out = weights.linear(out, "routed_expert_up_proj", config.hidden_size)
    if moe_config.n_shared_experts:
        inner = moe_config.n_shared_experts * moe_config.intermediate_size
        out = out + dense_mlp(weights.under("shared_experts."), x, inner, activation)
    return out, routing.ids


def _mask_groups(choice: Tensor, config: MoeConfig) -> Tensor:
    """Minus infinity for experts outside the groups whose two best choices sum highest."""
    by_group = choice.view(choice.shape[0], config.n_groups, -1)
    best = by_group.topk(min(2, by_group.shape[2]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(config.topk_groups, dim=-1).indices, True)
    return by_group.masked_fill(~kept[:, :, None], -torch.inf).view_as(choice)


def _routed_sum(weights: Weights, config: MoeConfig, z: Tensor, routing: Routing, activation: Activation) -> Tensor:
    """Σ weight · expert(z) [T, width], each expert's matrices fetched once for all tokens that chose it."""
    total = torch.zeros_like(z)
    for expert in sorted(set(routing.ids.flatten().tolist())):
        tokens, slots = torch.nonzero(routing.ids == expert, as_tuple=True)
        own, inputs = weights.under(f"experts.{expert}."), z[tokens]
        hidden = activation(
            own.linear(inputs, "w1", config.intermediate_size), own.linear(inputs, "w3", config.intermediate_size)
        )
        total[tokens] += routing.weights[tokens, slots, None] * own.linear(hidden, "w2", z.shape[1])
    return total
