"""The reference on several sequences at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from container.model import LATENT_NORM_EPS, ModelConfig
from tests.trained.delta import delta_by_pieces
from validate.reference.kda import kda_attention
from validate.reference.model import Attention, ReferenceOutput, layer_attention, run
from validate.reference.tensors import TensorSource, Weights


def run_batch(
    model: ModelConfig,
    source: TensorSource,
    inputs: Tensor,
    *,
    attention: Attention = layer_attention,
    dropout: Callable[[Tensor], Tensor] = torch.clone,
) -> ReferenceOutput:
    """The reference on ids [batch, T]: outputs for batch · T tokens end to end, each sequence attended to by itself.

    `dropout` is applied to the embedding and to every attention's output.
    """
    n_sequences = inputs.shape[0]

    def side_by_side(weights: Weights, config: ModelConfig, layer: int, h: Tensor, latent_norm_eps: float) -> Tensor:
        sequences = h.reshape(n_sequences, -1, h.shape[1])
        out: Tensor = torch.func.vmap(lambda one: attention(weights, config, layer, one, latent_norm_eps))(sequences)
        return dropout(out.reshape(h.shape))

    embedding = functional.embedding(inputs.flatten(), source["model.embed_tokens.weight"])
    weights = Weights(source, torch.float32)
    return run(weights, model, dropout(embedding), latent_norm_eps=LATENT_NORM_EPS, attention=side_by_side)


def attention_by_pieces(weights: Weights, config: ModelConfig, layer: int, h: Tensor, latent_norm_eps: float) -> Tensor:
    """As the reference's `layer_attention`, with the delta rule by pieces: T must be a multiple of PIECE."""
    if config.is_kda(layer):
        return kda_attention(weights.under("self_attn."), config.kda, h, config.rms_norm_eps, delta_by_pieces)
    return layer_attention(weights, config, layer, h, latent_norm_eps)
