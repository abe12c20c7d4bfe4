"""Atomic publication: a file under its final name is always complete.

Temporary name in the target's own folder → write → fsync → rename → fsync of the folder. Nothing else in the
project creates a final name (but trunk.bin's, which many write and the converter syncs and renames), so what a
kill or a power cut leaves behind is either absent or whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"
_NO_FILE = "it is there and no file"


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that appears at `path` only when the block ends without an exception.

    On an exception the temporary file is removed and `path` stays as it was. Raises OSError as the system does, and for
    a `path` that is there and no file: a rename would replace a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, _NO_FILE)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def obstacle(path: Path) -> str | None:
    """What stands against publishing at `path`, as far as that shows beforehand."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.exists() and not path.is_file():
        return _NO_FILE
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"nothing can be written in the folder {path.parent}"
    return None


def publish_bytes(path: Path, data: bytes) -> None:
    """Publish `data` at `path`."""
    with publishing(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files in `folder`: of a killed run, or of one at work."""
    return sorted(path for path in folder.glob(f".*{TEMPORARY_SUFFIX}") if path.is_file())


def remove_leftovers(folder: Path) -> list[str]:
    """Delete temporary files that a killed run left in `folder`; the caller must hold the folder's lock."""
    found = leftovers(folder)
    for path in found:
        path.unlink()
    return [path.name for path in found]
