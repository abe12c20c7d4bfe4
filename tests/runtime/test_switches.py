"""Every switch at once against the reference: placement changes no bit, the order of sums only the last ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from container.layout import VQ3R, VQ4P, ExpertQuant
from tests.containers import build_container, k3_config, kimi_linear_config
from tests.runtime.switches import compared

IDS = np.random.default_rng(5).integers(0, 640, 38).tolist()
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("make", "quant"), [(k3_config, VQ3R), (k3_config, VQ4P), (kimi_linear_config, VQ3R)], ids=["K3", "K3 VQ4P", "KL"]
)
def test_every_switch_against_the_reference(
    tmp_path: Path, make: Callable[..., dict[str, Any]], quant: ExpertQuant
) -> None:
    # a sum of two would not show in which order it was taken
    folder = build_container(tmp_path, make(num_hidden_layers=4, num_experts_per_token=4), quant=quant)
    for found in compared(folder, IDS):
        assert found.logits_error < TOLERANCE, found
        assert found.worst_layer_error < TOLERANCE, found
        assert found.same_routing, found
        assert found.same_bits, found
