"""Router and experts (docs/MODELS.md 3.5 and 3.6), in full or in latent width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from container.model import ModelConfig, MoeConfig
from container.reader import ContainerReader
from runtime.compute import row_kernels
from runtime.compute.expert_products import ExpertProducts
from runtime.compute.experts import LayerCodebooks
from runtime.compute.gates import F32
from runtime.compute.matrix import Matrix
from runtime.compute.team import Team
from runtime.disk.store import ExpertStore, Request
from runtime.models.base import StepTrace
from runtime.models.mlp import GatedMlp, RmsNorm, activation
from runtime.models.recall import Recall
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
        """x [T, hidden] → ids [T, k], ascending, and their weights [T, k]. Of equal scores the lower id wins."""
        scores = self._scores(x)
        chosen = np.sort(self._best(scores)[:, : self._config.top_k], axis=1)
        weights = np.take_along_axis(scores, chosen, axis=1)
        if self._config.top_k > 1 and self._config.renormalize:
            weights = weights / (weights.sum(axis=1, keepdims=True) + _RENORM_TOLERANCE)
        return chosen, weights * np.float32(self._config.routed_scaling_factor)

    def likeliest(self, x: F32, n_experts: int) -> Ids:
        """x [1, hidden] → the ids that would be chosen first, best first."""
        return self._best(self._scores(x))[0, : min(n_experts, self._config.top_k)]

    def _scores(self, x: F32) -> F32:
        scores = self._weight(x)
        row_kernels.sigmoid_rows(scores)
        return scores

    def _best(self, scores: F32) -> Ids:
        """Ids [T, experts] in the order of choice; the bias takes part in nothing else."""
        return np.argsort(-self._of_best_groups(scores + self._bias), axis=1, kind="stable")

    def _of_best_groups(self, choice: F32) -> F32:
        """`choice` with -inf for the experts of all but the best groups; a group counts by its two best experts."""
        moe = self._config
        if moe.topk_groups == moe.n_groups:
            return choice
        groups = choice.reshape(len(choice), moe.n_groups, -1)
        strength = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        dropped = np.argsort(-strength, axis=1, kind="stable")[:, moe.topk_groups :]
        masked = groups.copy()
        np.put_along_axis(masked, dropped[:, :, None], -np.inf, axis=1)
        return masked.reshape(choice.shape)


class Latent:
    """K3's way into and out of the experts' narrower width."""

    def __init__(self, trunk: Trunk, at: str, config: ModelConfig) -> None:
        self._down = trunk.matrix(f"{at}routed_expert_down_proj.weight")
        self._up = trunk.matrix(f"{at}routed_expert_up_proj.weight")
        self._norm = None
        if config.moe.latent_norm:
            self._norm = RmsNorm(trunk.array(f"{at}routed_expert_norm.weight"), config.rms_norm_eps)

    def enter(self, x: F32) -> F32:
        """[T, hidden] → [T, latent]."""
        return self._down(x)

    def leave(self, total: F32) -> F32:
        """The experts' weighted sum [T, latent] → [T, hidden]; the norm is taken of the sum."""
        return self._up(total if self._norm is None else self._norm(total))


class SparseMlp:
    """The routed and shared experts of one layer."""

    def __init__(
        self,
        trunk: Trunk,
        at: str,
        config: ModelConfig,
        *,
        layer: int,
        reader: ContainerReader,
        store: ExpertStore,
        recall: Recall,
        team: Team,
    ) -> None:
        """Read the tensors that `needs` lists, and the layer's codebooks."""
        self.layer = layer
        self._store = store
        self._recall = recall
        self._act = activation(config)
        books = reader.codebooks(layer)
        self._codebooks = LayerCodebooks(books, team)
        self._products = ExpertProducts(books, self._act, team)
        bias = trunk.array(f"{at}gate.e_score_correction_bias")
        self._router = Router(trunk.matrix(f"{at}gate.weight"), bias, config.moe)
        self._latent = None if config.moe.latent_size is None else Latent(trunk, at, config)
        self._shared = None
        if config.moe.n_shared_experts:
            self._shared = GatedMlp.load(trunk, f"{at}shared_experts.", self._act, team)

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

    def __call__(self, x: F32, trace: StepTrace | None, look_ahead: Callable[[], None]) -> F32:
        """x [T, hidden] → [T, hidden]. Of one token the experts are asked for at once, then `look_ahead` is called."""
        chosen, weights = self._router(x)
        if trace is not None:
            trace.routing[self.layer] = chosen
        request = None
        if len(x) == 1:
            self._recall.observe(self.layer, chosen[0])
            request = self._store.request(self.layer, chosen[0].tolist())
            look_ahead()
        shared = None if self._shared is None else self._shared(x)
        narrow = x if self._latent is None else self._latent.enter(x)
        routed = self._many(narrow, chosen, weights) if request is None else self._one(narrow, request, weights[0])
        if self._latent is not None:
            routed = self._latent.leave(routed)
        return routed if shared is None else routed + shared

    def guess(self, x: F32, n_experts: int) -> None:
        """Have the experts read early that x [1, hidden], a guess at this layer's input, makes likely."""
        likely = self._router.likeliest(x, n_experts)
        self._recall.guess(self.layer, likely)
        self._store.prefetch(self.layer, likely.tolist())

    def _one(self, x: F32, request: Request, weights: F32) -> F32:
        """Weighted sum of the requested experts for x [1, width]: taken as they arrive, added in the order of ids."""
        tables = self._codebooks.tables(x[0])
        outputs = np.empty((len(weights), x.shape[1]), dtype=np.float32)
        for arrived in self._store.arrivals(request):
            outs = self._codebooks.experts([record for _, record in arrived], tables, self._act)
            for (index, _), out in zip(arrived, outs, strict=True):
                outputs[index] = out
        total = np.zeros_like(x)
        for weight, output in zip(weights, outputs, strict=True):
            total[0] += weight * output
        return total

    def _many(self, x: F32, chosen: Ids, weights: F32) -> F32:
        """Weighted sum of each token's experts: x [T, width], chosen and weights [T, k] → [T, width].

        Experts in ascending order, each with all of its tokens at once.
        """
        total = np.zeros(x.shape[::-1], dtype=np.float32)  # the other way round: see ExpertProducts
        flat = chosen.reshape(-1)
        order = np.argsort(flat, kind="stable")
        wanted, starts = np.unique(flat[order], return_index=True)
        uses = np.split(order, starts[1:])
        records = self._store.stream(self.layer, wanted.tolist(), [len(use) for use in uses])
        for record, use in zip(records, uses, strict=True):
            tokens = use // chosen.shape[1]
            self._products.add_expert(record, x[tokens], tokens, weights.reshape(-1)[use], total)
        return np.ascontiguousarray(total.T)
