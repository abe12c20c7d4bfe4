"""One file of a repository, from wherever its part stands to the proved file at its final place."""

from __future__ import annotations

from collections.abc import Callable

from container.errors import TransferError
from download.folder import SourceFolder
from download.hashing import Digests, difference
from download.ledger import Proof
from download.listing import RemoteFile
from download.part import Part
from download.transfer import Stopped, Transfer, Wanted

GUARD_BYTES = 64 << 20
MOST_WRONG = 2  # times that a file is fetched from its first byte and has another checksum

Told = Callable[[int], None]


def unguarded(_: int) -> None:
    """The guard that lets everything pass."""


def fetch_file(
    transfer: Transfer,
    url: str,
    file: RemoteFile,
    folder: SourceFolder,
    *,
    progress: Told,
    guard: Told = unguarded,
) -> Proof:
    """Fetch a file, or the rest of it, and put it at its final place once its checksum is right.

    `progress` is told how many bytes of the file are on disk and hashed (fewer after a restart); `guard`, before the
    first byte and every 64 MiB, how many are missing: it may raise. Raises HubError, TransferError, Stopped, and
    OSError as the disk does; the part stays for the next run, but after a TransferError for a wrong checksum.
    """
    n_wrong = 0
    while True:
        with Part(folder, file) as part, Digests(None if file.sha256 else file.n_bytes) as digests:
            sink = _HashedPart(part, digests, file, progress, guard)
            from_start = part.have == 0
            sink.hash_present(transfer)
            if sink.have < file.n_bytes:
                guard(file.n_bytes - sink.have)
            transfer.pull(url, Wanted(total=file.n_bytes), sink, file.name)
            sha256, git_sha1 = digests.finish()
            wrong = difference(file, sha256, git_sha1)
            if wrong is None:
                part.publish()
                return Proof(file.name, file.n_bytes, sha256)
            part.remove()
        n_wrong += from_start or sink.restarted
        if n_wrong == MOST_WRONG:
            raise TransferError(
                f"{file.name}: {wrong}, twice in a row; what was fetched is removed. Run the command again; "
                "if that does not help, the repository, a proxy or this machine's memory damages it"
            )


class _HashedPart:
    """The sink of a transfer: what is kept in the part is hashed too."""

    def __init__(self, part: Part, digests: Digests, file: RemoteFile, progress: Told, guard: Told) -> None:
        self._part = part
        self._digests = digests
        self._file = file
        self._progress = progress
        self._guard = guard
        self._unguarded_bytes = 0
        self.restarted = False

    @property
    def have(self) -> int:
        return self._part.have

    @property
    def etag(self) -> str | None:
        return self._part.etag

    def hash_present(self, transfer: Transfer) -> None:
        """Take up what an earlier run has left."""
        n_hashed = 0
        for block in self._part.blocks():
            if transfer.stop.is_set():
                raise Stopped
            self._digests.update(block)
            n_hashed += len(block)
            self._progress(n_hashed)

    def begin(self, etag: str | None) -> None:
        self._part.belongs_to(etag)

    def take(self, block: bytes) -> None:
        self._part.append(block)
        self._digests.update(block)
        self._progress(self.have)
        self._unguarded_bytes += len(block)
        if self._unguarded_bytes >= GUARD_BYTES:
            self._unguarded_bytes = 0
            self._guard(self._file.n_bytes - self.have)

    def restart(self) -> None:
        self._part.empty()
        self._digests.restart()
        self._progress(0)
        self.restarted = True
