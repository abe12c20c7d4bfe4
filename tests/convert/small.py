"""Checkpoints that convert in about a second, ways to convert them, and comparison of folders."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import convert.run
from convert.options import ConvertOptions
from convert.pool import Feed, InOrder, Watcher, Work
from convert.prepare import dry_run
from convert.quality import Quality
from convert.run import Summary
from tests.checkpoints import k3_config, kimi_linear_config, write_checkpoint
from tests.checkpoints.folder import shard_names

REPOSITORY = Path(__file__).parents[2]

# One dense layer with delta attention, one MoE layer of each attention; embedding, head and the dense MLP are
# just large enough to be quantised.
_TEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "linear_attn_config": {"num_heads": 2, "head_dim": 16},
}
_VISION = {
    "vt_num_hidden_layers": 1,
    "vt_hidden_size": 32,
    "mm_hidden_size": 32,
    "qkv_hidden_size": 48,
    "vt_intermediate_size": 64,
}
EMBEDDING = "language_model.model.embed_tokens.weight"
EXPERT = "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"


def small_k3(**overrides: Any) -> dict[str, Any]:
    """A K3 config of 3 layers and 4 experts; jobs: L0 (dense), L1, L2, and what is outside the layers."""
    k3 = {"q_lora_rank": 32, "routed_expert_hidden_size": 64, "vision_config": _VISION}
    return k3_config(**(_TEXT | k3 | overrides))


def small_kimi_linear(**overrides: Any) -> dict[str, Any]:
    """A Kimi-Linear config of the same size."""
    return kimi_linear_config(**(_TEXT | {"head_dim": 16} | overrides))


def write_small(
    folder: Path, tensors: Mapping[str, NDArray[Any]] | None = None, *, shards: int = 3, **overrides: Any
) -> Path:
    """Write the small K3 checkpoint, with `tensors` in place of its own when given."""
    return write_checkpoint(folder, small_k3(**overrides), tensors, n_shards=shards)


def convert_here(source: Path, output: Path, **options: Any) -> tuple[Summary, str]:
    """A conversion whose workers are real processes: its summary and what it said. Fast, unless told otherwise."""
    stream = io.StringIO()
    options = {"quality": Quality.FAST, **options}
    return convert.run.convert(ConvertOptions(source=source, output=output, **options), stream), stream.getvalue()


def dry_run_here(source: Path, output: Path, **options: Any) -> dict[str, Any]:
    """The plan of a conversion of a local folder, during which nothing is said."""
    stream = io.StringIO()
    plan = dry_run(ConvertOptions(source=source, output=output, **options), stream)
    assert stream.getvalue() == ""
    return plan


@dataclass(frozen=True)
class Converted:
    """A small checkpoint and its container."""

    config: dict[str, Any] = field(repr=False)
    source: Path
    output: Path
    summary: Summary
    log: str
    files: dict[str, bytes] = field(repr=False)


def converted(folder: Path, config: dict[str, Any]) -> Converted:
    """Write a checkpoint into `folder` and convert it with one worker."""
    source = write_checkpoint(folder / "checkpoint", config)
    output = folder / "container"
    summary, log = convert_here(source, output, workers=1)
    return Converted(config, source, output, summary, log, contents(output))


def serial_work(work: Work[Any, Any], watcher: Watcher[Any], *, n_workers: int, feed: Feed | None = None) -> None:
    """Stands in for `run_work`: every task in this process, one by one."""
    feed = feed or InOrder(len(work.tasks))
    for _ in work.tasks:
        while (number := feed.take()) is None:
            time.sleep(0.01)
        outcome = work.function(work.tasks[number], lambda n_done: None)
        watcher.tick([0] * len(work.tasks))
        feed.finished(number)
        watcher.done(number, outcome)


def run_cli(*arguments: str | Path, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """`python -m convert` as a user runs it, its output captured; fast, unless told otherwise."""
    return subprocess.run(
        [sys.executable, "-m", "convert", "--quality", "fast", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def comparable(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What of a container's files equal conversions have in common, byte for byte: all but the seconds they took.

    report.json is taken without them; report.html draws them into its plots, so of it only the name is kept.
    """
    found = dict(files)
    if "report.json" in found:
        report = json.loads(found["report.json"])
        assert report.pop("seconds")
        assert report.pop("origin")
        found["report.json"] = json.dumps(report, indent=1).encode()
    if "report.html" in found:
        assert found["report.html"].endswith(b"</html>\n")
        found["report.html"] = b""
    return found


def differences(files: Mapping[str, bytes], expected: Mapping[str, bytes]) -> list[str]:
    """Names of the files in which two containers differ."""
    one, other = comparable(files), comparable(expected)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def assert_same(folder: Path, expected: Mapping[str, bytes]) -> None:
    """The folder holds exactly the `expected` files, byte for byte but for the seconds in the reports."""
    different = differences(contents(folder), expected)
    assert not different, f"{folder}: {', '.join(different)}"


def edit_json(path: Path, change: Any) -> None:
    """Rewrite a JSON file: `change` gets its value and alters it in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def shard_of(folder: Path, tensor: str) -> Path:
    """The shard that holds `tensor`."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(index["weight_map"][tensor])


def edit_header(shard: Path, change: Any, *, data: bytes | None = None) -> None:
    """Rewrite a shard's JSON header (and, when given, its data); offsets inside the data stay as they are."""
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + (raw[8 + length :] if data is None else data))


def small_shard_names() -> list[str]:
    """The small checkpoint's shards."""
    return shard_names(small_k3(), 3)


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """‖found − wanted‖ / ‖wanted‖ in f64."""
    wanted64 = wanted.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - wanted64) / np.linalg.norm(wanted64))
