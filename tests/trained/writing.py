"""Writes a trained model as a checkpoint folder in the release's layout: names, dtypes, MXFP4 pairs, shards."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from tests.checkpoints import pack_mxfp4
from tests.checkpoints.folder import shard_names, write_index
from tests.trained.parameters import EXPERTS, PREFIX, is_bf16
from tests.trained.vocabulary import Vocabulary

Arrays = dict[str, NDArray[Any]]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_trained(
    folder: Path, config: Mapping[str, Any], vocabulary: Vocabulary, parameters: Mapping[str, Tensor]
) -> None:
    """Write the checkpoint into `folder`: each layer in a shard of its own, then one for what lies outside them."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: defaultdict[int, Arrays] = defaultdict(dict)
    n_layers = config["text_config"]["num_hidden_layers"]
    for name, parameter in parameters.items():
        layer = _LAYER.match(name)
        shards[int(layer[1]) if layer else n_layers].update(_stored(name, parameter))
    weight_map: dict[str, str] = {}
    for number, file_name in enumerate(shard_names(config, len(shards))):
        save_file(shards[number], folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shards[number], file_name)
    total_bytes = sum(array.nbytes for shard in shards.values() for array in shard.values())
    write_index(folder, weight_map, total_bytes, seed=0)
    _write_side_files(folder, config, vocabulary)


def _stored(name: str, parameter: Tensor) -> Iterator[tuple[str, NDArray[Any]]]:
    """The stored tensors of one parameter."""
    values = parameter.detach().numpy()
    if EXPERTS.fullmatch(name):
        experts, _, matrix = name.rpartition(".")
        for number, expert in enumerate(values):
            at = f"{PREFIX}{experts}.{number}.{matrix}.weight"
            packed, scales = pack_mxfp4(expert)
            yield f"{at}_packed", packed
            yield f"{at}_scale", scales
    else:
        yield PREFIX + name, values.astype(ml_dtypes.bfloat16 if is_bf16(name) else np.float32)


def _write_side_files(folder: Path, config: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    generation = {"max_length": config["text_config"]["max_position_embeddings"], "eos_token_id": vocabulary.end_id}
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": vocabulary.tokenizer_config(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "tiktoken.model").write_bytes(vocabulary.rank_file())
