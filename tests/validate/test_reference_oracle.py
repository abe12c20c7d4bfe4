"""The whole forward pass against the numpy oracle, which is written in other ways (kimi_oracle)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checkpoints import k3_config, kimi_linear_config
from tests.validate.kimi_oracle import Oracle
from tests.validate.small_models import prompt, relative_errors, small_model
from validate.reference.model import forward

MODELS: dict[str, dict[str, Any]] = {
    "k3, runs of 2 layers": k3_config(),
    "k3, runs of 3 layers": k3_config(num_hidden_layers=7, attn_res_block_size=3),
    "k3, one run": k3_config(num_hidden_layers=4, attn_res_block_size=12),
    "k3 without latent norm, gate limit on up, output gate": k3_config(
        num_hidden_layers=4, latent_moe_use_norm=False, activation_situ_linear_beta=None, mla_use_output_gate=False
    ),
    "k3, ordinary residual, weights not renormalised": k3_config(
        num_hidden_layers=4, attn_res_block_size=None, moe_renormalize=False, routed_scaling_factor=1.7
    ),
    "kimi-linear": kimi_linear_config(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_tokens", [1, 11])
def test_forward_against_the_oracle(name: str, n_tokens: int) -> None:
    config, tensors = small_model(MODELS[name], seed=11)
    ids = prompt(n_tokens, config.vocab_size, seed=n_tokens)
    oracle = Oracle(tensors, config)
    expected = oracle.logits(ids)
    exact = forward(tensors, config, ids, dtype=torch.float64)
    assert max(relative_errors(exact.logits, expected)) <= 1e-11
    for layer, prefix_sum in enumerate(oracle.prefix_sums):
        assert max(relative_errors(exact.layers[layer], prefix_sum)) <= 1e-11
    chosen = {layer: [set(row) for row in ids_.tolist()] for layer, ids_ in exact.routing.items()}
    assert chosen == oracle.routing
    single = forward(tensors, config, ids)
    assert single.logits.dtype == torch.float32
    assert max(relative_errors(single.logits, expected)) <= 1e-5


@pytest.mark.parametrize("config_json", [k3_config(num_hidden_layers=4), kimi_linear_config(num_hidden_layers=4)])
def test_latent_norm_eps_can_be_switched(config_json: dict[str, Any]) -> None:
    config, tensors = small_model(config_json)
    for name in tensors:  # a small latent makes the constant matter
        if name.endswith(("kv_a_proj_with_mqa.weight", "q_a_proj.weight")):
            tensors[name] = tensors[name] * 1e-3
    ids = prompt(5, config.vocab_size)
    results = {}
    for eps in (1e-6, 1e-5):
        results[eps] = forward(tensors, config, ids, latent_norm_eps=eps, dtype=torch.float64).logits
        assert max(relative_errors(results[eps], Oracle(tensors, config, latent_eps=eps).logits(ids))) <= 1e-11
    assert torch.equal(results[1e-6], forward(tensors, config, ids, dtype=torch.float64).logits)
    assert max(relative_errors(results[1e-5], results[1e-6])) > 1e-3
