"""Kimi-Linear and Kimi K3, any number of tokens at a time (docs/MODELS.md section 3).

The two differ in gates, expert width, activation and residuals; all of it follows from the config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from container.model import ModelConfig
from container.reader import ContainerReader
from runtime.compute.gates import F32
from runtime.compute.matrix import Matrix
from runtime.compute.products import one_blas_thread
from runtime.compute.team import Team
from runtime.disk.store import ExpertStore
from runtime.memory.plan import EMBEDDING_NAME
from runtime.models.base import StepTrace
from runtime.models.kda import DeltaAttention
from runtime.models.mla import LatentAttention
from runtime.models.mlp import GatedMlp, RmsNorm, activation
from runtime.models.moe import SparseMlp
from runtime.models.recall import Recall
from runtime.models.residuals import AttentionResiduals, MixedStream, PlainStream, Stream
from runtime.state import KdaState, LatentCache, SequenceState
from runtime.trunk import EmbeddingRows, Needs, Trunk, dimensions

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
        """Attention of the normed x [T, hidden] → [T, hidden]; `state` moves on by T tokens."""
        x = self.attention_norm(x)
        match self.attention, state:
            case DeltaAttention() as attention, KdaState():
                return attention(x, state)
            case LatentAttention() as attention, LatentCache():
                return attention(x, state)
        raise ValueError("the state belongs to a model with other layers")

    def feed_forward(self, x: F32, trace: StepTrace | None, look_ahead: Callable[[], None]) -> F32:
        """MLP of the normed x [T, hidden] → [T, hidden]; of one token, `look_ahead` is called on the way."""
        x = self.mlp_norm(x)
        if isinstance(self.mlp, SparseMlp):
            return self.mlp(x, trace, look_ahead)
        if len(x) == 1:
            look_ahead()
        return self.mlp(x)


@dataclass(frozen=True)
class KimiModel:
    """A loaded model; `load` makes one."""

    config: ModelConfig
    embedding: EmbeddingRows
    layers: list[Layer]
    residuals: AttentionResiduals | None
    final_norm: RmsNorm
    head: Matrix
    recall: Recall
    lookahead: int  # experts of the next layer to ask for early; 0: none

    @classmethod
    def load(
        cls, reader: ContainerReader, trunk: Trunk, store: ExpertStore, team: Team, *, lookahead: int
    ) -> KimiModel:
        """Make the layers of tensors that `tensor_needs` lists. Raises FormatError, IntegrityError."""
        config = reader.model
        block_size = config.attn_res_block_size
        recall = Recall(min(lookahead, config.moe.top_k))
        return cls(
            config=config,
            embedding=trunk.embedding(EMBEDDING_NAME),
            layers=[_load_layer(reader, trunk, store, recall, team, layer) for layer in range(config.n_layers)],
            residuals=None if block_size is None else AttentionResiduals(trunk, config, block_size, team),
            final_norm=RmsNorm(trunk.array(_FINAL_NORM), config.rms_norm_eps),
            head=trunk.matrix(_HEAD),
            recall=recall,
            lookahead=lookahead,
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids, and of logits."""
        return self.config.vocab_size

    def new_state(self, capacity: int) -> SequenceState:
        """The state before the first of at most `capacity` tokens."""
        return SequenceState.empty(self.config, capacity)

    def advance(self, state: SequenceState, ids: Sequence[int], trace: StepTrace | None = None) -> F32:
        """Take T tokens and return what the head reads, normed [T, hidden]; `state` moves on."""
        if len(state.layers) != len(self.layers):
            raise ValueError(f"a state of {len(state.layers)} layers does not fit a model of {len(self.layers)} layers")
        if len(ids) == 1:
            hidden = self._through_layers(state, ids, trace)
        else:
            with one_blas_thread():
                hidden = self._through_layers(state, ids, trace)
        state.position += len(ids)
        return hidden

    def logits(self, hidden: F32) -> F32:
        """Logits [T, vocab_size] of the tokens after those whose `advance` returned `hidden` [T, hidden]."""
        if len(hidden) == 1:
            return self.head(hidden)
        with one_blas_thread():
            return self.head(hidden)

    def _through_layers(self, state: SequenceState, ids: Sequence[int], trace: StepTrace | None) -> F32:
        stream = self._stream(self.embedding.rows(ids))
        for number, (layer, layer_state) in enumerate(zip(self.layers, state.layers, strict=True)):
            stream.add(layer.attend(stream.attention_input(number), layer_state))
            look_ahead = partial(self._look_ahead, number + 1, stream)
            stream.add(layer.feed_forward(stream.mlp_input(number), trace, look_ahead))
            if trace is not None:
                trace.layers.append(stream.value)
        return self.final_norm(stream.final())

    def _look_ahead(self, number: int, stream: Stream) -> None:
        """Ask early for experts of layer `number`, guessed from the stream without what stands before that layer."""
        if not self.lookahead or number >= len(self.layers):
            return
        layer = self.layers[number]
        if isinstance(layer.mlp, SparseMlp):
            layer.mlp.guess(layer.mlp_norm(stream.mlp_input(number)), self.lookahead)

    def _stream(self, embedding: F32) -> Stream:
        return PlainStream(embedding) if self.residuals is None else MixedStream(self.residuals, embedding)


def tensor_needs(config: ModelConfig) -> Needs:
    """Every trunk tensor that the forward pass reads, without prefix."""
    hidden, vocab = config.hidden_size, config.vocab_size
    needs = dimensions({EMBEDDING_NAME: (vocab, hidden), _FINAL_NORM: (hidden,), _HEAD: (vocab, hidden)})
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


def _load_layer(
    reader: ContainerReader, trunk: Trunk, store: ExpertStore, recall: Recall, team: Team, layer: int
) -> Layer:
    config, at = reader.model, f"model.layers.{layer}."
    attention = DeltaAttention if config.is_kda(layer) else LatentAttention
    if config.is_moe(layer):
        mlp: GatedMlp | SparseMlp = SparseMlp(
            trunk,
            f"{at}block_sparse_moe.",
            config,
            layer=layer,
            reader=reader,
            store=store,
            recall=recall,
            team=team,
        )
    else:
        mlp = GatedMlp.load(trunk, f"{at}mlp.", activation(config), team)
    return Layer(
        attention_norm=RmsNorm(trunk.array(f"{at}input_layernorm.weight"), config.rms_norm_eps),
        attention=attention(trunk, f"{at}self_attn.", config, team),
        mlp_norm=RmsNorm(trunk.array(f"{at}post_attention_layernorm.weight"), config.rms_norm_eps),
        mlp=mlp,
    )
