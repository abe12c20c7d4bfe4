"""The ledger of a checkpoint folder: what was proved, sampled and given back, one JSON object a line, only appended.

    {"event": "source", "repository": "ORG/NAME", "revision": "<commit>", "time": …}
    {"event": "staging", "time": …}
    {"event": "proved", "file": NAME, "bytes": N, "sha256": …, "time": …}
    {"event": "disproved", "file": NAME, "time": …}
    {"event": "sampled", "file": NAME, "bytes": N, "header_sha256": …, "sample_sha256": …, "time": …}
    {"event": "reclaimed", "file": NAME, "bytes": N, "into": OUTPUT FOLDER, "time": …}

A line is one write followed by an fsync. What a kill left of a line, or an editor of its end, does no harm: a
line that cannot be read says nothing, and the next one begins on a line of its own.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container.fingerprint import ShardFingerprint
from container.publish import sync_folder


@dataclass(frozen=True)
class Origin:
    """The repository, and its commit, that a folder was last filled from; None for what nobody knows."""

    repository: str | None
    revision: str | None


@dataclass(frozen=True)
class Proof:
    """A file's bytes were compared with their checksum, and these were they."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Reclaimed:
    """A shard was given back: all that was made of it is safe in `into`."""

    name: str
    n_bytes: int
    into: str


class Ledger:
    """A folder's ledger, read when made. One process appends (it holds the folder's lock); its threads may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin: Origin | None = None
        self.is_staging = False  # made for a conversion's use: its shards may go
        self.proved: dict[str, Proof] = {}
        self.sampled: dict[str, ShardFingerprint] = {}
        self.reclaimed: dict[str, Reclaimed] = {}
        self._lock = threading.Lock()
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            self._take(line)

    @property
    def demands_proofs(self) -> bool:
        """True where a download or an audit keeps the ledger: a file without a proof may be anything then."""
        return self.origin is not None

    def say_source(self, origin: Origin) -> None:
        """Note where the folder is filled from, unless that is what the ledger says last."""
        if origin != self.origin:
            self._append({"event": "source", "repository": origin.repository, "revision": origin.revision})

    def say_staging(self) -> None:
        """Note, in a folder that holds nothing yet, that shards in it come and go."""
        if not self.is_staging:
            self._append({"event": "staging"})

    def say_proved(self, proof: Proof) -> None:
        """Note that a file is whole and right; its bytes must be durable under the final name."""
        self._append({"event": "proved", "file": proof.name, "bytes": proof.n_bytes, "sha256": proof.sha256})

    def say_disproved(self, name: str) -> None:
        """Note that a file, whatever was said of it, is not what it should be."""
        self._append({"event": "disproved", "file": name})

    def say_sampled(self, name: str, fingerprint: ShardFingerprint) -> None:
        """Note a shard's fingerprint."""
        self._append({"event": "sampled", "file": name, **fingerprint.to_json()})

    def say_reclaimed(self, reclaimed: Reclaimed) -> None:
        """Note that a shard may go, before it goes."""
        self._append({"event": "reclaimed", "file": reclaimed.name, "bytes": reclaimed.n_bytes, "into": reclaimed.into})

    def _append(self, event: Mapping[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        said = json.dumps({**event, "time": now}).encode()
        line = said + b"\n"
        with self._lock:
            new = not self.path.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                end = os.fstat(descriptor).st_size
                if end and os.pread(descriptor, 1, end - 1) != b"\n":
                    line = b"\n" + line  # half a line of a killed run
                while line:  # a disk that is nearly full takes a part
                    line = line[os.write(descriptor, line) :]
                os.fsync(descriptor)
            except OSError as error:
                error.filename = str(self.path)  # the calls know a descriptor only
                raise
            finally:
                os.close(descriptor)
            if new:
                sync_folder(self.path.parent)
            self._take(said)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "source":
                self.origin = Origin(_text(event["repository"]), _text(event["revision"]))
            elif kind == "staging":
                self.is_staging = True
            elif kind == "proved":
                proof = Proof(_text(event["file"]), _count(event["bytes"]), _text(event["sha256"]))
                self.proved[proof.name] = proof
                self.reclaimed.pop(proof.name, None)  # it was fetched again
            elif kind == "disproved":
                self.proved.pop(_text(event["file"]), None)
            elif kind == "sampled":
                self.sampled[_text(event["file"])] = ShardFingerprint.from_json(event)
            elif kind == "reclaimed":
                gone = Reclaimed(_text(event["file"]), _count(event["bytes"]), _text(event["into"]))
                self.reclaimed[gone.name] = gone
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # half a line, or nothing of ours


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError("not a size")
    return value
