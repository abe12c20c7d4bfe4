"""What a container was made of and by: the manifest's `provenance` and a build's identity.

Only facts that decide the bytes stand here, no times, no paths and no places, so that equal inputs give equal
manifests: the same weights are the same source wherever they came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from container.checkpoint import CONFIG_NAME, Checkpoint
from container.fingerprint import ShardFingerprint, file_fingerprint
from convert.device import CPU
from convert.options import ConvertOptions
from download.ledger import Ledger, Origin

TOOL = "moedock"
# Libraries whose version can change the bytes of any conversion.
LIBRARIES = ("faiss-cpu", "numba", "numpy")


def provenance(
    checkpoint: Checkpoint, options: ConvertOptions, known: Mapping[str, ShardFingerprint] | None = None
) -> dict[str, Any]:
    """The identity of a conversion. A shard whose fingerprint is `known` need not be there."""
    shards = {}
    for name in checkpoint.shard_names:
        found = (known or {}).get(name) or file_fingerprint(checkpoint.folder / name, checkpoint.shard(name))
        shards[name] = found.to_json()
    return {
        "tool": {"name": TOOL, "version": version(TOOL)},
        "libraries": {name: version(name) for name in libraries(options.device)},
        "options": options.shaping,
        "source": {
            "config_sha256": hashlib.sha256((checkpoint.folder / CONFIG_NAME).read_bytes()).hexdigest(),
            "shards": shards,
        },
    }


def libraries(device: str) -> tuple[str, ...]:
    """Libraries whose version can change the bytes of a conversion on `device`."""
    return LIBRARIES if device == CPU else (*LIBRARIES, "torch")


def origin_of(folder: Path, ledger: Ledger) -> Origin:
    """Where a folder was filled from, as far as it tells: by its ledger, or as huggingface_hub leaves folders.

    A cache snapshot lies at models--ORG--NAME/snapshots/REVISION; a download into a local folder leaves the
    revision in the first line of .cache/huggingface/download/config.json.metadata.
    """
    if ledger.origin is not None:
        return ledger.origin
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return Origin(resolved.parent.parent.name.removeprefix("models--").replace("--", "/"), resolved.name)
    record = resolved / ".cache" / "huggingface" / "download" / f"{CONFIG_NAME}.metadata"
    lines = record.read_text(errors="replace").splitlines() if record.is_file() else []
    return Origin(None, lines[0].strip() if lines else None)


def version(distribution: str) -> str:
    """Version of an installed distribution, or "unknown" when it runs from a plain folder."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
