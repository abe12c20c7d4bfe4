"""A small checkpoint on the loopback hub, ways to download it, and comparison of what lies on disk."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from download.options import DownloadOptions
from download.run import Summary, download
from tests.download.served import HASTE, REPOSITORY
from tests.hub import HubServer

ROOT = Path(__file__).parents[2]
N_SHARDS = 3
SHARDS = tuple(f"model-{n:05d}-of-{N_SHARDS:05d}.safetensors" for n in range(1, N_SHARDS + 1))
INDEX = "model.safetensors.index.json"


def index_of(shards: Mapping[str, Any] | tuple[str, ...]) -> bytes:
    """An index with one tensor for each shard."""
    return json.dumps({"metadata": {}, "weight_map": {f"t{n}": name for n, name in enumerate(shards)}}).encode()


def model_files(seed: int = 0, shard_bytes: int = 50_000) -> dict[str, bytes]:
    """What a conversion needs of the repository; the shards are noise, for nobody looks into them here."""
    rng = random.Random(seed)
    return {
        "config.json": b'{"model_type": "kimi_k3"}',
        "README.md": b"# a model\n",
        "tiktoken.model": rng.randbytes(500),
        "tokenizer_config.json": b"{}" * 10,
        INDEX: index_of(SHARDS),
        **{name: rng.randbytes(shard_bytes + n) for n, name in enumerate(SHARDS)},
    }


# In the repository too, and not needed
OTHER_FILES = {
    "figures/plot.png": b"png",
    "original/consolidated.safetensors": b"other weights",
    "model.gguf": b"weights again",
    "empty.txt": b"",
}
NEEDED_OTHERS = {"empty.txt": b""}


def serve(hub: HubServer, files: Mapping[str, bytes] | None = None, repository: str = REPOSITORY, **kind: bool) -> None:
    """Put the small checkpoint, or other files, on the hub."""
    hub.add(repository, {**model_files(), **OTHER_FILES} if files is None else files, **kind)


def wanted_files() -> dict[str, bytes]:
    """What a download of the small checkpoint leaves."""
    return {**model_files(), **NEEDED_OTHERS}


def options_for(hub: HubServer, folder: Path, **options: Any) -> DownloadOptions:
    """Options for a download from the loopback hub, impatient unless told otherwise."""
    return DownloadOptions(
        **{"repository": REPOSITORY, "folder": folder, "endpoint": hub.endpoint, "patience": HASTE, **options}
    )


def download_here(hub: HubServer, folder: Path, **options: Any) -> tuple[Summary, str]:
    """A download in this process: its summary and what it said."""
    stream = io.StringIO()
    return download(options_for(hub, folder, **options), stream), stream.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` but our own state, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".moedock" not in path.parts
    }


def environment(hub: HubServer | None, home: Path, **extra: str) -> dict[str, str]:
    """For the command: this hub, and nobody's token."""
    endpoint = {} if hub is None else {"HF_ENDPOINT": hub.endpoint}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return {**clean, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **endpoint, **extra}


def run_cli(
    hub: HubServer | None, home: Path, *arguments: str | Path, **extra: str
) -> subprocess.CompletedProcess[str]:
    """`python -m download` as a user runs it, its output captured; `extra` goes into the environment."""
    return subprocess.run(
        [sys.executable, "-m", "download", *map(str, arguments)],
        cwd=ROOT,
        env=environment(hub, home, **extra),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
