"""Reads past the page cache: any range, whatever the file system allows, and what happens when bytes are missing."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container.errors import FormatError
from runtime.disk import direct
from runtime.disk.direct import DirectFiles, arena

SIZE = 5 * 4096 + 1234
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
NAME = "file.bin"
O_DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("direct")
    (folder / NAME).write_bytes(CONTENT)
    return folder


@contextmanager
def short_reads(lengths: Iterator[int], *, aligned: bool) -> Iterator[None]:
    """Every read gives at most so many bytes, and spoils what lies behind them; `aligned`: as a direct read must be."""
    preadv = os.preadv

    def read(descriptor: int, views: list[memoryview], offset: int) -> int:
        if aligned:
            address = np.frombuffer(views[0], dtype=np.uint8).ctypes.data
            assert (offset % 4096, len(views[0]) % 4096, address % 4096) == (0, 0, 0)
        count = min(preadv(descriptor, views, offset), next(lengths))
        views[0][count:] = b"\xaa" * (len(views[0]) - count)
        return count

    with patch.object(os, "preadv", read):
        yield


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """A file system without direct reads: EINVAL when a file is opened, or only when it is read, or never."""
    opened, preadv, direct_ones = os.open, os.preadv, set()

    def open_file(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "refused")
        descriptor = opened(path, flags & ~O_DIRECT, *rest, **options)
        if flags & O_DIRECT and where == "read":
            direct_ones.add(descriptor)
        return descriptor

    def read(descriptor: int, views: list[memoryview], offset: int) -> int:
        if descriptor in direct_ones:
            direct_ones.remove(descriptor)
            raise OSError(errno.EINVAL, "refused")
        return preadv(descriptor, views, offset)

    with patch.object(os, "open", open_file), patch.object(os, "preadv", read):
        yield


@given(
    offset=st.integers(0, SIZE),
    length=st.integers(0, SIZE),
    shift=st.integers(0, 4096),
    lengths=st.lists(st.sampled_from([4096, 5000, 8192, 10**6]), min_size=1),
    as_usual=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_range_into_any_memory(
    folder: Path, offset: int, length: int, shift: int, lengths: list[int], as_usual: bool
) -> None:
    """In place or through the buffer, in one go or in pieces: of any size, or of a block at least if direct."""
    length = min(length, SIZE - offset)
    memory = arena(2 * 4096 + SIZE)
    counts = (count - 4095 * as_usual for _ in iter(int, 1) for count in lengths)
    with (
        patch.object(direct, "_BOUNCE_BYTES", 8192),
        refusing("open" if as_usual else "never"),
        short_reads(counts, aligned=bool(O_DIRECT) and not as_usual),
        DirectFiles(folder, lambda line: None) as files,
    ):
        files.read_into(NAME, memory[shift : shift + length], offset)
    assert bytes(memory[shift : shift + length]) == CONTENT[offset : offset + length]
    assert not any(memory[:shift])
    assert not any(memory[shift + length :])


def test_aligned_memory_is_read_in_place(folder: Path) -> None:
    """A range that lies in its page as the memory does needs no copy but at its ends."""
    calls = []
    preadv = os.preadv

    def read(descriptor: int, views: list[memoryview], offset: int) -> int:
        calls.append((offset, len(views[0])))
        return preadv(descriptor, views, offset)

    memory = arena(SIZE)
    with patch.object(os, "preadv", read), DirectFiles(folder, pytest.fail) as files:
        files.read_into(NAME, memory[100:], 100)
    assert bytes(memory[100:]) == CONTENT[100:]
    assert (4096, 4 * 4096) in calls
    assert all(offset % 4096 == 0 and length % 4096 == 0 for offset, length in calls)


@pytest.mark.skipif(not O_DIRECT, reason="this system has no O_DIRECT")
def test_files_are_opened_for_direct_reads(folder: Path) -> None:
    with patch.object(os, "open", wraps=os.open) as opened, DirectFiles(folder, pytest.fail) as files:
        files.read_into(NAME, arena(10), 0)
    assert opened.call_args_list[0].args[1] & O_DIRECT


@pytest.mark.skipif(not O_DIRECT, reason="this system has no O_DIRECT")
@pytest.mark.parametrize("where", ["open", "read"])
def test_a_file_system_that_refuses_is_read_as_usual_with_one_line(folder: Path, tmp_path: Path, where: str) -> None:
    for n in range(3):
        (tmp_path / f"{n}.bin").write_bytes(CONTENT)
    lines: list[str] = []
    memory = arena(SIZE)
    with refusing(where), DirectFiles(tmp_path, lines.append) as files:
        for n in range(3):
            for _ in range(2):
                memory[:] = bytes(SIZE)
                files.read_into(f"{n}.bin", memory, 0)
                assert bytes(memory) == CONTENT
    assert len(lines) == 1
    assert str(tmp_path) in lines[0]
    assert "past the page cache" in lines[0]


@pytest.mark.parametrize("left", [0, 100, 4096, 3 * 4096, SIZE - 1])
def test_a_file_that_shrank_is_named_with_the_byte(tmp_path: Path, left: int) -> None:
    path = tmp_path / NAME
    path.write_bytes(CONTENT)
    with DirectFiles(tmp_path, pytest.fail) as files:
        files.read_into(NAME, arena(10), 0)
        os.truncate(path, left)
        with pytest.raises(FormatError, match=f"{NAME}: {SIZE} bytes expected, the file ends at byte {left};"):
            files.read_into(NAME, arena(SIZE), 0)
        with pytest.raises(FormatError, match=f"24576 bytes expected, the file ends at byte {max(left, 5 * 4096)};"):
            files.read_aligned(NAME, arena(4096), 5 * 4096)


def test_a_read_error_is_named_with_the_byte(folder: Path) -> None:
    with DirectFiles(folder, pytest.fail) as files:
        failing = patch.object(os, "preadv", side_effect=OSError(errno.EIO, "broken"))
        with failing, pytest.raises(FormatError, match=f"{NAME}: cannot be read at byte 4096 \\(Input/output error"):
            files.read_aligned(NAME, arena(4096), 4096)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with DirectFiles(tmp_path, pytest.fail) as files, pytest.raises(FormatError, match="cannot be opened"):
        files.read_into(NAME, arena(1), 0)


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 5000, 2 << 20, (2 << 20) + 5])
def test_an_arena_starts_on_a_page_of_zeros(n_bytes: int) -> None:
    memory = arena(n_bytes)
    assert memory.nbytes == n_bytes
    assert not memory.readonly
    assert not np.frombuffer(memory, dtype=np.uint8).any()
    if n_bytes:
        page = 2 << 20 if n_bytes >= 2 << 20 else mmap.PAGESIZE
        assert np.frombuffer(memory, dtype=np.uint8).ctypes.data % page == 0


def test_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryError, match="bytes of memory"):
        arena(1 << 60)
