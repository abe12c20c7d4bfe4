from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import FormatError
from container.indices import index_bytes, pack_indices, unpack_indices
from container.layout import TILE_ROWS, VEC_DIM, VQ2R, VQ3R, VQ4P
from tests import strategies


def pack_slowly(codes, quant) -> bytes:
    """Byte by byte: where each index lies, from the text of the format."""
    rows, n_vectors, _ = codes.shape
    n_tiles = -(-rows // TILE_ROWS)
    data = bytearray(n_tiles * n_vectors * TILE_ROWS * quant.vector_bytes)
    for row in range(rows):
        for vector in range(n_vectors):
            position = ((row // TILE_ROWS * n_vectors + vector) * TILE_ROWS + row % TILE_ROWS) * quant.vector_bytes
            number = sum(int(index) << stage * quant.index_bits for stage, index in enumerate(codes[row, vector]))
            data[position : position + quant.vector_bytes] = number.to_bytes(quant.vector_bytes, "little")
    return bytes(data)


@given(strategies.codes())
def test_packing_matches_the_slow_oracle_and_comes_back(drawn):
    quant, codes = drawn
    shape = (codes.shape[0], codes.shape[1] * VEC_DIM)
    packed = pack_indices(codes, quant)
    assert packed.tobytes() == pack_slowly(codes, quant)
    assert packed.size == index_bytes(shape, quant)
    np.testing.assert_array_equal(unpack_indices(packed, shape, quant), codes)


@given(strategies.codes(), st.integers(1, 300))
def test_other_lengths_are_refused(drawn, missing):
    quant, codes = drawn
    packed = pack_indices(codes, quant)
    shape = (codes.shape[0], codes.shape[1] * VEC_DIM)
    with pytest.raises(FormatError, match=f"take {packed.size} bytes"):
        unpack_indices(packed[: max(packed.size - missing, 0)], shape, quant)
    with pytest.raises(FormatError):
        unpack_indices(np.append(packed, np.zeros(missing, np.uint8)), shape, quant)


def test_codes_that_do_not_fit_the_format_are_refused():
    with pytest.raises(FormatError, match="64 entries, found index 64"):
        pack_indices(np.full((1, 1, 4), 64, dtype=np.uint8), VQ4P)
    with pytest.raises(FormatError, match="3 stages, the codes have 2"):
        pack_indices(np.zeros((1, 1, 2), dtype=np.uint8), VQ3R)


def test_columns_must_be_whole_vectors():
    with pytest.raises(FormatError, match="2 × 12"):
        index_bytes((2, 12), VQ2R)
