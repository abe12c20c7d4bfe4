"""What tells one shard from another of the same shape without reading all of it: its header and samples of its weights.

A fingerprint needs 16 small reads, so it can be taken of a shard on a server too. It is no proof against damage:
that is a checksum's part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container.shards import ShardHeader

SAMPLE_PIECES = 16
SAMPLE_PIECE_BYTES = 4096

# (offset in the file, bytes) → those bytes
ReadRange = Callable[[int, int], bytes]


@dataclass(frozen=True)
class ShardFingerprint:
    """Size of a shard and digests of its header and of pieces spread over its weights."""

    n_bytes: int
    header_sha256: str
    sample_sha256: str

    def to_json(self) -> dict[str, Any]:
        """As manifests and ledgers hold it."""
        return {"bytes": self.n_bytes, "header_sha256": self.header_sha256, "sample_sha256": self.sample_sha256}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ShardFingerprint:
        """Raises KeyError or TypeError for anything but what `to_json` wrote."""
        found = cls(raw["bytes"], raw["header_sha256"], raw["sample_sha256"])
        if not (type(found.n_bytes) is int and isinstance(found.header_sha256 + found.sample_sha256, str)):
            raise TypeError("not a shard's fingerprint")
        return found


def sample_ranges(data_offset: int, file_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the pieces, evenly spread from `data_offset`, where a shard's weights begin, to its end."""
    n_bytes = file_bytes - data_offset
    offsets = [data_offset + n_bytes * n // SAMPLE_PIECES for n in range(SAMPLE_PIECES)]
    return [(offset, min(SAMPLE_PIECE_BYTES, file_bytes - offset)) for offset in offsets]


def fingerprint(header: bytes, file_bytes: int, read: ReadRange) -> ShardFingerprint:
    """The fingerprint of a shard of `file_bytes` whose first bytes, up to its weights, are `header`."""
    pieces = hashlib.sha256()
    for offset, n_bytes in sample_ranges(len(header), file_bytes):
        pieces.update(read(offset, n_bytes))
    return ShardFingerprint(file_bytes, hashlib.sha256(header).hexdigest(), pieces.hexdigest())


def file_fingerprint(path: Path, header: ShardHeader) -> ShardFingerprint:
    """The fingerprint of a shard on disk."""
    with path.open("rb") as file:

        def read(offset: int, n_bytes: int) -> bytes:
            file.seek(offset)
            return file.read(n_bytes)

        return fingerprint(read(0, header.data_offset), header.file_bytes, read)
