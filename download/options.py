"""What the user chose, checked once; the rest of the package trusts it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from container.errors import UsageError
from download.retry import Patience

MAX_JOBS = 64


class Check(Enum):
    """How far an audit looks."""

    SIZE = "size"
    SHA256 = "sha256"


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """One download, dry run or audit. Everything but the repository may change between resumed runs."""

    repository: str  # ORG/NAME
    folder: Path
    revision: str | None = None  # None: main
    jobs: int = 4  # files at once
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dry_run: bool = False
    check: Check | None = None
    min_free_gb: float = 1.0  # to stay free on the disk, in 10⁹ bytes
    max_rate_mb: float | None = None  # in 10⁶ bytes a second, all files together; None: as fast as it comes
    endpoint: str | None = None  # None: HF_ENDPOINT, or huggingface.co
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if not 1 <= self.jobs <= MAX_JOBS:
            raise UsageError(f"--jobs must be from 1 to {MAX_JOBS}, found {self.jobs}")
        if not (math.isfinite(self.min_free_gb) and self.min_free_gb >= 0):
            raise UsageError(f"--min-free must be a number of GB, 0 or more, found {self.min_free_gb}")
        if self.max_rate_mb is not None and not (math.isfinite(self.max_rate_mb) and self.max_rate_mb > 0):
            raise UsageError(f"--max-rate must be a number of MB/s above 0, found {self.max_rate_mb}")
        if self.revision == "":
            raise UsageError("--revision is empty; give a branch, a tag or a commit, or leave it out")
        if self.dry_run and self.check:
            raise UsageError("--dry-run and --check exclude each other: neither fetches anything")

    @property
    def min_free_bytes(self) -> int:
        """Bytes to stay free on the disk."""
        return int(self.min_free_gb * 1e9)

    @property
    def max_bytes_per_second(self) -> float | None:
        """Bound of all transfers together."""
        return None if self.max_rate_mb is None else self.max_rate_mb * 1e6
