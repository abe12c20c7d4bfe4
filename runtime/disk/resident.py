"""The trunk in memory, as it is stored: a few ranges of trunk.bin, read whole and past the page cache.

Each range has pages of its own and begins there as it begins in the file, so the disk writes straight into them; a
tensor is a view. Loading takes as long as reading does.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from container.errors import FormatError, IntegrityError
from container.layout import TRUNK_NAME
from container.manifest import TrunkEntry
from container.reader import ContainerReader
from runtime.disk.direct import DirectFiles, fresh_pages
from runtime.memory.plan import Range, merged_ranges, resident_entries

U8 = npt.NDArray[np.uint8]
_Item = TypeVar("_Item")
Progress = Callable[[int, int], None]  # (bytes read, bytes in all), from any thread, one call at a time

_PIECE_BYTES = 8 << 20  # of one read; a multiple of the page


class ResidentTrunk:
    """What of the trunk stays in memory, by manifest entry."""

    def __init__(self, ranges: Iterable[tuple[Range, U8]]) -> None:
        """`ranges` with the bytes of each."""
        self._tensors: dict[str, U8] = {}
        for part, content in ranges:
            for entry in part.entries:
                start = entry.offset - part.start
                self._tensors[entry.name] = content[start : start + entry.n_bytes]

    @classmethod
    def load(
        cls,
        reader: ContainerReader,
        files: DirectFiles,
        *,
        n_threads: int,
        verify: bool = False,
        progress: Progress | None = None,
    ) -> ResidentTrunk:
        """Read the resident tensors of a container on `n_threads` threads.

        `verify` checks the crc32 of each tensor that has one in the manifest. Raises FormatError when trunk.bin is too
        short or cannot be read, IntegrityError for a wrong crc32.
        """
        entries = resident_entries(reader.manifest)
        ranges = [(part, _pages(part)) for part in merged_ranges(entries)]
        pieces = [piece for part, view in ranges for piece in _pieces(part, view, reader.trunk_bytes)]
        told = _Told(progress, sum(len(target) for target, _ in pieces))

        def read(piece: tuple[memoryview, int]) -> None:
            target, offset = piece
            files.read_into(TRUNK_NAME, target, offset)
            told.more(len(target))

        _each(n_threads, read, pieces)
        resident = cls((part, np.frombuffer(view, dtype=np.uint8)) for part, view in ranges)
        if verify:
            _each(n_threads, lambda entry: check_crc(reader, entry, zlib.crc32(resident.content(entry).data)), entries)
        return resident

    def content(self, entry: TrunkEntry) -> U8:
        """All bytes of a resident tensor, values then scales: a view. Raises FormatError for one that is not."""
        if entry.name not in self._tensors:
            raise FormatError(f"{entry.name}: this tensor of {TRUNK_NAME} is not in memory; text needs none such")
        return self._tensors[entry.name]


def check_crc(reader: ContainerReader, entry: TrunkEntry, found: int) -> None:
    """Raises IntegrityError when the manifest gives the tensor another crc32 than `found`."""
    if entry.crc32 is not None and found != entry.crc32:
        raise IntegrityError(
            f"{reader.folder / TRUNK_NAME}: {entry.name}: crc32 is {found:#010x}, the manifest says "
            f"{entry.crc32:#010x}: damaged tensor; convert the checkpoint again or fetch the file anew"
        )


class _Told:
    """Counts what is done for a progress callback."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()

    def more(self, n_bytes: int) -> None:
        with self._lock:
            self._done_bytes += n_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def _pages(part: Range) -> memoryview:
    """Memory for a range. Ordinary pages: huge ones would be read into faster where free ones are at hand, but where
    the system has to make them first (a virtual machine above all), loading took five times as long.
    """
    return memoryview(fresh_pages(part.n_bytes))


def _pieces(part: Range, view: memoryview, file_bytes: int) -> Iterator[tuple[memoryview, int]]:
    """(where to, from which offset) of each read; the last page of the file may be no whole one."""
    for start in range(part.start, min(part.stop, file_bytes), _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, part.stop, file_bytes)
        yield view[start - part.start : stop - part.start], start


def _each(n_threads: int, work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Do `work` on all items on a few threads; the first error, in the items' order, is raised and ends the rest."""
    with ThreadPoolExecutor(n_threads, thread_name_prefix="moedock-load") as pool:
        try:
            for _ in pool.map(work, items):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
