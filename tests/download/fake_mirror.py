"""A mirror without a hub: its shards come at once, slowly, or not at all, as a test wants."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from container.fingerprint import file_fingerprint
from container.shards import read_shard_header
from download.folder import SourceFolder
from download.ledger import Ledger, Proof
from download.listing import RemoteFile
from download.transfer import Stopped

LEAST_SHARD_BYTES = 100


def shard_content(name: str, n_bytes: int) -> bytes:
    """A safetensors file of exactly `n_bytes`, told from others of that size by its name."""
    seed = hashlib.sha256(name.encode()).digest()
    for n_data in range(n_bytes, 0, -1):
        header = json.dumps({"w": {"dtype": "U8", "shape": [n_data], "data_offsets": [0, n_data]}}).encode()
        if 8 + len(header) + n_data <= n_bytes:
            header = header.ljust(n_bytes - n_data - 8)
            return len(header).to_bytes(8, "little") + header + (seed * (n_data // 32 + 1))[:n_data]
    raise ValueError(f"{n_bytes} bytes hold no shard")


class FakeMirror:
    """Stands in for Mirror.

    `begun` lists each fetch, `held_bytes` what lay on disk, with what was on its way, then; `read` what was hashed.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self.folder = SourceFolder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(self.folder.ledger)
        self.contents = {name: shard_content(name, n_bytes) for name, n_bytes in sizes.items()}
        self.begun: list[str] = []
        self.held_bytes: list[int] = []
        self.read: list[str] = []
        self.before: Callable[[RemoteFile], None] = lambda file: None  # called in each fetch; may wait or raise
        self._coming: set[str] = set()
        self._lock = threading.Lock()
        for name, content in self.contents.items():
            if name not in self.ledger.sampled:
                self._sample(name, content)

    def _sample(self, name: str, content: bytes) -> None:
        path = self.folder.folder / "sampled"
        path.write_bytes(content)
        self.ledger.say_sampled(name, file_fingerprint(path, read_shard_header(path)))
        path.unlink()

    def shards(self) -> tuple[RemoteFile, ...]:
        return tuple(
            RemoteFile(name=name, n_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in self.contents.items()
        )

    def is_proved(self, file: RemoteFile) -> bool:
        return file.name in self.ledger.proved and self.has_size(file)

    def has_size(self, file: RemoteFile) -> bool:
        path = self.folder.file(file.name)
        return path.is_file() and path.stat().st_size == file.n_bytes

    def part_bytes(self, file: RemoteFile) -> int:
        part = self.folder.part(file.name)
        return part.stat().st_size if part.is_file() else 0

    def present(self, file: RemoteFile, progress: Callable[[int], None]) -> Proof | None:
        if not self.has_size(file):
            return None
        if not self.is_proved(file):
            self.read.append(file.name)
            if self.folder.file(file.name).read_bytes() != self.contents[file.name]:
                return None
        return Proof(file.name, file.n_bytes, str(file.sha256))

    def note(self, proof: Proof) -> None:
        if self.ledger.proved.get(proof.name) != proof:
            self.ledger.say_proved(proof)

    def fetch(self, file: RemoteFile, progress: Callable[[int], None], guard: Callable[[int], None]) -> Proof:
        proof = self.present(file, progress)
        if proof is None:
            with self._lock:
                self.begun.append(file.name)
                self._coming.add(file.name)
                there = {name for name in self.contents if self.folder.file(name).exists()} | self._coming
                self.held_bytes.append(sum(len(self.contents[name]) for name in there))
            try:
                guard(file.n_bytes)
                progress(file.n_bytes // 2)
                self.before(file)
                self.put(file.name)
            finally:
                with self._lock:
                    self._coming.discard(file.name)
            proof = Proof(file.name, file.n_bytes, str(file.sha256))
        self.note(proof)
        return proof

    def put(self, name: str, *, proved: bool = False) -> None:
        """Lay a shard into the folder, as an earlier run may have."""
        self.folder.file(name).write_bytes(self.contents[name])
        if proved:
            content = self.contents[name]
            self.note(Proof(name, len(content), hashlib.sha256(content).hexdigest()))

    def put_part(self, name: str, n_bytes: int) -> None:
        """Lay the beginning of a shard into the folder."""
        self.folder.parts.mkdir(parents=True, exist_ok=True)
        self.folder.part(name).write_bytes(self.contents[name][:n_bytes])
        self.folder.part_facts(name).write_text("{}")


def waits_for(stop: threading.Event) -> Callable[[RemoteFile], None]:
    """A fetch that ends only when it is told to stop."""

    def wait(file: RemoteFile) -> None:
        stop.wait()
        raise Stopped

    return wait
