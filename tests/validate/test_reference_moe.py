"""Router, activation and experts in isolation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from container.model import MoeConfig
from tests.checkpoints import k3_config, kimi_linear_config
from tests.validate.small_models import small_model
from validate.reference.moe import activation_of, gated_silu, moe, route, situ
from validate.reference.tensors import MappingTensors, Weights

SMALL = MoeConfig(
    n_experts=6,
    top_k=2,
    n_shared_experts=1,
    intermediate_size=8,
    first_dense=1,
    routed_scaling_factor=2.446,
    renormalize=True,
    n_groups=1,
    topk_groups=1,
    latent_size=None,
    latent_norm=False,
)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 1.0, 0.71581783),
        (-2.0, 3.0, -0.65787382),
        (10.0, 50.0, 95.1080215),
        (0.5, -0.25, -0.07740211),
        (-30.0, -100.0, 9.35134e-12),
    ],
)
def test_situ_spot_values(gate: float, up: float, expected: float) -> None:
    found = situ(torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64), 4.0, 25.0)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_situ_without_linear_beta_leaves_up() -> None:
    gate, up = torch.tensor(1.0, dtype=torch.float64), torch.tensor(1000.0, dtype=torch.float64)
    one = situ(gate, torch.tensor(1.0, dtype=torch.float64), 4.0, None)
    assert situ(gate, up, 4.0, None).item() == pytest.approx(1000 * one.item(), rel=1e-12)


def test_activation_follows_the_config() -> None:
    gate, up = torch.tensor([1.0, -2.0]), torch.tensor([1.0, 3.0])
    k3, _ = small_model(k3_config(num_hidden_layers=1))
    linear, _ = small_model(kimi_linear_config(num_hidden_layers=1))
    assert activation_of(k3)(gate, up).tolist() == pytest.approx([0.71581783, -0.65787382], rel=1e-6)
    assert torch.equal(activation_of(linear)(gate, up), gated_silu(gate, up))
    assert gated_silu(gate, up).tolist() == pytest.approx([0.7310586, -0.7152176], rel=1e-6)


def logits_for(*scores: float) -> torch.Tensor:
    return torch.logit(torch.tensor([scores], dtype=torch.float64))


def test_bias_chooses_but_does_not_weigh() -> None:
    logits = logits_for(0.9, 0.1, 0.8, 0.3, 0.2, 0.4)
    bias = torch.tensor([-0.7, 0.0, 0.0, 0.6, 0.0, 0.0], dtype=torch.float64)
    routing = route(logits, bias, SMALL)
    assert routing.ids.tolist() == [[2, 3]]  # choice 0.8 and 0.9, rising ids
    assert routing.weights[0].tolist() == pytest.approx([2.446 * 0.8 / 1.1, 2.446 * 0.3 / 1.1], rel=1e-12)


def test_weights_as_they_are_without_renormalisation() -> None:
    logits, bias = logits_for(0.9, 0.1, 0.8, 0.3, 0.2, 0.4), torch.zeros(6, dtype=torch.float64)
    routing = route(logits, bias, replace(SMALL, renormalize=False))
    assert routing.weights[0].tolist() == pytest.approx([2.446 * 0.9, 2.446 * 0.8], rel=1e-12)
    single = route(logits, bias, replace(SMALL, top_k=1))  # one expert is never renormalised
    assert single.weights[0].tolist() == pytest.approx([2.446 * 0.9], rel=1e-12)


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    # Groups sum 0.9 + 0.1, 0.7 + 0.6, 0.65 + 0.3: the best single expert loses with its group.
    logits, bias = logits_for(0.9, 0.1, 0.7, 0.6, 0.65, 0.3), torch.zeros(6, dtype=torch.float64)
    assert route(logits, bias, replace(SMALL, n_groups=3, topk_groups=1)).ids.tolist() == [[2, 3]]
    assert route(logits, bias, replace(SMALL, n_groups=3, topk_groups=2)).ids.tolist() == [[0, 2]]
    assert route(logits, bias, replace(SMALL, n_groups=3, topk_groups=3)).ids.tolist() == [[0, 2]]


def test_masked_groups_lose_even_to_negative_choices() -> None:
    logits = logits_for(0.9, 0.8, 0.2, 0.1, 0.3, 0.2)
    bias = torch.tensor([-9.0, -9.0, -1.0, -1.0, -9.0, -9.0], dtype=torch.float64)
    assert route(logits, bias, replace(SMALL, n_groups=3, topk_groups=1)).ids.tolist() == [[2, 3]]


@given(seed=st.integers(0, 2**32 - 1), groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (12, 5)]))
def test_routing_against_a_plain_search(seed: int, groups: tuple[int, int]) -> None:
    config = replace(SMALL, n_experts=12, top_k=3, n_groups=groups[0], topk_groups=groups[1])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(12, generator=generator, dtype=torch.float64)
    routing = route(logits, bias, config)
    size = 12 // groups[0]
    for t in range(4):
        scores = [1 / (1 + 2.718281828459045 ** -logits[t, e].item()) for e in range(12)]
        choice = [score + b for score, b in zip(scores, bias.tolist(), strict=True)]
        rank = sorted(range(groups[0]), key=lambda g: -sum(sorted(choice[g * size : (g + 1) * size])[-2:]))
        allowed = [e for e in range(12) if e // size in rank[: groups[1]]]
        chosen = sorted(sorted(allowed, key=lambda e: -choice[e])[:3])
        assert routing.ids[t].tolist() == chosen
        total = sum(scores[e] for e in chosen)
        assert routing.weights[t].tolist() == pytest.approx([2.446 * scores[e] / total for e in chosen], rel=1e-9)


class Recording(Mapping[str, torch.Tensor]):
    """A mapping that notes what is asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_only_chosen_experts_are_fetched_and_each_once() -> None:
    config, tensors = small_model(k3_config(num_hidden_layers=2))
    recording = Recording(tensors)
    weights = Weights(MappingTensors(recording), torch.float32, "model.layers.1.block_sparse_moe.")
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(2))
    _, ids = moe(weights, config, x)
    asked = [name.split("experts.", 1)[1] for name in recording.asked if ".experts." in name]
    assert asked == [f"{e}.{w}.weight" for e in ids.unique().tolist() for w in ("w1", "w3", "w2")]
