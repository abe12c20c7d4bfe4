"""Products with expert matrices straight from their indices, for one token: numba loops over some of the row tiles.

`table[v, s, e]` is entry e of stage s times x[8v : 8v+8]; a row of the product is its channel scale times the sum of
what its indices point to. Indices lie in tiles of 64 rows, one vector after the other (docs/FORMAT.md), so a few
vectors of the table stay in the fastest cache while all tiles look them up. Sums run in f32 over those few vectors,
and each such sum then joins a total; their order does not depend on which tiles a call takes.

As in `runtime.compute.trunk_kernels` no bounds are checked and scales are the bits of f16 numbers.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from container.layout import TILE_ROWS, VEC_DIM
from runtime.compute.gates import F32, gated
from runtime.compute.lanes import add, add_scaled, load, look_up, look_up_packed, prefetch, store, widened, zeros

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

_SPAN = 8  # vectors whose look-ups are summed before they join the total: 24 KB of the table
_TILE_VECTORS = TILE_ROWS // VEC_DIM  # vectors that the rows of one tile make


@nb.njit(cache=True, nogil=True)
def build_table(books: F32, x: F32, table: F32, start: int, stop: int) -> None:
    """table [vectors, stages, entries] for vectors start to stop - 1; books [stages, 8, entries], x [8 · vectors]."""
    n_stages, n_entries = books.shape[0], books.shape[2]
    flat_books, flat_table = books.reshape(-1), table.reshape(-1)
    for v in range(start, stop):
        for s in range(n_stages):
            row = (v * n_stages + s) * n_entries
            for e in range(0, n_entries, 32):
                left, right = zeros(), zeros()
                for d in range(VEC_DIM):
                    at = (s * VEC_DIM + d) * n_entries + e
                    left = add_scaled(left, x[v * VEC_DIM + d], load(flat_books, at))
                    right = add_scaled(right, x[v * VEC_DIM + d], load(flat_books, at + 16))
                store(flat_table, row + e, left)
                store(flat_table, row + e + 16, right)


@nb.njit(cache=True, nogil=True)
def build_tables(books: F32, x: F32, tables: F32, start: int, stop: int) -> None:
    """`build_table` for each kind: books [kinds, stages, 8, entries], tables [kinds, vectors, stages, entries]."""
    for kind in range(tables.shape[0]):
        build_table(books[kind], x, tables[kind], start, stop)


@nb.njit(cache=True, nogil=True)
def _add_vq3r(codes: U8, at: int, stride: int, table: F32, first: int, n_vectors: int, sums: F32, t: int) -> None:
    for j in range(0, 3 * TILE_ROWS, 48):
        a, b, c = zeros(), zeros(), zeros()
        for v in range(n_vectors):
            code, entry = at + v * stride + j, (first + v) * 768
            a = look_up(a, table, entry, codes, code, 3, 0)
            b = look_up(b, table, entry, codes, code + 16, 3, 1)
            c = look_up(c, table, entry, codes, code + 32, 3, 2)
        store(sums, t + j, add(load(sums, t + j), a))
        store(sums, t + j + 16, add(load(sums, t + j + 16), b))
        store(sums, t + j + 32, add(load(sums, t + j + 32), c))


@nb.njit(cache=True, nogil=True)
def _add_vq2r(codes: U8, at: int, stride: int, table: F32, first: int, n_vectors: int, sums: F32, t: int) -> None:
    for j in range(0, 2 * TILE_ROWS, 32):
        a, b = zeros(), zeros()
        for v in range(n_vectors):
            code, entry = at + v * stride + j, (first + v) * 512
            a = look_up(a, table, entry, codes, code, 2, 0)
            b = look_up(b, table, entry, codes, code + 16, 2, 0)
        store(sums, t + j, add(load(sums, t + j), a))
        store(sums, t + j + 16, add(load(sums, t + j + 16), b))


@nb.njit(cache=True, nogil=True)
def _add_vq4p(codes: U8, at: int, stride: int, table: F32, first: int, n_vectors: int, sums: F32, t: int) -> None:
    for j in range(0, TILE_ROWS, 32):
        a, b = zeros(), zeros()
        for v in range(n_vectors):
            code, entry = at + v * stride + 3 * j, (first + v) * 256
            a = look_up_packed(a, table, entry, codes, code)
            b = look_up_packed(b, table, entry, codes, code + 48)
        store(sums, t + j, add(load(sums, t + j), a))
        store(sums, t + j + 16, add(load(sums, t + j + 16), b))


@nb.njit(cache=True, nogil=True)
def _tile_sums(codes: U8, table: F32, sums: F32, start: int, stop: int) -> None:
    """sums [tiles, 64 · n] for tiles start to stop - 1: row r of a tile is the sum of its elements r · n on.

    n is the number of stages, or 1 for VQ4P, whose stages are added at once. The number of stages tells the format.
    """
    n_vectors, n_stages = table.shape[0], table.shape[1]
    stride = TILE_ROWS * (2 if n_stages == 2 else 3)
    flat_table, flat_sums, width = table.reshape(-1), sums.reshape(-1), sums.shape[1]
    for n in range(flat_sums.size):
        flat_sums[n] = 0
    for first in range(0, n_vectors, _SPAN):
        n = min(_SPAN, n_vectors - first)
        for tile in range(start, stop):
            at, t = (tile * n_vectors + first) * stride, (tile - start) * width
            # what comes next lies too far away for the processor to guess
            ahead = at + n_vectors * stride if tile + 1 < stop else (start * n_vectors + first + n) * stride
            for line in range(ahead, ahead + n * stride, 64):
                prefetch(codes, line)
            if n_stages == 3:
                _add_vq3r(codes, at, stride, flat_table, first, n, flat_sums, t)
            elif n_stages == 2:
                _add_vq2r(codes, at, stride, flat_table, first, n, flat_sums, t)
            else:
                _add_vq4p(codes, at, stride, flat_table, first, n, flat_sums, t)


@nb.njit(cache=True, nogil=True)
def multiply_tiles(codes: U8, table: F32, scales: U16, out: F32, start: int, stop: int) -> None:
    """out [rows] of row tiles start to stop - 1, for codes in tile order, scales [rows]."""
    n = table.shape[1] if table.shape[1] < 4 else 1
    sums = np.empty((stop - start, TILE_ROWS * n), dtype=np.float32)
    _tile_sums(codes, table, sums, start, stop)
    flat, first = sums.reshape(-1), start * TILE_ROWS
    for row in range(first, min(stop * TILE_ROWS, out.size)):
        total = np.float32(0)
        for s in range(n):
            total += flat[(row - first) * n + s]
        out[row] = widened(scales[row]) * total


@nb.njit(cache=True, nogil=True)
def gated_tiles(
    gate: tuple[U8, F32, U16],
    up: tuple[U8, F32, U16],
    activation: tuple[float, float],
    work: tuple[F32, F32, F32],
    down_books: F32,
    down_table: F32,
    start: int,
    stop: int,
) -> None:
    """Gate and up matrix, activation, and the table for the down matrix, of row tiles start to stop - 1.

    `gate` and `up` are (codes in tile order, table, scales [rows]); `activation` is (beta, linear beta) of `gated`;
    `work` holds two arrays [rows] for the products and one for what comes out of the activation;
    `down_table` [rows / 8, stages, entries] gets the vectors that those rows make.
    """
    gate_out, up_out, inner = work
    multiply_tiles(gate[0], gate[1], gate[2], gate_out, start, stop)
    multiply_tiles(up[0], up[1], up[2], up_out, start, stop)
    for row in range(start * TILE_ROWS, min(stop * TILE_ROWS, inner.size)):
        inner[row] = gated(gate_out[row], up_out[row], activation[0], activation[1])
    end = min(stop * _TILE_VECTORS, down_table.shape[0])
    build_table(down_books, inner, down_table, start * _TILE_VECTORS, end)
