"""Files read past the page cache, so that what a model does not hold in its budget does not sit in memory after all.

Linux: O_DIRECT, where offset, length and memory of a read must be multiples of the device's block; we use 4096. macOS:
F_NOCACHE, which asks for no alignment. Where a file system refuses, files are read as usual, and one line says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from container.errors import FormatError
from container.layout import ALIGNMENT, align_up

Notice = Callable[[str], None]

_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_F_NOCACHE: Final[int | None] = getattr(fcntl, "F_NOCACHE", None)
_BOUNCE_BYTES = 4 << 20  # an unaligned range passes through a buffer of this size
_HUGE_PAGE = 2 << 20
_MOST_BYTES = 1 << 30  # of one read; Linux does 2 GiB less a page at most


def arena(n_bytes: int) -> memoryview:
    """`n_bytes` of zeros that start on a page. A page takes memory from its first touch on, until the view is gone.

    From 2 MiB on, the pages are huge where the system has such: a direct read into small ones is cut into pieces at
    every page, and ran at 60 % of the speed. Raises MemoryError.
    """
    is_large = n_bytes >= _HUGE_PAGE
    length = align_up(n_bytes, _HUGE_PAGE) + _HUGE_PAGE if is_large else align_up(max(n_bytes, 1), ALIGNMENT)
    pages = fresh_pages(length)
    view = memoryview(pages)
    if not is_large:
        return view[:n_bytes]
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without: the pages stay small
            pages.madvise(mmap.MADV_HUGEPAGE)
    start = -_address(view) % _HUGE_PAGE
    return view[start : start + n_bytes]


def fresh_pages(n_bytes: int) -> mmap.mmap:
    """Memory of its own, zeros on small pages. Raises MemoryError."""
    try:
        return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{n_bytes} bytes of memory: {error.strerror}") from None


class DirectFiles:
    """The files of a folder, opened when first read. Reads are positional, so threads may share one object.

    `notice` is given one line when the file system refuses direct reads; at most once.
    """

    def __init__(self, folder: Path, notice: Notice) -> None:
        self.folder = folder
        self._notice = notice
        self._is_refused = False
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def __enter__(self) -> DirectFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. No thread may be reading."""
        with self._lock:
            for file in self._files.values():
                os.close(file.descriptor)
            self._files.clear()

    def read_aligned(self, name: str, target: memoryview, offset: int) -> None:
        """Fill `target`; its address, its length and `offset` are multiples of 4096. Raises what `read_into` raises."""
        self._read(name, target, offset, len(target), offset + len(target))

    def read_into(self, name: str, target: memoryview, offset: int) -> None:
        """Fill `target`, any writable bytes, from `offset` of file `name`, wherever they lie.

        Memory that lies in its page as the range lies in the file is read in place, anything else passes through a
        buffer of 4 MiB per thread. Raises FormatError when the file is too short or cannot be read.
        """
        target = target.cast("B")
        end, done = offset + len(target), 0
        while done < len(target):
            start = offset + done
            skipped = start % ALIGNMENT
            in_place = (len(target) - done) // ALIGNMENT * ALIGNMENT
            if not skipped and in_place and _address(target[done:]) % ALIGNMENT == 0:
                self._read(name, target[done : done + in_place], start, in_place, end)
                done += in_place
                continue
            n_bytes = min(len(target) - done, self._piece(target[done:], skipped))
            bounce = self._bounce()[: align_up(skipped + n_bytes, ALIGNMENT)]
            self._read(name, bounce, start - skipped, skipped + n_bytes, end)
            target[done : done + n_bytes] = bounce[skipped : skipped + n_bytes]
            done += n_bytes

    @staticmethod
    def _piece(target: memoryview, skipped: int) -> int:
        """Bytes to take through the buffer next: up to the next page where the rest can be read in place."""
        to_page = ALIGNMENT - skipped
        if len(target) > to_page and _address(target[to_page:]) % ALIGNMENT == 0:
            return to_page
        return _BOUNCE_BYTES - skipped

    def _bounce(self) -> memoryview:
        if not hasattr(self._local, "bounce"):
            self._local.bounce = arena(_BOUNCE_BYTES)
        found: memoryview = self._local.bounce
        return found

    def _read(self, name: str, target: memoryview, offset: int, needed: int, end: int) -> None:
        """Read aligned `target` until at least its first `needed` bytes are there; somebody needs the file to `end`."""
        file = self._file(name)
        done = 0
        while done < needed:
            direct = file.is_direct
            start = done - done % ALIGNMENT if direct else done  # a direct read must start on a block again
            try:
                count = os.preadv(file.descriptor, [target[start : start + _MOST_BYTES]], offset + start)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    file.read_as_usual()
                    self._refused()
                    continue
                raise FormatError(
                    f"{file.path}: cannot be read at byte {offset + start} ({os.strerror(error.errno or 0)}); "
                    "check the disk"
                ) from None
            if start + count <= done:
                raise FormatError(
                    f"{file.path}: {end} bytes expected, the file ends at byte {offset + done}; "
                    "fetch the file anew or convert the checkpoint again"
                )
            done = start + count

    def _file(self, name: str) -> _File:
        file = self._files.get(name)
        if file is not None:
            return file
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = _File(self.folder / name)
        if not file.is_direct:
            self._refused()
        return file

    def _refused(self) -> None:
        with self._lock:
            first, self._is_refused = not self._is_refused, True
        if first:
            self._notice(
                f"{self.folder}: the file system refuses reads past the page cache; files are read as usual, so the "
                "system may keep them in memory beyond the budget"
            )


class _File:
    """One open file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor, self.is_direct = _opened(path)

    def read_as_usual(self) -> None:
        """Give up direct reads; other threads may be reading."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
        self.is_direct = False


def _opened(path: Path) -> tuple[int, bool]:
    """(descriptor, whether reads pass the page cache)."""
    try:
        if _O_DIRECT:
            with contextlib.suppress(OSError):  # refused: what else may be wrong with the file shows below
                return os.open(path, os.O_RDONLY | _O_DIRECT), True
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened ({os.strerror(error.errno or 0)})") from None
    if _F_NOCACHE is None:
        return descriptor, False
    try:
        fcntl.fcntl(descriptor, _F_NOCACHE, 1)
    except OSError:
        return descriptor, False
    return descriptor, True


def _address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data
