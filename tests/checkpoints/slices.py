"""Checkpoints of released shapes: a K3 slice with real experts for benchmarks, hollow ones for measuring memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints.configs import k3_config
from tests.checkpoints.folder import shard_names, write_index, write_side_files
from tests.checkpoints.inventory import DTYPE_BYTES, TensorSpec, tensor_table
from tests.checkpoints.weights import iter_tensors

HEADER_ALIGNMENT = 8


def real_shape_slice(
    folder: Path, *, n_experts: int = 16, rows: int = 3072, cols: int = 3584, layers: int = 1, seed: int = 0
) -> Path:
    """Write a checkpoint of one dense layer and `layers` MoE layers into `folder` and return it.

    Each MoE layer has `n_experts` MXFP4 experts with gate and up [rows, cols] and down [cols, rows]. One matrix
    is held in memory at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = k3_config(
        num_hidden_layers=1 + layers,
        num_experts=n_experts,
        num_experts_per_token=min(2, n_experts),
        moe_intermediate_size=rows,
        routed_expert_hidden_size=cols,
    )
    for path, shard in _lay_out(folder, config, seed=seed):
        with path.open("wb") as file:
            file.write(_shard_header(shard))
            for _, array in iter_tensors(config, shard, seed=seed):
                file.write(array.reshape(-1).view(np.uint8).data)
    return folder


def hollow_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a whole checkpoint whose weights are all zero and take no room on disk (sparse files)."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, shard in _lay_out(folder, config, seed=0):
        header = _shard_header(shard)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(spec.n_bytes for spec in shard))
    return folder


def _lay_out(folder: Path, config: Mapping[str, Any], *, seed: int) -> list[tuple[Path, list[TensorSpec]]]:
    """Write index and side files; return each shard's path and tensors: one a layer, one for the rest."""
    # the format asks for no alignment, but a widest-first order gives it for free
    table = sorted(tensor_table(config), key=lambda spec: -DTYPE_BYTES[spec.dtype])
    groups: dict[str, list[TensorSpec]] = {}
    for spec in table:
        layer = re.search(r"\.layers\.(\d+)\.", spec.name)
        groups.setdefault(f"{int(layer[1]):04d}" if layer else "rest", []).append(spec)
    shards = [groups[key] for key in sorted(groups)]
    names = shard_names(config, len(shards))
    weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
    write_index(folder, weight_map, sum(spec.n_bytes for spec in table), seed=seed)
    write_side_files(folder, config)
    return [(folder / name, shard) for name, shard in zip(names, shards, strict=True)]


def _shard_header(shard: Sequence[TensorSpec]) -> bytes:
    """The start of a safetensors file: header length (u64), JSON header padded with spaces."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in shard:
        begin, end = end, end + spec.n_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
