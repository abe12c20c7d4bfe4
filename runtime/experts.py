"""Multiplying with expert matrices straight from their indices.

W[row, 8v : 8v+8] = scale[row] · Σ_stage entry[index], so W·x = scale · Σ_v Σ_stage (entry · x[8v : 8v+8]): the
products of every entry with every piece of x are tabulated once, then each index is one look-up and one addition.
All experts of a layer share the codebooks, hence also the tables of one input.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from container.layout import TILE_ROWS, VEC_DIM
from container.model import KINDS
from container.reader import ContainerReader
from container.records import ExpertRecord
from runtime import kernels
from runtime.gates import F32


class LayerCodebooks:
    """One layer's codebooks, and what its expert matrices do with an input vector."""

    def __init__(self, codebooks: npt.NDArray[np.float16]) -> None:
        """`codebooks` [3 kinds, stages, entries, 8], as the container's reader gives them."""
        # entries last: the table's inner loop runs over them
        by_element = codebooks.astype(np.float32).transpose(0, 1, 3, 2)
        self._codebooks = dict(zip(KINDS, np.ascontiguousarray(by_element), strict=True))

    @classmethod
    def load(cls, reader: ContainerReader, layer: int) -> LayerCodebooks:
        """Raises FormatError for a bad codebook record."""
        return cls(reader.codebooks(layer))

    def table(self, kind: str, x: F32) -> F32:
        """Products of x [cols] with all entries of `kind`: [cols / 8, stages, entries]."""
        books = self._codebooks[kind]
        if x.dtype != np.float32 or x.ndim != 1 or x.size % VEC_DIM:
            raise ValueError(f"{x.dtype} {list(x.shape)} cannot be cut into vectors of {VEC_DIM} f32 elements")
        table = np.empty((x.size // VEC_DIM, books.shape[0], books.shape[2]), dtype=np.float32)
        kernels.build_table(books, np.ascontiguousarray(x), table)
        return table


def matvec(record: ExpertRecord, kind: str, table: F32) -> F32:
    """The product [rows] of one of the record's matrices with the vector that `table` was made of."""
    n_vectors = len(table)
    scales = record.scales[kind].astype(np.float32)
    indices = record.indices[kind]
    n_tiles = -(-scales.size // TILE_ROWS)
    vector_bytes, odd = divmod(indices.size, n_tiles * n_vectors * TILE_ROWS)
    if odd or vector_bytes != (2 if table.shape[1] == 2 else 3):
        raise ValueError(f"{indices.size} index bytes do not fit {scales.size} rows of {n_vectors} vectors")
    out = np.empty(scales.size, dtype=np.float32)
    kernels.vq_matvec(indices.reshape(n_tiles, n_vectors, TILE_ROWS, vector_bytes), table, scales, out)
    return out
