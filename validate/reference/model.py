"""The forward pass of Kimi-Linear and Kimi K3, layer by layer over all positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from container.errors import CheckError
from container.model import LATENT_NORM_EPS, ModelConfig
from validate.reference.kda import kda_attention
from validate.reference.mla import mla_attention
from validate.reference.moe import activation_of, dense_mlp, moe
from validate.reference.residuals import residual_of
from validate.reference.tensors import MappingTensors, TensorSource, Weights

# (weights of the layer, config, layer, normed input [T, H], tolerance of the latent norms) to the output [T, H]
Attention = Callable[[Weights, ModelConfig, int, Tensor, float], Tensor]

# rows of lm_head held at once: 235 MB in f32 at K3's width
HEAD_STRIP_ROWS = 8192


@dataclass(frozen=True, kw_only=True)
class ReferenceOutput:
    """What one forward pass leaves, for T tokens."""

    logits: Tensor  # [T, vocab_size]
    hidden: Tensor  # [T, H], after the final norm
    layers: list[Tensor]  # per layer [T, H]: the residual stream (K3: the prefix sum) after it
    routing: dict[int, Tensor]  # MoE layer -> chosen expert ids [T, k], rising
    router_inputs: dict[int, Tensor]  # MoE layer -> [T, H]: what its router (and its experts) read


@torch.no_grad()
def forward(
    tensors: TensorSource | Mapping[str, Tensor],
    config: ModelConfig,
    ids: Sequence[int],
    *,
    latent_norm_eps: float = LATENT_NORM_EPS,
    dtype: torch.dtype = torch.float32,
) -> ReferenceOutput:
    """Run token `ids` from an empty state through the whole model.

    `tensors` are named as in the release, without its prefix. Each is fetched when needed and dropped after use;
    embedding and head are read by rows. All arithmetic is in `dtype`. Raises CheckError for unusable ids, and for a
    tensor that is missing or has the wrong shape.
    """
    _check_ids(ids, config)
    source = tensors if isinstance(tensors, TensorSource) else MappingTensors(tensors)
    weights = Weights(source, dtype)
    embedding = _embedding(weights, config, ids)
    return run(weights, config, embedding, latent_norm_eps=latent_norm_eps)


def layer_attention(weights: Weights, config: ModelConfig, layer: int, h: Tensor, latent_norm_eps: float) -> Tensor:
    """The attention of `layer` over one sequence: normed input h [T, H] to output [T, H]."""
    own = weights.under("self_attn.")
    if config.is_kda(layer):
        return kda_attention(own, config.kda, h, config.rms_norm_eps)
    return mla_attention(own, config.mla, h, latent_norm_eps)


def run(
    weights: Weights,
    config: ModelConfig,
    embedding: Tensor,
    *,
    latent_norm_eps: float = LATENT_NORM_EPS,
    attention: Attention = layer_attention,
) -> ReferenceOutput:
    """Run embedded tokens [T, H] through all layers and the head; autograd can differentiate it.

    Only `attention` looks from one token to another: with one of its own a caller may lay several sequences end to
    end. Raises CheckError for a tensor that is missing or has the wrong shape.
    """
    residual = residual_of(config, weights, embedding)
    layers: list[Tensor] = []
    routing: dict[int, Tensor] = {}
    router_inputs: dict[int, Tensor] = {}
    for layer in range(config.n_layers):
        own = weights.under(f"model.layers.{layer}.")
        h = own.norm(residual.attention_input(layer), "input_layernorm", config.rms_norm_eps)
        residual.add_attention(attention(own, config, layer, h, latent_norm_eps))
        h = own.norm(residual.mlp_input(layer), "post_attention_layernorm", config.rms_norm_eps)
        if config.is_moe(layer):
            router_inputs[layer] = h
            out, routing[layer] = moe(own.under("block_sparse_moe."), config, h)
        else:
            out = dense_mlp(own.under("mlp."), h, config.intermediate_size, activation_of(config))
        residual.add_mlp(out)
        layers.append(residual.value)
    hidden = weights.norm(residual.output(), "model.norm", config.rms_norm_eps)
    return ReferenceOutput(
        logits=_logits(weights, config, hidden),
        hidden=hidden,
        layers=layers,
        routing=routing,
        router_inputs=router_inputs,
    )


def _check_ids(ids: Sequence[int], config: ModelConfig) -> None:
    if not ids:
        raise CheckError("reference: no token ids given, expected at least one")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise CheckError(f"reference: token id {token} is outside the vocabulary (0 to {config.vocab_size - 1})")


def _embedding(weights: Weights, config: ModelConfig, ids: Sequence[int]) -> Tensor:
    name = "model.embed_tokens.weight"
    return torch.cat([weights.rows(name, token, token + 1, config.hidden_size) for token in ids])


def _logits(weights: Weights, config: ModelConfig, hidden: Tensor) -> Tensor:
    logits = hidden.new_empty(hidden.shape[0], config.vocab_size)
    for start in range(0, config.vocab_size, HEAD_STRIP_ROWS):
        stop = min(start + HEAD_STRIP_ROWS, config.vocab_size)
        logits[:, start:stop] = hidden @ weights.rows("lm_head.weight", start, stop, config.hidden_size).T
    return logits
