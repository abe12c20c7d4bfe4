"""Containers that several tests read and none changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints.tokenizer import rank_file, special_tokens
from tests.containers import build_container, k3_config, kimi_linear_config


def tokenizer_files(model_type: str) -> dict[str, bytes]:
    """`tokenizer.model` and `specials.json` as a converter writes them."""
    specials = [{"id": token_id, "text": text} for token_id, text in special_tokens(model_type).items()]
    return {"tokenizer.model": rank_file(), "specials.json": json.dumps(specials).encode()}


@pytest.fixture(scope="session")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A K3-shaped container with a tokenizer."""
    return build_container(tmp_path_factory.mktemp("k3"), k3_config(), files=tokenizer_files("kimi_k3"))


@pytest.fixture(scope="session")
def kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-Linear-shaped container without a tokenizer."""
    return build_container(tmp_path_factory.mktemp("kimi-linear"), kimi_linear_config())
