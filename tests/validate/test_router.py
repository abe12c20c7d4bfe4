"""Which choices change when another router reads the source's states: by hand, and against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from container.errors import CheckError
from container.model import ModelConfig
from tests.checkpoints import k3_config
from tests.validate.small_models import prompt, small_model
from validate.reference.model import ReferenceOutput, forward
from validate.reference.tensors import MappingTensors
from validate.router import RouterCount, changed_choices

AT = "model.layers.{}.block_sparse_moe.gate.{}"
N_LAYERS = 4


@pytest.fixture(scope="module")
def source() -> tuple[ModelConfig, dict[str, torch.Tensor], ReferenceOutput]:
    model, tensors = small_model(k3_config(num_hidden_layers=N_LAYERS, num_experts_per_token=3))
    return model, tensors, forward(tensors, model, prompt(40, model.vocab_size))


def numpy_choices(
    model: ModelConfig, tensors: dict[str, torch.Tensor], layer: int, output: ReferenceOutput
) -> list[set[int]]:
    x = output.router_inputs[layer].double().numpy()
    weight, bias = (tensors[AT.format(layer, name)].double().numpy() for name in ("weight", "e_score_correction_bias"))
    choice = 1 / (1 + np.exp(-x @ weight.T)) + bias
    return [set(row.tolist()) for row in np.argsort(-choice, axis=1)[:, : model.moe.top_k]]


def spoiled(tensors: dict[str, torch.Tensor], **changes: Any) -> dict[str, torch.Tensor]:
    """Router weights with noise, so that some choices change and others do not."""
    rng = torch.Generator().manual_seed(1)
    noisy = dict(tensors)
    for layer in range(1, N_LAYERS):
        name = AT.format(layer, "weight")
        noisy[name] = tensors[name] + 0.02 * layer * torch.randn(tensors[name].shape, generator=rng)
    return noisy | changes


def test_the_inputs_are_what_the_routers_read(source):
    model, tensors, output = source
    for layer in model.moe_layers:
        assert numpy_choices(model, tensors, layer, output) == [set(row) for row in output.routing[layer].tolist()]


def test_the_same_router_changes_nothing(source):
    model, tensors, output = source
    count = RouterCount(MappingTensors(tensors), model)
    count.add(output)
    report = count.report()
    assert (report.n_changed, report.n_tokens_changed, report.n_tokens, report.n_choices) == (0, 0, 40, 3 * 3 * 40)


def test_counts_are_those_of_a_plain_calculation(source):
    model, tensors, output = source
    stored = spoiled(tensors)
    count = RouterCount(MappingTensors(stored), model)
    count.add(output)
    count.add(output)
    report = count.report()
    touched = np.zeros(40, dtype=bool)
    for layer, found in zip(model.moe_layers, report.layers, strict=True):
        before, after = (numpy_choices(model, side, layer, output) for side in (tensors, stored))
        lost = np.array([len(a - b) for a, b in zip(before, after, strict=True)])
        touched |= lost > 0
        assert (found.layer, found.n_choices) == (layer, 2 * 3 * 40)
        assert (found.n_changed, found.n_tokens_changed) == (2 * lost.sum(), 2 * (lost > 0).sum())
    assert 0 < touched.sum() < 40
    assert (report.n_tokens, report.n_tokens_changed) == (80, 2 * touched.sum())
    assert report.n_changed == sum(layer.n_changed for layer in report.layers)
    assert report.n_choices == 2 * 3 * 3 * 40


def test_the_bias_counts_too(source):
    model, tensors, output = source
    name = AT.format(2, "e_score_correction_bias")
    bias = torch.zeros_like(tensors[name])
    bias[5] = 10.0  # this expert is always taken
    count = RouterCount(MappingTensors(tensors | {name: bias}), model)
    count.add(output)
    by_layer = {layer.layer: layer.n_tokens_changed for layer in count.report().layers}
    assert by_layer[1] == by_layer[3] == 0
    assert by_layer[2] >= sum(5 not in row for row in output.routing[2].tolist()) > 0


def test_a_router_that_is_missing_or_of_another_shape(source):
    model, tensors, output = source
    with pytest.raises(CheckError, match=r"gate.weight` has shape"):
        RouterCount(MappingTensors(spoiled(tensors, **{AT.format(1, "weight"): torch.ones(2, 2)})), model).add(output)
    with pytest.raises(CheckError, match="is missing"):
        RouterCount(MappingTensors({}), model).add(output)


def test_changed_choices_by_hand():
    ours = torch.tensor([[0, 1, 2], [0, 1, 2], [5, 6, 7]])
    theirs = torch.tensor([[2, 0, 1], [1, 3, 4], [0, 1, 2]])
    assert changed_choices(ours, theirs).tolist() == [0, 2, 3]
