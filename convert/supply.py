"""Where a conversion's shards come from and go to: what `convert.run` asks of a local folder or of a repository."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TextIO

from container.checkpoint import Checkpoint
from container.fingerprint import ShardFingerprint
from container.lock import held_lock
from convert.local_supply import LocalSupply
from convert.options import ConvertOptions, Reclaim
from convert.order import Needs
from convert.staged_supply import looked_at_hub, staged_supply
from download.folder import SourceFolder
from download.ledger import Origin


class Supply(Protocol):
    """The shards of one checkpoint, for as long as the conversion runs."""

    checkpoint: Checkpoint
    origin: Origin
    gives_back: bool  # shards go when they are not needed any more: outputs are proved before
    fetches: bool  # shards come by themselves: none need be here at first

    @property
    def fingerprints(self) -> Mapping[str, ShardFingerprint]:
        """Of shards that may be gone, or not here yet."""

    @property
    def shard_bytes(self) -> Mapping[str, int]:
        """Sizes of all shards that are known."""

    @property
    def held(self) -> frozenset[str]:
        """Shards that take room in the folder now."""

    def problems(self, needs: Needs) -> list[str]:
        """What stands against supplying `needs`, which are those of all unfinished jobs."""

    def notes(self, needs: Needs) -> list[str]:
        """What a dry run should say about it."""

    def most_jobs(self, needs: Needs) -> int | None:
        """How many of these jobs can have their shards at once; None for all."""

    def room(self, needs: Needs, missing_bytes: int, growth_bytes: int) -> int:
        """Bytes that must be free at the output, where `missing_bytes` are still to be written.

        `growth_bytes`: what that comes to where shards on the same disk go meanwhile. `needs`: of unfinished jobs.
        """

    def begin(self, needs: Needs, wanted: list[str]) -> list[str]:
        """Work begins: the order of the `wanted` jobs. `needs`: of all unfinished ones. Raises SourceError."""

    def here(self, shard: str) -> bool:
        """True when jobs can read the shard."""

    def give_back(self, shard: str) -> None:
        """No unfinished job needs the shard."""

    def failure(self) -> Exception | None:
        """Why no more shards will come."""

    def news(self) -> list[str]:
        """What happened since the last call, in words."""


@contextmanager
def open_supply(options: ConvertOptions, stream: TextIO) -> Iterator[Supply]:
    """The supply that the options ask for. Raises SourceError, DownloadError; BusyError for a folder in use."""
    if options.remote is not None:
        with staged_supply(options, options.remote, stream) as staged:
            yield staged
    elif options.reclaim is Reclaim.ON and os.access(options.source, os.W_OK):
        with held_lock(SourceFolder(options.source).lock, "a download or another conversion"):
            yield LocalSupply(options)
    else:
        yield LocalSupply(options)


@contextmanager
def looked_at(options: ConvertOptions, stream: TextIO) -> Iterator[Supply]:
    """The supply for a dry run: takes no lock, writes nothing where the user would find it."""
    if options.remote is not None:
        with looked_at_hub(options, options.remote, stream) as staged:
            yield staged
    else:
        yield LocalSupply(options)
