"""usage.waste: how often each expert was used (docs/FORMAT.md). A hint for caches; no result depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from container.errors import FormatError
from container.layout import USAGE_ENTRY, USAGE_HEADER, USAGE_MAGIC, USAGE_NAME, USAGE_VERSION
from container.publish import publish_bytes

Counts = npt.NDArray[np.int64]

_ENTRY = np.dtype(
    [("layer", "<u2"), ("expert", "<u2"), ("hits", "<u4"), ("last_seen", "<u4"), ("next_layer_top", "<u4")]
)
_MOST_U32, _MOST_I64 = 2**32 - 1, 2**63 - 1


@dataclass(frozen=True)
class Usage:
    """Uses of the experts of `layers`, counted over `n_tokens` tokens."""

    layers: Sequence[int]  # MoE layers, ascending
    n_tokens: int
    hits: Counts  # [layers, experts]: tokens that used the expert
    last_seen: Counts  # [layers, experts]: tokens counted when it was last used; 0 for one that never was

    def pack(self) -> bytes:
        """The file's bytes: an entry per expert that was used; counts beyond u32 are written as the largest u32."""
        positions, experts = np.nonzero(self.hits)
        entries = np.zeros(len(positions), dtype=_ENTRY)
        entries["layer"] = np.asarray(self.layers, dtype=np.int64)[positions]
        entries["expert"] = experts
        entries["hits"] = np.minimum(self.hits[positions, experts], _MOST_U32)
        entries["last_seen"] = np.minimum(self.last_seen[positions, experts], _MOST_U32)
        return USAGE_HEADER.pack(USAGE_MAGIC, USAGE_VERSION, self.n_tokens) + entries.tobytes()

    @classmethod
    def unpack(cls, data: bytes, layers: Sequence[int], n_experts: int, *, source: str) -> Usage:
        """Read a file's bytes. Raises FormatError when they are no counts of these layers and experts."""
        if len(data) < USAGE_HEADER.size:
            raise FormatError(f"{source}: {len(data)} bytes are too few for a header ({USAGE_HEADER.size})")
        magic, version, n_tokens = USAGE_HEADER.unpack_from(data)
        for what, found, expected in (("magic", magic, USAGE_MAGIC), ("version", version, USAGE_VERSION)):
            if found != expected:
                raise FormatError(f"{source}: {what} is {found:#x}, expected {expected:#x}")
        n_entries, rest = divmod(len(data) - USAGE_HEADER.size, USAGE_ENTRY.size)
        if rest:
            raise FormatError(f"{source}: {rest} bytes follow the last whole entry")
        entries = np.frombuffer(data, dtype=_ENTRY, count=n_entries, offset=USAGE_HEADER.size)
        rows = np.searchsorted(np.asarray(layers, dtype=np.int64), entries["layer"])
        experts = entries["expert"].astype(np.int64)
        known = np.isin(entries["layer"], layers) & (experts < n_experts)
        if not known.all():
            entry = entries[int(known.argmin())]
            raise FormatError(f"{source}: layer {entry['layer']} expert {entry['expert']} is none of this model's")
        if len(np.unique(rows * n_experts + experts)) != n_entries:
            raise FormatError(f"{source}: an expert has two entries")
        hits, last_seen = np.zeros((2, len(layers), n_experts), dtype=np.int64)
        hits[rows, experts], last_seen[rows, experts] = entries["hits"], entries["last_seen"]
        return cls(layers, min(n_tokens, _MOST_I64), hits, last_seen)


def read_usage(folder: Path, layers: Sequence[int], n_experts: int) -> Usage | None:
    """The counts in a container's folder; None when there are none.

    Raises FormatError for a file that cannot be read or holds something else; one that is too large is not read.
    """
    path = folder / USAGE_NAME
    most_bytes = USAGE_HEADER.size + USAGE_ENTRY.size * len(layers) * n_experts
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise FormatError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > most_bytes:
        raise FormatError(f"{path}: at most {most_bytes} bytes expected for this model, found more")
    return Usage.unpack(data, layers, n_experts, source=str(path))


def write_usage(folder: Path, usage: Usage) -> None:
    """Publish the counts. Raises OSError as the system does."""
    publish_bytes(folder / USAGE_NAME, usage.pack())
