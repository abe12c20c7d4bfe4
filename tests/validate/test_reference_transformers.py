"""The reference against transformers' kimi_linear: the same checkpoint folder on disk, read by both."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from container.checkpoint import Checkpoint
from container.model import ModelConfig, canonical_config
from tests.checkpoints import kimi_linear_config, write_checkpoint
from tests.validate.small_models import prompt, relative_errors
from validate.reference.model import forward
from validate.reference.sources import CheckpointTensors

VARIANTS: dict[str, dict[str, Any]] = {
    "released shape": {},
    "expert groups": {"num_expert_group": 4, "topk_group": 2},
    "top 3, weights not renormalised": {"moe_renormalize": False, "num_experts_per_token": 3},
    "low-rank queries": {"q_lora_rank": 96},
    "two dense layers, two shared experts": {"first_k_dense_replace": 2, "num_shared_experts": 2},
}
# The reference library computes in f32 whatever the weights' dtype; both sides round, neither is exact.
TOLERANCE = 1e-5


def transformers_model(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third-party deprecations at import and load
        from transformers import KimiLinearForCausalLM

        model = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys(), scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, ModelConfig]:
    config = kimi_linear_config(**request.param)
    folder = write_checkpoint(tmp_path_factory.mktemp("kimi-linear"), config, seed=3)
    tensors = CheckpointTensors(Checkpoint.open(folder))
    return transformers_model(folder), tensors, ModelConfig.from_config(canonical_config(config))


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 70])
def test_logits_and_hidden_states_agree(models: tuple[Any, Any, ModelConfig], n_tokens: int) -> None:
    theirs, tensors, config = models
    ids = prompt(n_tokens, config.vocab_size, seed=n_tokens)
    ours = forward(tensors, config, ids)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    assert max(relative_errors(ours.logits, expected.logits[0])) <= TOLERANCE
    assert torch.equal(ours.logits.argmax(-1), expected.logits[0].argmax(-1))
    inner = expected.hidden_states[1:-1]  # after each layer but the last, whose entry is normed
    for layer, state in enumerate(inner):
        assert max(relative_errors(ours.layers[layer], state[0])) <= TOLERANCE
    assert max(relative_errors(ours.hidden, expected.hidden_states[-1][0])) <= TOLERANCE


def test_float64_reference_lies_as_near(models: tuple[Any, Any, ModelConfig]) -> None:
    theirs, tensors, config = models
    ids = prompt(9, config.vocab_size)
    exact = forward(tensors, config, ids, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    assert exact.logits.dtype == torch.float64
    assert max(relative_errors(exact.logits, expected)) <= TOLERANCE
