"""What the user chose, checked once; the rest of the converter trusts it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from container.byte_size import parse_bytes
from container.errors import UsageError, shown
from container.layout import VQ3R, ExpertQuant
from container.model import MAX_LAYERS
from convert.device import CPU, is_device, kind_of
from convert.quality import Quality

REMOTE_PREFIX = "hf://"


class Reclaim(Enum):
    """Whether a local checkpoint's shards are deleted once all that is made of them is safe."""

    OFF = "off"
    DRY = "dry"  # only say when they would be
    ON = "on"


@dataclass(frozen=True)
class Remote:
    """A repository on the hub."""

    repository: str  # ORG/NAME
    revision: str | None  # None: the one that the staging folder was begun with, or main


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """One conversion's options. `workers`, `layers`, `reclaim` and `dry_run` may change between resumed runs."""

    source: Path  # the checkpoint; for a remote one the staging folder
    output: Path
    remote: Remote | None = None
    staging_bytes: int = 60 * 10**9  # of shards in the staging folder at once
    workers: int | None = None  # None: as the machine allows
    layers: frozenset[int] | None = None  # None: all, and everything outside the layers
    seed: int = 0
    trunk_bits: int = 4
    quant: ExpertQuant = VQ3R
    quality: Quality = Quality.BALANCED
    device: str = CPU  # that searches the experts' codes
    reclaim: Reclaim = Reclaim.OFF
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers must be at least 1, found {self.workers}")
        if self.trunk_bits not in (4, 8):
            raise UsageError(f"--trunk-bits must be 4 or 8, found {self.trunk_bits}; 3-bit trunks collapse")
        if not 0 <= self.seed < 1 << 31:
            raise UsageError(f"--seed must be between 0 and {(1 << 31) - 1}, found {self.seed}")
        if self.layers is not None and not self.layers:
            raise UsageError("--layers names no layer")
        if self.remote is not None and self.reclaim is not Reclaim.OFF:
            raise UsageError("--reclaim is for local checkpoints; a staging folder is always given back")
        if not is_device(self.device):
            raise UsageError(f"--device must be cpu, cuda or cuda:N, found {shown(self.device)}")
        source, output = _resolved(self.source), _resolved(self.output)
        if source == output or source in output.parents or output in source.parents:
            name = "SRC" if self.remote is None else "--staging"
            raise UsageError(f"{name} {source} and OUT {output} must not lie inside each other")

    @property
    def shaping(self) -> dict[str, object]:
        """The options that decide the container's bytes, under their command-line names."""
        return {
            "seed": self.seed,
            "trunk_bits": self.trunk_bits,
            "format": self.quant.fmt.name,
            "quality": self.quality.value,
            "device": kind_of(self.device),
        }


def parse_remote(text: str) -> Remote | None:
    """The repository of `hf://ORG/NAME[@REVISION]`; None for anything that is no such address. Raises UsageError."""
    if not text.startswith(REMOTE_PREFIX):
        return None
    repository, at, revision = text.removeprefix(REMOTE_PREFIX).rstrip("/").partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or (at and not revision):
        raise UsageError(f"{shown(text)}: a repository is given as hf://ORG/NAME or hf://ORG/NAME@REVISION")
    return Remote(repository, revision or None)


def parse_size(text: str) -> int:
    """Bytes of the size of a staging folder. Raises UsageError."""
    return parse_bytes(text, "--staging-size")


def parse_layers(text: str) -> frozenset[int]:
    """Layer numbers of a list like `1-10,12`. Raises UsageError."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(map(_is_layer, numbers)) or int(numbers[1]) < int(numbers[0]):
            raise UsageError(f"--layers: {shown(part.strip())} is neither a layer number nor a range like 1-10")
        layers.update(range(int(numbers[0]), int(numbers[1]) + 1))
    return frozenset(layers)


def _is_layer(text: str) -> bool:
    """Digits, few enough that a mistyped range cannot fill the memory."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_LAYERS))


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise UsageError(f"{path}: cannot be followed ({error})") from None
