"""A whole checkpoint folder on disk, as a release lays it out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.checkpoints.inventory import is_k3
from tests.checkpoints.tokenizer import CHAT_TEMPLATE, END_OF_TURN_ID, rank_file, tokenizer_config
from tests.checkpoints.weights import checkpoint_tensors

_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.")

_MEDIA_PROCESSING: dict[str, Any] = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": 655360,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "white": 255,
        "gray": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]] | None = None,
    *,
    seed: int = 0,
    n_shards: int = 3,
    single_file: bool = False,
    tokenizer: bool = True,
    resident_mxfp4: bool = False,
) -> Path:
    """Write config, weights and side files into `folder` (created if needed) and return it.

    `tensors` defaults to `checkpoint_tensors(config, seed=seed, resident_mxfp4=resident_mxfp4)`. A layer lies
    wholly in one shard; the head, the projector and the vision tower follow the layers. `single_file` writes
    one `model.safetensors` without an index. Raises ValueError when there is too little for `n_shards` shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = checkpoint_tensors(config, seed=seed, resident_mxfp4=resident_mxfp4)
    if single_file:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        shards = _shards(tensors, n_shards)
        names = shard_names(config, n_shards)
        for file_name, shard in zip(names, shards, strict=True):
            save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        write_index(folder, weight_map, sum(array.nbytes for array in tensors.values()), seed=seed)
    write_side_files(folder, config, tokenizer=tokenizer)
    return folder


def shard_names(config: Mapping[str, Any], n_shards: int) -> list[str]:
    """File names of the shards; K3 writes the count with six digits, Kimi-Linear with five."""
    width = 6 if is_k3(config) else 5
    return [f"model-{number:05d}-of-{n_shards:0{width}d}.safetensors" for number in range(1, n_shards + 1)]


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int, *, seed: int) -> None:
    """`model.safetensors.index.json`, its weight map in an arbitrary order as in the release."""
    names = sorted(weight_map)
    random.Random(seed).shuffle(names)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {name: weight_map[name] for name in names}}
    _write_json(folder / "model.safetensors.index.json", index)


def write_side_files(folder: Path, config: Mapping[str, Any], *, tokenizer: bool = True) -> None:
    """Everything of a release beside its weights: configuration files and, unless declined, the tokenizer."""
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"max_length": 1048576, "eos_token_id": END_OF_TURN_ID})
    if is_k3(config):
        auto_map = {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor"}
        _write_json(folder / "preprocessor_config.json", {"auto_map": auto_map, "media_proc_cfg": _MEDIA_PROCESSING})
    if tokenizer:
        (folder / "tiktoken.model").write_bytes(rank_file())
        _write_json(folder / "tokenizer_config.json", tokenizer_config(config["model_type"]))
        if not is_k3(config):  # K3 builds its prompts in code and ships no template
            (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _shards(tensors: Mapping[str, NDArray[Any]], n_shards: int) -> list[dict[str, NDArray[Any]]]:
    """Whole layers, then what belongs to no layer, cut into `n_shards` consecutive runs of about equal count."""
    units: dict[str, dict[str, NDArray[Any]]] = {}
    for name in tensors:
        units.setdefault(_unit(name), {})[name] = tensors[name]
    if not 1 <= n_shards <= len(units):
        raise ValueError(f"{len(units)} layers and parts cannot fill {n_shards} shards")
    shards: list[dict[str, NDArray[Any]]] = [{} for _ in range(n_shards)]
    for position, unit in enumerate(units.values()):
        shards[position * n_shards // len(units)].update(unit)
    return shards


def _unit(name: str) -> str:
    """What `name` must share a shard with: its layer, the head, the projector or the vision tower."""
    layer = _LAYER.match(name)
    if layer:
        return f"layer {layer[1]}"
    part = name.split(".", 1)[0]
    return part if part in ("mm_projector", "vision_tower") else "head"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
