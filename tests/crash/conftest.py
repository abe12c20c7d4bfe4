"""A small checkpoint and its uninterrupted container."""

from __future__ import annotations

import pytest

import convert.run
from tests.checkpoints import k3_config
from tests.convert.small import Converted, converted, serial_work, small_k3


@pytest.fixture(scope="session")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The small K3 checkpoint, converted without interruption. Not to be changed."""
    return converted(tmp_path_factory.mktemp("k3"), small_k3())


@pytest.fixture(scope="session")
def long_k3(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A checkpoint whose two MoE layers fill half a training sample: each takes a second, in which it can be caught."""
    config = k3_config(num_hidden_layers=3, num_experts=4, moe_intermediate_size=256, routed_expert_hidden_size=256)
    return converted(tmp_path_factory.mktemp("long"), config)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions run their jobs in the test's own process."""
    monkeypatch.setattr(convert.run, "run_work", serial_work)
