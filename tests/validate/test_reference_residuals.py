"""Attention residuals: the mix against fla, and which vectors are stored when."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import k3_config, kimi_linear_config
from tests.validate.small_models import fla_module, prompt, relative_errors, small_model
from validate.reference.model import forward
from validate.reference.residuals import AttentionResidual, PlainResidual, mix, residual_of
from validate.reference.tensors import MappingTensors, Weights

WIDTH = 6


def numbered(n: int) -> torch.Tensor:
    """A [2, WIDTH] vector pair that no sum of other such vectors equals: powers of two."""
    return torch.full((2, WIDTH), float(2**n), dtype=torch.float64)


def residual(n_layers: int, block_size: int) -> AttentionResidual:
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.{part}" for i in range(n_layers) for part in ("self_attention_res", "mlp_res")]
    tensors = {}
    for name in [*names, "model.output_attn_res"]:
        tensors[f"{name}_norm.weight"] = torch.randn(WIDTH, generator=generator)
        tensors[f"{name}_proj.weight"] = torch.randn(1, WIDTH, generator=generator)
    return AttentionResidual(numbered(0), Weights(MappingTensors(tensors), torch.float64), block_size, 1e-5)


@pytest.mark.parametrize("n_vectors", [1, 2, 9])
def test_mix_against_fla(n_vectors: int) -> None:
    naive = fla_module("ops", "attnres", "naive.py").naive_attnres
    generator = torch.Generator().manual_seed(n_vectors)
    vectors = [torch.randn(5, 32, generator=generator) * (n + 1) for n in range(n_vectors)]
    norm, proj = torch.randn(32, generator=generator), torch.randn(32, generator=generator)
    expected = naive(proj, vectors, norm, rms_eps=1e-5)
    assert max(relative_errors(mix(vectors, norm, proj, 1e-5), expected)) <= 1e-6


def test_mix_by_hand() -> None:
    # Normed: (1, 1) and (-1, 1); times norm (2, 5) and proj (ln 3 / 2, 0): scores ±ln 3, so shares 9 to 1.
    ln3 = torch.log(torch.tensor(3.0, dtype=torch.float64))
    vectors = [torch.tensor([[10.0, 10.0]], dtype=torch.float64), torch.tensor([[-20.0, 20.0]], dtype=torch.float64)]
    found = mix(vectors, torch.tensor([2.0, 5.0], dtype=torch.float64), torch.stack([ln3 / 2, ln3 * 0]), 0.0)
    assert found[0].tolist() == pytest.approx([0.9 * 10 - 0.1 * 20, 0.9 * 10 + 0.1 * 20], rel=1e-12)


@pytest.mark.parametrize("block_size", [1, 2, 3, 12])
def test_what_is_stored(block_size: int) -> None:
    n_layers = 7
    state = residual(n_layers, block_size)
    outputs: list[torch.Tensor] = []  # in order: attention, then feed-forward, of each layer
    for layer in range(n_layers):
        state.attention_input(layer)
        outputs.append(numbered(2 * layer + 1))
        state.add_attention(outputs[-1])
        state.mlp_input(layer)
        outputs.append(numbered(2 * layer + 2))
        state.add_mlp(outputs[-1])
        n_stored = layer // block_size + 1
        assert len(state.stored) == n_stored
        assert torch.equal(state.stored[0], numbered(0))
        for j in range(1, n_stored):
            run = outputs[2 * block_size * (j - 1) : 2 * block_size * j]
            assert torch.equal(state.stored[j], sum(run[1:], run[0]))
        open_run = outputs[2 * block_size * (n_stored - 1) :]
        assert torch.equal(state.value, sum(open_run[1:], open_run[0]))


def test_what_is_read() -> None:
    state = residual(3, 2)
    weights = state.weights

    def mixed(name: str, *vectors: torch.Tensor) -> torch.Tensor:
        norm, proj = weights.fetch(f"{name}_norm.weight", (WIDTH,)), weights.fetch(f"{name}_proj.weight", (1, WIDTH))
        return mix(vectors, norm, proj[0], 1e-5)

    embedding, a0, m0, a1, m1, a2 = (numbered(n) for n in range(6))
    assert torch.equal(state.attention_input(0), embedding)  # nothing stored yet: not mixed
    state.add_attention(a0)
    assert torch.equal(state.mlp_input(0), mixed("model.layers.0.mlp_res", embedding, a0))
    state.add_mlp(m0)
    assert torch.equal(state.attention_input(1), mixed("model.layers.1.self_attention_res", embedding, a0 + m0))
    state.add_attention(a1)
    assert torch.equal(state.mlp_input(1), mixed("model.layers.1.mlp_res", embedding, a0 + m0 + a1))
    state.add_mlp(m1)
    run = a0 + m0 + a1 + m1  # layer 2 starts a run: it reads the old sum as the last entry, once
    assert torch.equal(state.attention_input(2), mixed("model.layers.2.self_attention_res", embedding, run))
    state.add_attention(a2)
    assert torch.equal(state.mlp_input(2), mixed("model.layers.2.mlp_res", embedding, run, a2))
    assert torch.equal(state.output(), mixed("model.output_attn_res", embedding, run, a2))


def test_first_layers_attention_mix_is_never_used() -> None:
    config, tensors = small_model(k3_config(num_hidden_layers=3))
    for part in ("norm", "proj"):
        del tensors[f"model.layers.0.self_attention_res_{part}.weight"]
    assert torch.isfinite(forward(tensors, config, prompt(2, config.vocab_size)).logits).all()


def test_the_config_chooses() -> None:
    for config_json, kind in ((k3_config(), AttentionResidual), (kimi_linear_config(), PlainResidual)):
        config, tensors = small_model(config_json)
        state = residual_of(config, Weights(MappingTensors(tensors), torch.float32), torch.zeros(1, 256))
        assert type(state) is kind
