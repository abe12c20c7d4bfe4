"""Kimi-Linear and Kimi K3, one token at a time (docs/MODELS.md section 3).

The two differ in gates, expert width, activation and residuals; all of it follows from the config.
"""

from __future__ import annotations

from dataclasses import dataclass

from container.model import ModelConfig
from container.reader import ContainerReader
from runtime.gates import F32
from runtime.matrix import Matrix
from runtime.models.base import StepTrace
from runtime.models.kda import DeltaAttention
from runtime.models.mla import LatentAttention
from runtime.models.mlp import GatedMlp, RmsNorm, activation
from runtime.models.moe import SparseMlp
from runtime.models.residuals import AttentionResiduals, MixedStream, PlainStream, Stream
from runtime.state import KdaState, LatentCache, SequenceState
from runtime.store import ExpertStore
from runtime.trunk import EmbeddingRows, Needs, Trunk, dimensions

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Layer:
    """One transformer layer."""

    attention_norm: RmsNorm
    attention: DeltaAttention | LatentAttention
    mlp_norm: RmsNorm
    mlp: GatedMlp | SparseMlp

    def attend(self, x: F32, state: KdaState | LatentCache) -> F32:
        """Attention of the normed x [hidden] → [hidden]; `state` moves on by one token."""
        x = self.attention_norm(x)
        match self.attention, state:
            case DeltaAttention() as attention, KdaState():
                return attention(x, state)
            case LatentAttention() as attention, LatentCache():
                return attention(x, state)
        raise ValueError("the state belongs to a model with other layers")

    def feed_forward(self, x: F32, trace: StepTrace | None) -> F32:
        """MLP of the normed x [hidden] → [hidden]."""
        x = self.mlp_norm(x)
        return self.mlp(x, trace) if isinstance(self.mlp, SparseMlp) else self.mlp(x)


@dataclass(frozen=True)
class KimiModel:
    """A loaded model; `load` makes one."""

    config: ModelConfig
    embedding: EmbeddingRows
    layers: list[Layer]
    residuals: AttentionResiduals | None
    final_norm: RmsNorm
    head: Matrix

    @classmethod
    def load(cls, reader: ContainerReader, trunk: Trunk, store: ExpertStore) -> KimiModel:
        """Check that every tensor is there, then read the trunk. Raises FormatError, IntegrityError."""
        config = reader.model
        trunk.require(tensor_needs(config))
        block_size = config.attn_res_block_size
        return cls(
            config=config,
            embedding=trunk.embedding(_EMBEDDING),
            layers=[_load_layer(reader, trunk, store, layer) for layer in range(config.n_layers)],
            residuals=None if block_size is None else AttentionResiduals(trunk, config, block_size),
            final_norm=RmsNorm(trunk.array(_FINAL_NORM), config.rms_norm_eps),
            head=trunk.matrix(_HEAD),
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""
        return self.config.vocab_size

    def new_state(self) -> SequenceState:
        """The state before the first token."""
        return SequenceState.empty(self.config)

    def advance(self, state: SequenceState, token_id: int, trace: StepTrace | None = None) -> F32:
        """Take one token and return what the head reads, normed [hidden]; `state` moves on."""
        if len(state.layers) != len(self.layers):
            raise ValueError(f"a state of {len(state.layers)} layers does not fit a model of {len(self.layers)} layers")
        stream = self._stream(self.embedding.row(token_id))
        for number, (layer, layer_state) in enumerate(zip(self.layers, state.layers, strict=True)):
            stream.add(layer.attend(stream.attention_input(number), layer_state))
            stream.add(layer.feed_forward(stream.mlp_input(number), trace))
            if trace is not None:
                trace.layers.append(stream.value)
        state.position += 1
        return self.final_norm(stream.final())

    def logits(self, hidden: F32) -> F32:
        """Logits [vocab_size] of the next token from what `advance` returned."""
        return self.head.matvec(hidden)

    def _stream(self, embedding: F32) -> Stream:
        return PlainStream(embedding) if self.residuals is None else MixedStream(self.residuals, embedding)


def tensor_needs(config: ModelConfig) -> Needs:
    """Every trunk tensor that the forward pass reads, without prefix."""
    hidden, vocab = config.hidden_size, config.vocab_size
    needs = dimensions({_EMBEDDING: (vocab, hidden), _FINAL_NORM: (hidden,), _HEAD: (vocab, hidden)})
    for layer in range(config.n_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            needs[f"{at}{norm}.weight"] = ((hidden,),)
        attention = DeltaAttention if config.is_kda(layer) else LatentAttention
        needs |= attention.needs(f"{at}self_attn.", config)
        if config.is_moe(layer):
            needs |= SparseMlp.needs(f"{at}block_sparse_moe.", config)
        else:
            needs |= GatedMlp.needs(f"{at}mlp.", hidden, config.intermediate_size)
    if config.attn_res_block_size is not None:
        needs |= AttentionResiduals.needs(config)
    return needs


def _load_layer(reader: ContainerReader, trunk: Trunk, store: ExpertStore, layer: int) -> Layer:
    config, at = reader.model, f"model.layers.{layer}."
    attention = DeltaAttention if config.is_kda(layer) else LatentAttention
    if config.is_moe(layer):
        mlp: GatedMlp | SparseMlp = SparseMlp(
            trunk, f"{at}block_sparse_moe.", config, reader=reader, store=store, layer=layer
        )
    else:
        mlp = GatedMlp.load(trunk, f"{at}mlp.", activation(config))
    return Layer(
        attention_norm=RmsNorm(trunk.array(f"{at}input_layernorm.weight"), config.rms_norm_eps),
        attention=attention(trunk, f"{at}self_attn.", config),
        mlp_norm=RmsNorm(trunk.array(f"{at}post_attention_layernorm.weight"), config.rms_norm_eps),
        mlp=mlp,
    )
