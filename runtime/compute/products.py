"""Matrix products of many tokens at once with stored trunk matrices: rows unpacked to f32 in blocks, then BLAS.

A block is the unit of work that the team shares, and every call into BLAS is single-threaded (`one_blas_thread`), so
the bits of a product depend on the number of tokens alone, never on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController

from container.layout import TILE_ROWS, TrunkFormat, align_up
from runtime.compute import unpack_kernels
from runtime.compute.gates import F32
from runtime.memory.scratch import BLOCK_ROWS, ROW_GAP, block_rows

if TYPE_CHECKING:
    from runtime.compute.matrix import Matrix


class _Buffers(threading.local):
    """Memory of one thread that is used again and again: fresh pages for every block cost as much as unpacking."""

    def __init__(self) -> None:
        self._kept: dict[str, F32] = {}

    def take(self, name: str, n_elements: int) -> F32:
        """Flat uninitialised memory; what this thread took under this name before is gone."""
        kept = self._kept.get(name)
        if kept is None or kept.size < n_elements:
            kept = self._kept[name] = np.empty(n_elements, dtype=np.float32)
        return kept[:n_elements]


buffers = _Buffers()


def unpacking_room(n_rows: int, cols: int) -> tuple[F32, F32]:
    """Memory for unpacked rows, flat and as [n_rows, cols]; valid until this thread asks for other rows."""
    flat = buffers.take("rows", n_rows * (cols + ROW_GAP))
    return flat, flat.reshape(n_rows, cols + ROW_GAP)[:, :cols]


def row_blocks(n_rows: int, cols: int, *, most: int = BLOCK_ROWS) -> list[slice]:
    """How the rows of a matrix are cut into blocks, whatever the number of threads: at whole tiles of rows."""
    if n_rows <= TILE_ROWS:
        return [slice(0, n_rows)]
    most = min(most, block_rows(cols))
    n_blocks = 2 * -(-n_rows // (2 * most))
    size = align_up(-(-n_rows // n_blocks), TILE_ROWS)
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size)]


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it BLAS computes in the thread that calls it alone."""
    with _controller().limit(limits=1, user_api="blas"):
        yield


def multiply(matrix: Matrix, x: F32) -> F32:
    """x [T, cols] → [T, rows]."""
    out = np.empty((len(x), matrix.rows), dtype=np.float32)
    x = np.ascontiguousarray(x)
    blocks = row_blocks(matrix.rows, matrix.cols)

    def part(start: int, stop: int) -> None:
        for rows in blocks[start:stop]:
            np.matmul(x, unpacked(matrix, rows).T, out=out[:, rows])

    matrix.team.run(part, len(blocks))
    return out


def unpacked(matrix: Matrix, rows: slice) -> F32:
    """Rows of a stored matrix as f32 [rows, cols], valid until this thread asks for others."""
    values = matrix.values[rows]
    if matrix.fmt is TrunkFormat.F32:
        return values.view("<f4")
    flat, out = unpacking_room(len(values), matrix.cols)
    scales = matrix.scales[rows].astype(np.float32)
    if matrix.fmt is TrunkFormat.Q8G:
        unpack_kernels.unpack_q8g(values.view(np.int8), scales, matrix.cols, flat, flat.size // len(values))
    else:
        unpack_kernels.unpack_q4g(values, scales, matrix.cols, flat, flat.size // len(values))
    return out
