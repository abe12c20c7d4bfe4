"""A K3 checkpoint whose routed experts have the released shapes and everything else is small; for benchmarks."""

from __future__ import annotations

import json
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
    # the format asks for no alignment, but a widest-first order gives it for free
    table = sorted(tensor_table(config), key=lambda spec: -DTYPE_BYTES[spec.dtype])
    shards: list[list[TensorSpec]] = [[spec for spec in table if ".layers." not in spec.name]]
    for layer in reversed(range(1 + layers)):
        shards.insert(0, [spec for spec in table if f".layers.{layer}." in spec.name])
    names = shard_names(config, len(shards))
    for file_name, shard in zip(names, shards, strict=True):
        _stream_shard(folder / file_name, config, shard, seed=seed)
    weight_map = {spec.name: file_name for file_name, shard in zip(names, shards, strict=True) for spec in shard}
    write_index(folder, weight_map, sum(spec.n_bytes for spec in table), seed=seed)
    write_side_files(folder, config)
    return folder


def _stream_shard(path: Path, config: Mapping[str, Any], shard: Sequence[TensorSpec], *, seed: int) -> None:
    """A safetensors file: header length (u64), JSON header padded with spaces, tensors in header order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in shard:
        begin, end = end, end + spec.n_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in iter_tensors(config, shard, seed=seed):
            file.write(array.reshape(-1).view(np.uint8).data)
