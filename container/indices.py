"""Index tiling of expert matrices: codes ⇄ bytes, one pair for every expert format.

Order on disk (docs/FORMAT.md): `[row tile of 64][vector][row in tile][vector bytes]`; the last tile is filled
up with rows of index 0. VQ3R and VQ2R store one byte per stage; VQ4P packs four 6-bit indices into three bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from container.errors import FormatError
from container.layout import TILE_ROWS, VEC_DIM, ExpertQuant, align_up

Codes = npt.NDArray[np.uint8]  # [rows, vectors, stages]


def index_bytes(shape: tuple[int, int], quant: ExpertQuant) -> int:
    """Bytes of one matrix's indices. Raises FormatError when the columns are no whole number of vectors."""
    rows, cols = shape
    if cols % VEC_DIM:
        raise FormatError(f"an expert matrix of {rows} × {cols} cannot be cut into vectors of {VEC_DIM} weights")
    return align_up(rows, TILE_ROWS) * (cols // VEC_DIM) * quant.vector_bytes


def pack_indices(codes: Codes, quant: ExpertQuant) -> Codes:
    """Codes [rows, vectors, stages] → flat uint8 bytes in tile order.

    Raises FormatError when a code is outside the codebook or the stages do not match the format.
    """
    rows, n_vectors, n_stages = codes.shape
    if n_stages != quant.n_stages:
        raise FormatError(f"{quant.fmt.name} has {quant.n_stages} stages, the codes have {n_stages}")
    if quant.n_entries < 256 and codes.size and int(codes.max()) >= quant.n_entries:
        raise FormatError(f"{quant.fmt.name} has {quant.n_entries} entries, found index {int(codes.max())}")
    rows_padded = align_up(rows, TILE_ROWS)
    packed = _pack_6_bits(codes) if quant.index_bits == 6 else codes
    tiles = np.zeros((rows_padded // TILE_ROWS, n_vectors, TILE_ROWS, quant.vector_bytes), dtype=np.uint8)
    whole = rows // TILE_ROWS
    tiles[:whole] = packed[: whole * TILE_ROWS].reshape(whole, TILE_ROWS, *tiles.shape[1::2]).transpose(0, 2, 1, 3)
    if rows % TILE_ROWS:
        tiles[whole, :, : rows % TILE_ROWS] = packed[whole * TILE_ROWS :].transpose(1, 0, 2)
    return tiles.reshape(-1)


def unpack_indices(data: Codes, shape: tuple[int, int], quant: ExpertQuant) -> Codes:
    """Flat uint8 bytes in tile order → codes [rows, vectors, stages] of a matrix of `shape` (rows, cols).

    Raises FormatError when the number of bytes does not fit the shape.
    """
    rows, cols = shape
    expected = index_bytes(shape, quant)
    if data.size != expected:
        raise FormatError(f"indices of a {rows} × {cols} matrix take {expected} bytes, found {data.size}")
    tiles = data.reshape(-1, cols // VEC_DIM, TILE_ROWS, quant.vector_bytes)
    packed = tiles.transpose(0, 2, 1, 3).reshape(-1, cols // VEC_DIM, quant.vector_bytes)[:rows]
    return _unpack_6_bits(packed) if quant.index_bits == 6 else np.ascontiguousarray(packed)


def _pack_6_bits(codes: Codes) -> Codes:
    s0, s1, s2, s3 = np.moveaxis(codes, -1, 0)
    return np.stack([s0 | s1 << 6, s1 >> 2 | s2 << 4, s2 >> 4 | s3 << 2], axis=-1)


def _unpack_6_bits(packed: Codes) -> Codes:
    b0, b1, b2 = np.moveaxis(packed, -1, 0)
    return np.stack([b0 & 63, (b0 >> 6 | b1 << 2) & 63, (b1 >> 4 | b2 << 4) & 63, b2 >> 2], axis=-1)
