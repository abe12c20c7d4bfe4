"""Memory of a worker at K3's real shapes: embedding and head of 163,840 × 7,168, dense and KDA layers, experts.

The weights are zero and the shards are sparse files, so the test needs disk for the container only (5 GB).
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from container.reader import ContainerReader
from convert.local_supply import LocalSupply
from convert.memory import worker_memory
from convert.options import ConvertOptions
from convert.prepare import prepare
from convert.run import convert
from tests.checkpoints import K3_DIMENSIONS, hollow_checkpoint, k3_config

GIB = 1 << 30
REAL_SHAPES = K3_DIMENSIONS | {
    "num_hidden_layers": 2,
    "num_experts": 10,
    "num_experts_per_token": 2,
    "vision_config": {"text_hidden_size": 7168},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_stays_below_2_gb_at_real_shapes(tmp_path: Path) -> None:
    source = hollow_checkpoint(tmp_path / "k3", k3_config(**REAL_SHAPES))
    options = ConvertOptions(source=source, output=tmp_path / "container", workers=1)

    summary = convert(options, io.StringIO())

    assert summary.complete
    assert summary.peak_worker_bytes < 2e9
    assert summary.peak_worker_bytes < worker_memory(prepare(options, LocalSupply(options)).plan)
    with ContainerReader.open(tmp_path / "container") as reader:
        assert not reader.read_expert(1, 3).scales["gate"].any()
