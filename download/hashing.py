"""A file's checksums, computed by a thread of its own while the bytes arrive: hashlib frees the interpreter's lock."""

from __future__ import annotations

import hashlib
import queue
import threading
from typing import Self

from download.listing import RemoteFile

QUEUED_BLOCKS = 4


class Digests:
    """sha256 of the bytes given in order, and git's sha1 of them where the file's size is given.

    Git's sha1 of a file is that of `blob <size>\\0` and its bytes (Pro Git, 10.2 "Git Internals - Git Objects").
    Close it, or use it as a context, so that its thread ends.
    """

    def __init__(self, git_bytes: int | None = None) -> None:
        self._git_bytes = git_bytes
        self._blocks: queue.Queue[bytes | None] = queue.Queue(QUEUED_BLOCKS)
        self._begin()
        self._thread = threading.Thread(target=self._work, name="hash", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, block: bytes) -> None:
        """The next bytes; waits while too many are not hashed yet."""
        if block:
            self._blocks.put(block)

    def restart(self) -> None:
        """Forget the bytes so far."""
        self._blocks.put(b"")

    def finish(self) -> tuple[str, str | None]:
        """(sha256, git's sha1 or None), in hex, of all bytes; nothing can be added afterwards."""
        self.close()
        return self._sha256.hexdigest(), self._git_sha1.hexdigest() if self._git_sha1 else None

    def close(self) -> None:
        """End the thread, when what was given is hashed."""
        if self._thread.is_alive():
            self._blocks.put(None)
            self._thread.join()

    def _begin(self) -> None:
        self._sha256 = hashlib.sha256()
        self._git_sha1 = None
        if self._git_bytes is not None:
            self._git_sha1 = hashlib.sha1(b"blob %d\0" % self._git_bytes, usedforsecurity=False)

    def _work(self) -> None:
        while (block := self._blocks.get()) is not None:
            if not block:
                self._begin()
                continue
            self._sha256.update(block)
            if self._git_sha1 is not None:
                self._git_sha1.update(block)


def difference(file: RemoteFile, sha256: str, git_sha1: str | None) -> str | None:
    """How a file's checksums differ from the listed one, in words; None where they do not."""
    if file.sha256 is not None:
        kind, expected, found = "sha256", file.sha256, sha256
    elif file.git_sha1 is not None:
        kind, expected, found = "git sha1", file.git_sha1, git_sha1 or ""
    else:
        return None
    return None if found == expected.lower() else f"its {kind} is {found} where the repository lists {expected}"
