"""Checkpoints whose shards may go, and what must be left of them and of their container at any moment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from container.checkpoint import Checkpoint
from container.layout import bank_name
from container.manifest import Manifest
from convert.arch import detect
from convert.plan import plan_conversion
from download.folder import STATE_FOLDER
from tests.checkpoints import checkpoint_tensors
from tests.checkpoints.folder import shard_names, write_index, write_side_files
from tests.convert.small import small_k3

_EXPERT = re.compile(r"\.layers\.(\d+)\..*\.experts\.\d+\.")


def write_straddling(folder: Path, n_shards: int = 4, **overrides: Any) -> Path:
    """The small K3 checkpoint cut into shards of about equal tensor counts, wherever that falls: as releases are."""
    config = small_k3(**overrides)
    tensors = checkpoint_tensors(config)
    folder.mkdir(parents=True)
    weight_map = {name: n * n_shards // len(tensors) for n, name in enumerate(tensors)}
    names = shard_names(config, n_shards)
    for number, shard in enumerate(names):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == number}, folder / shard)
    total = sum(array.nbytes for array in tensors.values())
    write_index(folder, {name: names[number] for name, number in weight_map.items()}, total, seed=0)
    write_side_files(folder, config)
    return folder


def shards_here(source: Path) -> set[str]:
    """Names of the shards that lie in the folder, dead links included."""
    return {path.name for path in source.glob("*.safetensors")}


def small_files(source: Path) -> dict[str, bytes]:
    """Every file but the shards and the state folder."""
    return {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and path.suffix != ".safetensors" and STATE_FOLDER not in path.parts
    }


def reclaimed_lines(source: Path) -> list[str]:
    """The shards that the ledger says were given back, each time it says so."""
    ledger = source / STATE_FOLDER / "ledger.jsonl"
    events = [json.loads(line) for line in ledger.read_text().splitlines() if line] if ledger.exists() else []
    return [event["file"] for event in events if event["event"] == "reclaimed"]


class Consumers:
    """Where the tensors of each shard end up in the container; by names, not by jobs."""

    def __init__(self, source: Path, expected: Path) -> None:
        """`expected` is the source's container, made while nothing was deleted."""
        checkpoint = Checkpoint.open(source)
        manifest = Manifest.read(expected)
        plan = plan_conversion(detect(checkpoint.config), manifest.expert_quant, 4)
        self._entries = {item.tensor.source: item.entry for job in plan.jobs for item in job.trunk}
        self._expected = expected
        self.tensors: dict[str, list[str]] = {}
        for tensor, shard in checkpoint.weight_map.items():
            self.tensors.setdefault(shard, []).append(tensor)

    def assert_safe(self, source: Path, output: Path) -> None:
        """Of every shard that is gone, all that was made of it is in the output as it should be."""
        for shard in self.tensors.keys() - shards_here(source):
            for tensor in self.tensors[shard]:
                self._assert_kept(tensor, output, shard)

    def _assert_kept(self, tensor: str, output: Path, shard: str) -> None:
        expert = _EXPERT.search(tensor)
        if expert:
            name = bank_name(int(expert[1]))
            assert (output / name).read_bytes() == (self._expected / name).read_bytes(), (shard, tensor)
            return
        entry = self._entries[re.sub(r"_(packed|scale)$", "", tensor)]
        trunk = output / ".build" / "trunk.bin"
        place = slice(entry.offset, entry.offset + entry.n_bytes)
        found = (trunk if trunk.exists() else output / "trunk.bin").read_bytes()[place]
        assert found == (self._expected / "trunk.bin").read_bytes()[place], (shard, tensor)
