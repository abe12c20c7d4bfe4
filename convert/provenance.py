"""Where a container's weights come from and what made it: the manifest's `provenance` and a build's identity.

Only facts that decide the bytes stand here, no times and no paths, so that equal inputs give equal manifests.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from container.checkpoint import CONFIG_NAME, Checkpoint
from container.shards import ShardHeader
from convert.device import CPU
from convert.options import ConvertOptions

TOOL = "moedock"
# Libraries whose version can change the bytes of any conversion.
LIBRARIES = ("faiss-cpu", "numba", "numpy")
# Read from each shard to tell a source from another; 64 seeks a shard take a second even on a slow disk.
SAMPLE_PIECES = 64
SAMPLE_PIECE_BYTES = 4096


def provenance(checkpoint: Checkpoint, options: ConvertOptions) -> dict[str, Any]:
    """The identity of a conversion. Every shard must be there; their headers are read."""
    repository, revision = repository_of(checkpoint.folder)
    shards = {}
    for name in checkpoint.shard_names:
        header = checkpoint.shard(name)
        shards[name] = {"bytes": header.file_bytes, **_digests(header)}
    return {
        "tool": {"name": TOOL, "version": version(TOOL)},
        "libraries": {name: version(name) for name in libraries(options.device)},
        "options": options.shaping,
        "source": {
            "repository": repository,
            "revision": revision,
            "config_sha256": hashlib.sha256((checkpoint.folder / CONFIG_NAME).read_bytes()).hexdigest(),
            "shards": shards,
        },
    }


def libraries(device: str) -> tuple[str, ...]:
    """Libraries whose version can change the bytes of a conversion on `device`."""
    return LIBRARIES if device == CPU else (*LIBRARIES, "torch")


def repository_of(folder: Path) -> tuple[str | None, str | None]:
    """(repository, revision) of a folder that huggingface_hub made; None for what it does not tell.

    A cache snapshot lies at models--ORG--NAME/snapshots/REVISION; a download into a local folder leaves the
    revision in the first line of .cache/huggingface/download/config.json.metadata.
    """
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/"), resolved.name
    record = resolved / ".cache" / "huggingface" / "download" / f"{CONFIG_NAME}.metadata"
    if record.is_file():
        lines = record.read_text(errors="replace").splitlines()
        return None, lines[0].strip() if lines else None
    return None, None


def version(distribution: str) -> str:
    """Version of an installed distribution, or "unknown" when it runs from a plain folder."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _digests(header: ShardHeader) -> dict[str, str]:
    """Of the header, and of pieces spread over the weights: two models of one shape differ in nothing but these."""
    n_bytes = header.file_bytes - header.data_offset
    pieces = hashlib.sha256()
    with header.path.open("rb") as file:
        header_sha256 = hashlib.sha256(file.read(header.data_offset)).hexdigest()
        for n in range(SAMPLE_PIECES):
            file.seek(header.data_offset + n_bytes * n // SAMPLE_PIECES)
            pieces.update(file.read(SAMPLE_PIECE_BYTES))
    return {"header_sha256": header_sha256, "sample_sha256": pieces.hexdigest()}
