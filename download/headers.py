"""Headers and fingerprints of shards, kept beside the ledger: what is known of shards that are not here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from container.checkpoint import Checkpoint
from container.errors import DownloadError, ShardError
from container.fingerprint import ShardFingerprint, file_fingerprint, fingerprint
from container.publish import publish_bytes, sync_folder
from container.shards import LENGTH, ShardHeader, header_size, parse_shard_header
from download.crew import HaltError, Job, work_through
from download.folder import SourceFolder
from download.ledger import Ledger
from download.listing import RemoteFile
from download.mirror import Mirror
from download.transfer import Transfer

# One request brings most headers whole: K3's have 0.8 MB.
FIRST_BYTES = 1 << 20
CONNECTIONS = 8


def keep_header(folder: SourceFolder, ledger: Ledger, shard: str, raw: bytes, fingerprint: ShardFingerprint) -> None:
    """Keep a shard's bytes from its first to its first weight, and then its fingerprint."""
    folder.headers.mkdir(parents=True, exist_ok=True)
    publish_bytes(folder.header(shard), raw)
    ledger.say_sampled(shard, fingerprint)


def keep_headers_here(folder: SourceFolder, ledger: Ledger, checkpoint: Checkpoint) -> None:
    """Keep the headers of all shards that are here, unless they are kept already.

    Ledger and headers then survive a power cut by name, too: whichever run made their folders may have been killed
    before that.
    """
    kept = kept_headers(folder, ledger, checkpoint.shard_names)
    for shard in checkpoint.shard_names:
        path = folder.file(shard)
        if not checkpoint.has_shard(shard):
            continue
        header = checkpoint.shard(shard)
        found = file_fingerprint(path, header)
        if shard not in kept or ledger.sampled[shard] != found:
            keep_header(folder, ledger, shard, _first_bytes(path, header.data_offset), found)
    for each in (folder.headers, folder.state, folder.folder):
        if each.exists():
            sync_folder(each)


def fetch_headers(mirror: Mirror, transfer: Transfer, stream: TextIO) -> None:
    """Keep the header and fingerprint of every shard of a repository, without fetching the shards.

    Raises ShardError for a header that is none; DownloadError for the first that the hub does not give.
    """
    folder, ledger = mirror.folder, mirror.ledger
    kept = kept_headers(folder, ledger, (shard.name for shard in mirror.shards()))

    def fetch(shard: RemoteFile, progress: Callable[[int], None]) -> None:
        try:
            fetch_one(shard)
        except DownloadError as error:  # none may be absent: the others need not wait for a hub that is gone
            raise HaltError(str(error)) from error
        progress(shard.n_bytes)

    def fetch_one(shard: RemoteFile) -> None:
        path = folder.file(shard.name)
        start = mirror.read(shard, 0, min(FIRST_BYTES, shard.n_bytes))
        n_bytes = header_size(start[: LENGTH.size], shard.n_bytes, path)
        raw = start[:n_bytes] + mirror.read(shard, len(start), max(0, n_bytes - len(start)))
        parse_shard_header(raw, shard.n_bytes, path)
        found = fingerprint(raw, shard.n_bytes, lambda offset, count: mirror.read(shard, offset, count))
        keep_header(folder, ledger, shard.name, raw, found)

    missing = [shard for shard in mirror.shards() if shard.name not in kept]
    jobs = [Job(shard, shard.n_bytes - min(FIRST_BYTES, shard.n_bytes)) for shard in missing]
    work_through(
        jobs, fetch, n_threads=CONNECTIONS, stop=transfer.stop, stream=stream, title="reading the shards' headers"
    )


def kept_headers(folder: SourceFolder, ledger: Ledger, shards: Iterable[str]) -> dict[str, ShardHeader]:
    """Those of `shards` whose header and fingerprint are kept and whole."""
    headers = {}
    for shard in shards:
        if shard in ledger.sampled and folder.header(shard).is_file():
            raw = folder.header(shard).read_bytes()
            if hashlib.sha256(raw).hexdigest() != ledger.sampled[shard].header_sha256:
                continue  # damaged, or of another revision: as good as not kept
            try:
                headers[shard] = parse_shard_header(raw, ledger.sampled[shard].n_bytes, folder.file(shard))
            except ShardError:
                continue  # not the header of a file of that size
    return headers


def _first_bytes(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(n_bytes)
