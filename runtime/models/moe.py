"""Router and experts for one token (docs/MODELS.md 3.5 and 3.6), in full or in latent width."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from container.model import ModelConfig, MoeConfig
from container.reader import ContainerReader
from runtime import experts, gates
from runtime.gates import F32
from runtime.matrix import Matrix
from runtime.models.base import StepTrace
from runtime.models.mlp import GatedMlp, RmsNorm, activation
from runtime.store import ExpertStore
from runtime.trunk import Needs, Trunk, dimensions

_RENORM_TOLERANCE = np.float32(1e-20)  # docs/MODELS.md 3.5
Ids = npt.NDArray[np.int64]


class Router:
    """Scores the experts and chooses some."""

    def __init__(self, weight: Matrix, bias: F32, config: MoeConfig) -> None:
        self._weight = weight
        self._bias = bias
        self._config = config

    def __call__(self, x: F32) -> tuple[Ids, F32]:
        """x [hidden] → ids [k], ascending, and their weights [k]. Of equal scores the lower id wins."""
        scores = self._weight.matvec(x)
        gates.multiply_sigmoid(np.ones_like(scores), scores, scores)
        choice = self._of_best_groups(scores + self._bias)  # the bias takes part in the choice only
        chosen = np.sort(np.argsort(-choice, kind="stable")[: self._config.top_k])
        weights = scores[chosen]
        if self._config.top_k > 1 and self._config.renormalize:
            weights = weights / (weights.sum() + _RENORM_TOLERANCE)
        return chosen, weights * np.float32(self._config.routed_scaling_factor)

    def _of_best_groups(self, choice: F32) -> F32:
        """`choice` with -inf for the experts of all but the best groups; a group counts by its two best experts."""
        moe = self._config
        if moe.topk_groups == moe.n_groups:
            return choice
        groups = choice.reshape(moe.n_groups, -1)
        strength = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        kept = np.argsort(-strength, kind="stable")[: moe.topk_groups]
        masked = np.full_like(groups, -np.inf)
        masked[kept] = groups[kept]
        return masked.reshape(-1)


class Latent:
    """K3's way into and out of the experts' narrower width."""

    def __init__(self, trunk: Trunk, at: str, config: ModelConfig) -> None:
        self._down = trunk.matrix(f"{at}routed_expert_down_proj.weight")
        self._up = trunk.matrix(f"{at}routed_expert_up_proj.weight")
        self._norm = None
        if config.moe.latent_norm:
            self._norm = RmsNorm(trunk.array(f"{at}routed_expert_norm.weight"), config.rms_norm_eps)

    def enter(self, x: F32) -> F32:
        """[hidden] → [latent]."""
        return self._down.matvec(x)

    def leave(self, total: F32) -> F32:
        """The experts' weighted sum [latent] → [hidden]; the norm is taken of the sum."""
        return self._up.matvec(total if self._norm is None else self._norm(total))


class SparseMlp:
    """The routed and shared experts of one layer."""

    def __init__(
        self, trunk: Trunk, at: str, config: ModelConfig, *, reader: ContainerReader, store: ExpertStore, layer: int
    ) -> None:
        """Read the tensors that `needs` lists, and the layer's codebooks."""
        self._layer = layer
        self._store = store
        self._act = activation(config)
        self._codebooks = experts.LayerCodebooks.load(reader, layer)
        bias = trunk.array(f"{at}gate.e_score_correction_bias")
        self._router = Router(trunk.matrix(f"{at}gate.weight"), bias, config.moe)
        self._latent = None if config.moe.latent_size is None else Latent(trunk, at, config)
        self._shared = None
        if config.moe.n_shared_experts:
            self._shared = GatedMlp.load(trunk, f"{at}shared_experts.", self._act)

    @staticmethod
    def needs(at: str, config: ModelConfig) -> Needs:
        """Tensors under the name prefix `at`."""
        moe, hidden = config.moe, config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "gate.weight": (moe.n_experts, hidden),
            "gate.e_score_correction_bias": (moe.n_experts,),
        }
        if moe.latent_size is not None:
            shapes["routed_expert_down_proj.weight"] = (moe.latent_size, hidden)
            shapes["routed_expert_up_proj.weight"] = (hidden, moe.latent_size)
            if moe.latent_norm:
                shapes["routed_expert_norm.weight"] = (moe.latent_size,)
        needs = dimensions({at + name: shape for name, shape in shapes.items()})
        if moe.n_shared_experts:
            needs |= GatedMlp.needs(f"{at}shared_experts.", hidden, moe.n_shared_experts * moe.intermediate_size)
        return needs

    def __call__(self, x: F32, trace: StepTrace | None) -> F32:
        """x [hidden] → [hidden]."""
        chosen, weights = self._router(x)
        if trace is not None:
            trace.routing[self._layer] = chosen
        routed = self._routed(x if self._latent is None else self._latent.enter(x), chosen, weights)
        if self._latent is not None:
            routed = self._latent.leave(routed)
        return routed if self._shared is None else routed + self._shared(x)

    def _routed(self, x: F32, chosen: Ids, weights: F32) -> F32:
        """Weighted sum of the chosen experts, added in the order of their ids."""
        gate_table, up_table = self._codebooks.table("gate", x), self._codebooks.table("up", x)
        total = np.zeros_like(x)
        for expert, weight in zip(chosen, weights, strict=True):
            record = self._store.fetch(self._layer, int(expert))
            inner = self._act(
                experts.matvec(record, "gate", gate_table),
                experts.matvec(record, "up", up_table),
            )
            total += weight * experts.matvec(record, "down", self._codebooks.table("down", inner))
        return total
