"""What a power cut would leave: names and bytes count only from the moment that they were synced.

Every process of a test watches the same folders and hands on, in a file, what is durable: a kill loses nothing of the
page cache, so that what a killed run did not sync is still there for the next one, and still not durable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

PASSING = (".tmp", "lock")  # ends of names that nobody relies on after a power cut


class Durable:
    """Watches folders below `base`; what lies there when `memory` is first made is durable."""

    def __init__(self, base: Path, folders: list[Path], memory: Path) -> None:
        self._base = base
        self._folders = folders
        self._memory = memory
        if memory.exists():
            kept = json.loads(memory.read_text())
            self._names, self._bytes = set(kept["names"]), kept["bytes"]
        else:
            self._names = {str(path) for path in self._paths()}
            self._bytes = {_file_id(path): _state(path) for path in self._paths() if path.is_file()}
            self._keep()

    def synced(self, path: Path) -> None:
        """A file or a folder was synced."""
        if path.is_dir():
            self._names = {name for name in self._names if Path(name).parent != path}
            self._names |= {str(each) for each in path.iterdir()}
        else:
            self._bytes[_file_id(path)] = _state(path)
        self._keep()

    def lost(self) -> list[str]:
        """What a power cut would take, now, of the files that are there: by name, or by content."""
        found = []
        for path in self._paths():
            if str(path) not in self._names:
                found.append(f"name {path.relative_to(self._base)}")
            elif path.is_file() and self._bytes.get(_file_id(path)) != _state(path):
                found.append(f"bytes of {path.relative_to(self._base)}")
        return found

    def _paths(self) -> Iterator[Path]:
        for folder in self._folders:
            for path in (folder, *sorted(folder.rglob("*"))) if folder.exists() else ():
                if not path.name.endswith(PASSING):
                    yield path

    def _keep(self) -> None:
        fresh = self._memory.with_suffix(".new")
        fresh.write_text(json.dumps({"names": sorted(self._names), "bytes": self._bytes}))
        os.rename(fresh, self._memory)  # noqa: PTH104 - Path.replace is watched


def _file_id(path: Path) -> str:
    """Stays the same when a file is renamed."""
    return str(path.stat().st_ino)


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
