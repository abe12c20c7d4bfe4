"""Checkpoints and the containers that the converter makes of them; nobody changes them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from container.layout import VQ3R, ExpertQuant
from convert.options import ConvertOptions
from convert.quality import Quality
from convert.run import convert
from tests.checkpoints import k3_config, kimi_linear_config, write_checkpoint


@dataclass(frozen=True)
class Converted:
    """A checkpoint and its container."""

    config: Mapping[str, Any]
    checkpoint: Path
    container: Path


def converted(folder: Path, config: Mapping[str, Any], *, quant: ExpertQuant = VQ3R, **options: Any) -> Converted:
    """Write a checkpoint and convert it, in one worker."""
    checkpoint, container = folder / "checkpoint", folder / "container"
    write_checkpoint(checkpoint, config, **options)
    convert(
        ConvertOptions(source=checkpoint, output=container, workers=1, quant=quant, quality=Quality.FAST), io.StringIO()
    )
    return Converted(config, checkpoint, container)


@pytest.fixture(scope="session")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """K3-shaped, shared experts and latent projections in MXFP4 too."""
    return converted(tmp_path_factory.mktemp("k3"), k3_config(num_hidden_layers=4), resident_mxfp4=True)


@pytest.fixture(scope="session")
def kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Kimi-Linear-shaped, one shard without an index."""
    return converted(tmp_path_factory.mktemp("kimi-linear"), kimi_linear_config(num_hidden_layers=4), single_file=True)
