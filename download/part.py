"""A file that is not whole yet: its bytes so far, and what is known of the file that they belong to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from container.publish import publish_bytes, sync_folder
from download.folder import SourceFolder
from download.listing import RemoteFile

READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The file that a part belongs to, and the answer that its bytes came with."""

    bytes: int
    sha256: str | None
    git_sha1: str | None
    etag: str | None = None

    @classmethod
    def of(cls, file: RemoteFile, etag: str | None) -> Facts:
        """What is known of a listed file."""
        return cls(bytes=file.n_bytes, sha256=file.sha256, git_sha1=file.git_sha1, etag=etag)


class Part:
    """The part of `file` in `folder`, opened for going on; one that cannot be gone on with is emptied.

    Only whoever holds the folder's lock may open it.
    """

    def __init__(self, folder: SourceFolder, file: RemoteFile) -> None:
        self._folder = folder
        self._file = file
        self._path = folder.part(file.name)
        self._facts_path = folder.part_facts(file.name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        self.have = os.fstat(self._descriptor).st_size
        facts = _read_facts(self._facts_path)
        self.etag = facts.etag if facts else None
        if facts != Facts.of(file, self.etag) or self.have > file.n_bytes:
            self.empty()
        self._facts = facts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def belongs_to(self, etag: str | None) -> None:
        """Say which answer the bytes come from, before the first of them."""
        facts = Facts.of(self._file, etag)
        if facts != self._facts:
            publish_bytes(self._facts_path, json.dumps(asdict(facts)).encode())
            self._facts = facts
        self.etag = etag

    def append(self, block: bytes) -> None:
        """Write the next bytes, at the place that is counted here. Raises OSError as the disk does."""
        rest = memoryview(block)
        while rest:
            n_bytes = os.pwrite(self._descriptor, rest, self.have)
            self.have += n_bytes
            rest = rest[n_bytes:]

    def blocks(self) -> Iterator[bytes]:
        """The bytes that are here, from the first."""
        offset = 0
        while block := os.pread(self._descriptor, READ_BYTES, offset):
            offset += len(block)
            yield block

    def empty(self) -> None:
        """Begin anew."""
        os.ftruncate(self._descriptor, 0)
        self.have = 0

    def remove(self) -> None:
        """Delete the part and what is known of it."""
        self._path.unlink(missing_ok=True)
        self._facts_path.unlink(missing_ok=True)

    def publish(self) -> None:
        """Make the bytes durable and put them at the file's final place."""
        os.fsync(self._descriptor)
        final = self._folder.file(self._file.name)
        final.parent.mkdir(parents=True, exist_ok=True)
        self._path.replace(final)
        for folder in final.parents:
            sync_folder(folder)  # the name, and the folders that were made for it
            if folder == self._folder.folder:
                break
        self._facts_path.unlink(missing_ok=True)


def _read_facts(path: Path) -> Facts | None:
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        return Facts(**json.loads(path.read_bytes()))
    return None
