"""A folder that is being filled from one commit of a repository: what is there, what is missing, and how to get it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from container.checkpoint import MAX_JSON_BYTES, SINGLE_NAME
from container.errors import HubError, TransferError
from container.publish import publish_bytes
from container.shards import LENGTH, header_size, parse_shard_header
from download import selection
from download.fetch import MOST_WRONG, fetch_file
from download.folder import SourceFolder
from download.hashing import Digests, difference
from download.hub import Hub, say_nothing
from download.ledger import Ledger, Origin, Proof
from download.listing import Listing, RemoteFile
from download.transfer import Stopped, Transfer

READ_BYTES = 4 << 20

# (bytes of a file that are on disk now)
Progress = Callable[[int], None]
# (bytes of a file that are still missing): raises to stop
Guard = Callable[[int], None]


def no_progress(n_bytes: int) -> None:
    """Tell nobody."""


class Mirror:
    """Gets files of one commit into a folder and proves them. Threads may fetch different files at once.

    The caller holds the folder's lock while anything is fetched.
    """

    def __init__(self, listing: Listing, folder: SourceFolder, *, hub: Hub, transfer: Transfer, ledger: Ledger) -> None:
        self.listing = listing
        self.folder = folder
        self.ledger = ledger
        self._hub = hub
        self._transfer = transfer
        self._weight_map: dict[str, str] | None = None
        self._index: bytes | None = None  # read and proved before it was fetched
        self._reading = threading.Lock()

    @classmethod
    def open(
        cls,
        repository: str,
        revision: str | None,
        folder: SourceFolder,
        *,
        hub: Hub,
        transfer: Transfer,
        ledger: Ledger,
        say: Callable[[str], None] = say_nothing,
    ) -> Mirror:
        """Ask the hub what `revision` (None: main) holds now; `say` hears while it gives no answer. Writes nothing.

        Raises HubError, Stopped.
        """
        listing = hub.listing(repository, revision, stop=transfer.stop, patience=transfer.patience, say=say)
        return cls(listing, folder, hub=hub, transfer=transfer, ledger=ledger)

    @property
    def origin(self) -> Origin:
        """Repository and commit, for the ledger."""
        return Origin(self.listing.repository, self.listing.commit)

    def small_files(self) -> tuple[RemoteFile, ...]:
        """Everything needed beside the shards, smallest first. Raises HubError for what is no checkpoint."""
        return selection.small_files(self.listing)

    def shards(self) -> tuple[RemoteFile, ...]:
        """The needed shards in natural order of their names; reads the index. Raises HubError, TransferError."""
        if selection.index_file(self.listing) is None:
            return (self.listing.files[SINGLE_NAME],)
        return selection.shards(self.listing, self.index())

    def index(self, progress: Progress = no_progress) -> dict[str, str]:
        """Tensor → shard: from the folder's index where it is whole, else from the hub, without writing it.

        Of a checkpoint in one file its header tells. Raises HubError, TransferError; ShardError for that header.
        """
        with self._reading:
            if self._weight_map is None:
                file = selection.index_file(self.listing)
                if file is None:
                    self._weight_map = self._single_weight_map()
                else:
                    self._weight_map = selection.parse_index(self.listing, self._index_bytes(file, progress))
            return self._weight_map

    def read(
        self, file: RemoteFile, start: int = 0, n_bytes: int | None = None, progress: Progress = no_progress
    ) -> bytes:
        """Bytes of a file on the hub, not proved. Raises HubError, TransferError, Stopped."""
        if n_bytes is None:
            n_bytes = file.n_bytes - start
        return self._transfer.read_range(self._hub.url(self.listing, file.name), start, n_bytes, file.name, progress)

    def is_proved(self, file: RemoteFile) -> bool:
        """True when the ledger has the file as the hub lists it, and its size on disk agrees. Reads no content."""
        proof = self.ledger.proved.get(file.name)
        return (
            proof is not None
            # never so for a file listed by git's sha1: it is small, and read again
            and (proof.n_bytes, proof.sha256) == (file.n_bytes, file.sha256)
            and self.has_size(file)
        )

    def has_size(self, file: RemoteFile) -> bool:
        """True when a file of the listed size lies at the final place, whatever it holds."""
        path = self.folder.file(file.name)
        return path.is_file() and path.stat().st_size == file.n_bytes

    def is_given_back(self, file: RemoteFile) -> bool:
        """True when a conversion has deleted this very shard, all that it made of it being safe."""
        proof = self.ledger.proved.get(file.name)
        same = proof is None or file.sha256 in (None, proof.sha256)
        return same and file.name in self.ledger.reclaimed and not self.folder.file(file.name).exists()

    def part_bytes(self, file: RemoteFile) -> int:
        """Bytes that a part of the file takes on disk."""
        part = self.folder.part(file.name)
        return min(part.stat().st_size, file.n_bytes) if part.is_file() else 0

    def present(self, file: RemoteFile, progress: Progress = no_progress) -> Proof | None:
        """Proof of the file where it lies whole and right at its final place, read through unless the ledger has it.

        Raises Stopped.
        """
        if self.is_proved(file):
            progress(file.n_bytes)
            return self.ledger.proved[file.name]
        if not self.has_size(file):
            return None
        return self.prove(file, progress)[0]

    def prove(self, file: RemoteFile, progress: Progress = no_progress) -> tuple[Proof | None, str | None]:
        """Read the file at its final place through: (proof, None), or (None, what is wrong). Writes nothing.

        What is proved is on the disk: whoever wrote the file may have left that to the system. Raises Stopped, OSError.
        """
        with self.folder.file(file.name).open("rb", buffering=0) as opened:
            os.fsync(opened.fileno())
            return self._proof_of(file, iter(lambda: opened.read(READ_BYTES), b""), progress)

    def fetch(self, file: RemoteFile, progress: Progress = no_progress, guard: Guard = no_progress) -> Proof:
        """Get the file whole and right to its final place, from where it stands now, and note that in the ledger.

        `progress` is told how many of its bytes are on disk, `guard` from time to time how many are missing: it may
        raise. Raises HubError, TransferError, Stopped, OSError.
        """
        proof = self.present(file, progress)
        if proof is not None:
            self.folder.part(file.name).unlink(missing_ok=True)
            self.folder.part_facts(file.name).unlink(missing_ok=True)
        elif self._index is not None and file == selection.index_file(self.listing):
            guard(file.n_bytes)
            publish_bytes(self.folder.file(file.name), self._index)
            proof, _ = self._proof_of(file, [self._index], progress)
            assert proof is not None  # it was right when it was read
            self._index = None
        else:
            url = self._hub.url(self.listing, file.name)
            proof = fetch_file(self._transfer, url, file, self.folder, progress=progress, guard=guard)
        self.note(proof)
        return proof

    def note(self, proof: Proof) -> None:
        """Put a proof into the ledger, unless it is there."""
        if self.ledger.proved.get(proof.name) != proof:
            self.ledger.say_proved(proof)

    def fetch_small_files(self) -> None:
        """Get everything needed beside the shards. Raises as `fetch` does."""
        for file in self.small_files():
            self.fetch(file)

    def _index_bytes(self, file: RemoteFile, progress: Progress) -> bytes:
        if self.present(file, progress) is not None:
            return self.folder.file(file.name).read_bytes()
        if file.n_bytes > MAX_JSON_BYTES:
            raise HubError(f"{self.listing.repository}: {file.name} has {file.n_bytes} bytes, too many for an index")
        for _ in range(MOST_WRONG):
            data = self.read(file, progress=progress)
            _, wrong = self._proof_of(file, [data])
            if wrong is None:
                self._index = data
                return data
        raise TransferError(f"{file.name}: {wrong}, twice in a row; run the same command again later")

    def _single_weight_map(self) -> dict[str, str]:
        file = self.listing.files[SINGLE_NAME]
        where = Path(f"{self.listing.repository}@{self.listing.commit[:12]}") / SINGLE_NAME
        start = self.read(file, 0, min(LENGTH.size, file.n_bytes))
        header = self.read(file, 0, header_size(start, file.n_bytes, where))
        return dict.fromkeys(parse_shard_header(header, file.n_bytes, where).tensors, SINGLE_NAME)

    def _proof_of(
        self, file: RemoteFile, blocks: Iterable[bytes], progress: Progress = no_progress
    ) -> tuple[Proof | None, str | None]:
        done = 0
        with Digests(None if file.sha256 else file.n_bytes) as digests:
            for block in blocks:
                if self._transfer.stop.is_set():
                    raise Stopped
                digests.update(block)
                done += len(block)
                progress(done)
            sha256, git_sha1 = digests.finish()
        wrong = difference(file, sha256, git_sha1)
        return (Proof(file.name, done, sha256), None) if wrong is None else (None, wrong)
