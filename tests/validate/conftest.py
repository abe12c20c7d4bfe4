"""Checkpoints and the containers that the converter makes of them; nobody changes them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import convert.run
from container.layout import VQ3R, ExpertQuant
from convert.options import ConvertOptions
from convert.quality import Quality
from tests.checkpoints import k3_config, kimi_linear_config, write_checkpoint
from tests.convert.small import serial_work


@dataclass(frozen=True)
class Converted:
    """A checkpoint and its container."""

    config: Mapping[str, Any]
    checkpoint: Path
    container: Path


def converted(folder: Path, config: Mapping[str, Any], *, quant: ExpertQuant = VQ3R, **options: Any) -> Converted:
    """Write a checkpoint and convert it in this process, with little training."""
    checkpoint, container = folder / "checkpoint", folder / "container"
    write_checkpoint(checkpoint, config, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(convert.run, "run_work", serial_work)
        patched.setattr("convert.codebooks.GREEDY_ALONE", ((65_536, 4),))
        wanted = ConvertOptions(source=checkpoint, output=container, quant=quant, quality=Quality.FAST)
        convert.run.convert(wanted, io.StringIO())
    return Converted(config, checkpoint, container)


@pytest.fixture(scope="session")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """K3-shaped, shared experts and latent projections in MXFP4 too."""
    return converted(tmp_path_factory.mktemp("k3"), k3_config(num_hidden_layers=4), resident_mxfp4=True)


@pytest.fixture(scope="session")
def kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Kimi-Linear-shaped, one shard without an index."""
    return converted(tmp_path_factory.mktemp("kimi-linear"), kimi_linear_config(num_hidden_layers=4), single_file=True)
