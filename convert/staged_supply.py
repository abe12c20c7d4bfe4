"""A repository on the hub as a conversion's supply: shards come as jobs need them, and go when they are done with."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from container.checkpoint import Checkpoint
from container.errors import DownloadError, SourceError
from container.fingerprint import ShardFingerprint
from container.lock import held_lock
from container.machine import free_disk, same_disk
from container.progress import size
from convert.options import ConvertOptions, Remote
from convert.order import Needs, job_order, least_staging, shard_order
from download.folder import STATE_FOLDER, SourceFolder
from download.headers import fetch_headers, kept_headers
from download.ledger import Ledger, Origin
from download.mirror import Mirror
from download.options import DownloadOptions
from download.run import disk_error
from download.selection import index_file
from download.session import opened
from download.staging import STAYS_FREE_BYTES, Staging


class StagedSupply:
    """The shards of one commit, in a staging folder that holds `--staging-size` of them at most."""

    fetches = True
    gives_back = True

    def __init__(self, options: ConvertOptions, mirror: Mirror, staging: Staging) -> None:
        folder = mirror.folder
        names = [file.name for file in mirror.shards()]
        self._options = options
        self._mirror = mirror
        self._staging = staging
        self.checkpoint = Checkpoint.open(folder.folder, kept_headers(folder, mirror.ledger, names))
        self.origin = mirror.origin

    @property
    def fingerprints(self) -> Mapping[str, ShardFingerprint]:
        """As the ledger has them."""
        return self._mirror.ledger.sampled

    @property
    def shard_bytes(self) -> Mapping[str, int]:
        """As the hub lists them."""
        return {file.name: file.n_bytes for file in self._mirror.shards()}

    @property
    def held(self) -> frozenset[str]:
        """Staged shards, whole or in part."""
        return self._staging.held

    def problems(self, needs: Needs) -> list[str]:
        """A staging folder that is too small for one job's shards, or on a disk that is too small for it."""
        problems = self._bound_problems(needs, list(needs.shards))
        folder, free = self._options.source, free_disk(self._options.source)  # in a dry run not the mirror's
        if not same_disk(folder, self._options.output) and free < self._growth(needs):
            problems.append(f"disk: {size(self._growth(needs))} needed at {folder} for staging, {size(free)} free")
        return problems

    def _order(self, needs: Needs, wanted: list[str]) -> tuple[list[str], frozenset[str]]:
        """(order of the jobs, staged shards that are kept for it): none where what lies there is in the way."""
        order = job_order(needs, wanted, self.held)
        if least_staging(needs, order, self.held)[0] <= self._options.staging_bytes:
            return order, self.held & needs.all_shards
        return job_order(needs, wanted, frozenset()), frozenset()

    def _bound_problems(self, needs: Needs, wanted: list[str]) -> list[str]:
        least, job = least_staging(needs, *self._order(needs, wanted))
        if least <= self._options.staging_bytes:
            return []
        return [
            f"--staging-size {_decimal(self._options.staging_bytes)}: too small, {_decimal(least)} of shards must "
            f"be there at once for {job}; with room for one more shard, fetching and converting overlap"
        ]

    def _growth(self, needs: Needs) -> int:
        """Bytes by which the staging folder may still grow."""
        most = min(self._options.staging_bytes, needs.n_bytes(needs.all_shards | self.held))
        return max(0, most - self._staging.bytes_on_disk) + 2 * STAYS_FREE_BYTES

    def notes(self, needs: Needs) -> list[str]:
        """What would be fetched, and what staging takes."""
        least, _ = least_staging(needs, *self._order(needs, list(needs.shards)))
        shards = needs.all_shards
        return [
            f"{len(shards)} shards, {size(needs.n_bytes(shards))}, would come from {self.origin.repository} at "
            f"{str(self.origin.revision)[:12]}",
            f"staging needs {_decimal(least)} at least, and may take {_decimal(self._options.staging_bytes)}",
        ]

    def most_jobs(self, needs: Needs) -> int | None:
        """As many as the staging folder holds shards for, with room for one more job's shards to come meanwhile."""
        largest = max(map(needs.n_bytes, needs.shards.values()), default=0)
        return max(1, self._options.staging_bytes // max(1, largest) - 1)

    def room(self, needs: Needs, missing_bytes: int, growth_bytes: int) -> int:
        """On the staging folder's disk, its own growth too."""
        shared = same_disk(self._options.source, self._options.output)
        return missing_bytes + (self._growth(needs) if shared else 0)

    def begin(self, needs: Needs, wanted: list[str]) -> list[str]:
        """Start fetching."""
        problems = self._bound_problems(needs, wanted)
        if problems:
            raise SourceError("\n".join(problems))
        order, kept = self._order(needs, wanted)
        self._staging.begin(shard_order(needs, order), self.held - kept)
        return order

    def here(self, shard: str) -> bool:
        """True when the shard is whole and proved."""
        return self._staging.here(shard)

    def give_back(self, shard: str) -> None:
        """Delete it from the staging folder."""
        self._staging.give_back(shard)

    def failure(self) -> Exception | None:
        """Why no more shards come."""
        return self._staging.failure()

    def news(self) -> list[str]:
        """Shards that came and went."""
        return self._staging.news()


@contextmanager
def staged_supply(options: ConvertOptions, remote: Remote, stream: TextIO) -> Iterator[StagedSupply]:
    """The supply of a repository; its config, tokenizer and the shards' headers are fetched now.

    Raises DownloadError; SourceError for a staging folder that holds something else; BusyError for one in use.
    """
    folder = SourceFolder(options.source)
    _require_staging(folder)
    download = DownloadOptions(repository=remote.repository, folder=options.source, revision=remote.revision)
    with opened(download, stream) as session, held_lock(folder.lock, "another conversion or a download"):
        mirror = session.mirror(_pinned(remote, folder))
        _require_same(mirror.origin, folder)
        try:
            mirror.ledger.say_staging()
            mirror.ledger.say_source(mirror.origin)
            mirror.fetch_small_files()
            fetch_headers(mirror, session.transfer, stream)
        except OSError as error:
            raise disk_error(error, download) from error
        staging = Staging(mirror, session.transfer, options.staging_bytes, options.output)
        try:
            yield StagedSupply(options, mirror, staging)
        finally:
            staging.close()


@contextmanager
def looked_at_hub(options: ConvertOptions, remote: Remote, stream: TextIO) -> Iterator[StagedSupply]:
    """The supply for a dry run: what is needed to plan lands in a folder that vanishes. Raises as `staged_supply`."""
    folder = SourceFolder(options.source)
    _require_staging(folder)
    with tempfile.TemporaryDirectory() as temporary:
        download = DownloadOptions(repository=remote.repository, folder=Path(temporary), revision=remote.revision)
        with opened(download, stream) as session:
            mirror = session.mirror(_pinned(remote, folder))
            _require_same(mirror.origin, folder)
            mirror.fetch_small_files()
            if index_file(mirror.listing) is None:  # the only shard's header is the index
                fetch_headers(mirror, session.transfer, stream)
            yield StagedSupply(options, mirror, Staging(mirror, session.transfer, 0, options.output))


def _require_staging(folder: SourceFolder) -> None:
    """Whatever lies in a staging folder may be deleted: it must have been made for that."""
    if folder.folder.exists() and not folder.folder.is_dir():
        raise SourceError(f"staging {folder.folder}: is not a folder")
    ledger = Ledger(folder.ledger)
    if ledger.is_staging or not folder.folder.exists():
        return
    other = sorted(path.name for path in folder.folder.iterdir() if path.name != STATE_FOLDER)
    if other or ledger.origin is not None:
        raise SourceError(
            f"staging {folder.folder}: holds {', '.join(other[:3]) or 'a download'} and was not made by a conversion, "
            "which would delete shards in it; choose an empty folder, or convert the folder itself with --reclaim on"
        )


def _pinned(remote: Remote, folder: SourceFolder) -> str | None:
    """The commit that this staging folder was begun with, unless another revision is asked for."""
    begun = Ledger(folder.ledger).origin
    if begun is not None and begun.repository != remote.repository:
        raise SourceError(f"staging {folder.folder}: belongs to {begun.repository}; choose another folder")
    return remote.revision or (begun.revision if begun else None)


def _require_same(now: Origin, folder: SourceFolder) -> None:
    begun = Ledger(folder.ledger).origin
    if begun is not None and begun != now:
        raise DownloadError(
            f"staging {folder.folder}: begun with commit {begun.revision}, but the revision asked for is now "
            f"{now.revision}; leave the revision away to go on with the first, or choose another staging folder and OUT"
        )


def _decimal(n_bytes: int) -> str:
    """As --staging-size takes it: rounded up, so that the size that is said to be needed is enough."""
    unit, scale = ("GB", 10**6) if n_bytes >= 10**9 else ("MB", 10**3)
    return f"{math.ceil(n_bytes / scale) / 1e3:g} {unit}"
