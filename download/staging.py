"""Shards of a repository in a folder that may hold only so many bytes of them: fetched ahead, given back when done.

Shards are fetched strictly in the order given, each once, as soon as the next one fits: so whoever works through them
in that order never waits for one that cannot come. A shard takes its whole size from when its fetch begins.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from container.errors import DownloadError, TransferError
from container.fingerprint import file_fingerprint
from container.machine import free_disk
from container.progress import duration, size
from container.shards import read_shard_header
from download.crew import leave
from download.give_back import give_back
from download.listing import RemoteFile
from download.mirror import Mirror
from download.transfer import Stopped, Transfer

# Two shards at a time: while one's checksum is compared or its line is slow, the other's bytes come.
CONNECTIONS = 2
# Stays free on the staging folder's disk, for others and for the ledger.
STAYS_FREE_BYTES = 256 << 20
SAY_SECONDS = 30.0


class Staging:
    """The staged shards of one run. The caller holds the folder's lock."""

    def __init__(self, mirror: Mirror, transfer: Transfer, most_bytes: int, into: Path) -> None:
        self._mirror = mirror
        self._transfer = transfer
        self._most_bytes = most_bytes
        self._into = into
        self._files = {file.name: file for file in mirror.shards()}
        files = self._files.values()
        self._here = {file.name for file in files if mirror.is_proved(file)}
        self._held = self._here | {file.name for file in files if mirror.part_bytes(file) or mirror.has_size(file)}
        self._order: deque[RemoteFile] = deque()
        self._change = threading.Condition()
        self._failure: Exception | None = None
        self._news: list[str] = []
        self._coming: dict[str, int] = {}  # shards on their way: bytes on disk
        self._said = time.monotonic()
        self._threads: list[threading.Thread] = []

    @property
    def held(self) -> frozenset[str]:
        """Shards that take room: whole, in part, or on their way."""
        with self._change:
            return frozenset(self._held)

    @property
    def bytes_on_disk(self) -> int:
        """What shards and parts of them take now."""
        whole = sum(file.n_bytes for file in self._files.values() if self._mirror.has_size(file))
        return whole + sum(map(self._mirror.part_bytes, self._files.values()))

    def begin(self, order: Sequence[str], unneeded: Iterable[str]) -> None:
        """Delete what is not needed, or only later, and begin to fetch the shards of `order` that are not here."""
        for name in unneeded:
            if name in order:
                self._mirror.folder.file(name).unlink(missing_ok=True)
                self._forget(name, "made room instead of")
            elif name in self._held:
                self.give_back(name)
        self._order.extend(self._files[name] for name in order if name not in self._here)
        self._threads = [
            threading.Thread(target=self._work, name=f"staging {number}", daemon=True)
            for number in range(min(CONNECTIONS, len(self._order)))
        ]
        for thread in self._threads:
            thread.start()

    def here(self, name: str) -> bool:
        """True when the shard is whole and proved."""
        return name in self._here

    def give_back(self, name: str) -> None:
        """Delete a shard whose every consumer's output is durable; the next one may come."""
        give_back(self._mirror.folder, self._mirror.ledger, name, self._into)
        self._forget(name, "gave back")

    def _forget(self, name: str, what: str) -> None:
        """Nothing of the shard is here any more, once its part is gone."""
        for path in (self._mirror.folder.part(name), self._mirror.folder.part_facts(name)):
            path.unlink(missing_ok=True)
        with self._change:
            self._here.discard(name)
            self._held.discard(name)
            self._news.append(f"{what} {name}: {size(self._files[name].n_bytes)}")
            self._change.notify_all()

    def failure(self) -> Exception | None:
        """Why no more shards come."""
        return self._failure

    def news(self) -> list[str]:
        """What happened since the last call; now and then, how far the shards on their way are."""
        with self._change:
            said, self._news = self._news, []
            if self._coming and time.monotonic() - self._said >= SAY_SECONDS:
                self._said = time.monotonic()
                said += [self._how_far(name, n_bytes) for name, n_bytes in self._coming.items()]
        return said

    def _how_far(self, name: str, n_bytes: int) -> str:
        hitch = self._transfer.hitches.get(name)
        again = f"; asking again after: {hitch}" if hitch else ""
        return f"fetching {name}: {size(n_bytes)} of {size(self._files[name].n_bytes)} here{again}"

    def close(self) -> None:
        """End all fetching; partial shards are kept."""
        self._transfer.stop.set()
        with self._change:
            self._change.notify_all()
        leave(self._threads)

    def _work(self) -> None:
        """Fetch the next shard whenever it fits, until none is left."""
        try:
            while (file := self._next()) is not None:
                self._fetch(file)
        except Stopped:
            return
        except OSError as error:
            reason = f"{error.strerror or error}; what was fetched is kept, run the same command to continue"
            self._fail(DownloadError(f"staging {error.filename or self._mirror.folder.folder}: {reason}"))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """No more shards; the main thread raises it once the jobs at work are done."""
        with self._change:
            self._failure = self._failure or error
            self._order.clear()
            self._news.append("fetching has ended; the layers whose shards are here are finished first")
            self._change.notify_all()

    def _next(self) -> RemoteFile | None:
        """Wait until the next shard fits, and take its room."""
        with self._change:
            while self._order:
                if self._transfer.stop.is_set():
                    raise Stopped
                file = self._order[0]
                held = sum(self._files[name].n_bytes for name in self._held | {file.name})
                if held <= self._most_bytes:
                    self._held.add(file.name)
                    self._coming[file.name] = 0
                    return self._order.popleft()
                self._change.wait()
        return None

    def _fetch(self, file: RemoteFile) -> None:
        began = time.monotonic()

        def progress(n_bytes: int) -> None:
            self._coming[file.name] = n_bytes

        try:
            proof = self._mirror.present(file, progress)
            if proof is not None:  # of a run that ended before it noted that
                self._mirror.note(proof)
            else:  # what may lie there is not the shard, and takes the room of its part
                self._mirror.folder.file(file.name).unlink(missing_ok=True)
            self._mirror.fetch(file, progress, self._guard)
            self._require_same(file)
        finally:
            with self._change:
                del self._coming[file.name]
        seconds = time.monotonic() - began
        with self._change:
            self._here.add(file.name)
            self._news.append(
                f"fetched {file.name}: {size(file.n_bytes)} in {duration(seconds)} "
                f"({size(file.n_bytes / max(seconds, 1e-3))}/s)"
            )

    def _guard(self, missing_bytes: int) -> None:
        folder = self._mirror.folder.folder
        free = free_disk(folder)
        if free < min(missing_bytes, STAYS_FREE_BYTES) + STAYS_FREE_BYTES:
            raise DownloadError(
                f"{folder}: only {size(free)} free, {size(missing_bytes)} of a shard still to come; what was fetched "
                "is kept. Make room and run the same command to continue"
            )

    def _require_same(self, file: RemoteFile) -> None:
        """The shard must be the one whose header and samples were read before, by which the build is known."""
        path = self._mirror.folder.file(file.name)
        if file_fingerprint(path, read_shard_header(path)) != self._mirror.ledger.sampled.get(file.name):
            raise TransferError(
                f"{path}: its header or its weights are not those that the hub sent when the conversion began, though "
                f"its checksum is right; delete {self._mirror.folder.headers} and begin anew in another OUT"
            )
