"""Multiplying one token with expert matrices straight from their indices.

W[row, 8v : 8v+8] = scale[row] · Σ_stage entry[index], so W·x = scale · Σ_v Σ_stage (entry · x[8v : 8v+8]): the
products of every entry with every piece of x are tabulated once, then each index is one look-up and one addition.
All experts of a layer share the codebooks, hence also the tables of one input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from container.layout import TILE_ROWS, VEC_DIM
from container.records import ExpertRecord
from runtime.compute import expert_kernels
from runtime.compute.gates import F32, Activation
from runtime.compute.matrix import scale_bits
from runtime.compute.team import Team

# Tables of fewer vectors are not shared between threads: waking one takes as long.
_LEAST_VECTORS = 16


@dataclass(frozen=True)
class Tables:
    """What the gate and the up matrices of a layer's experts look up for one token: [vectors, stages, entries]."""

    gate: F32
    up: F32


class LayerCodebooks:
    """One layer's codebooks, and what its experts do with one token."""

    def __init__(self, codebooks: npt.NDArray[np.float16], team: Team) -> None:
        """`codebooks` [3 kinds, stages, entries, 8], as the container's reader gives them."""
        # entries last: they are what the table's rows run over
        by_element = codebooks.astype(np.float32).transpose(0, 1, 3, 2)
        self._books = np.ascontiguousarray(by_element)  # [3 kinds, stages, 8, entries]
        self._team = team

    def tables(self, x: F32) -> Tables:
        """What all experts of this layer need of x [cols]."""
        tables = self._empty_tables(2, x)
        work = partial(expert_kernels.build_tables, self._books, np.ascontiguousarray(x), tables)
        self._team.run(work, tables.shape[1], least=_LEAST_VECTORS)
        return Tables(*tables)

    def experts(self, records: Sequence[ExpertRecord], tables: Tables, activation: Activation) -> list[F32]:
        """Whole experts: down(activation(gate x, up x)), [rows of down] each, for the x that `tables` were made of.

        All of them are two pieces of team work: a thread that sleeps takes long to wake.
        """
        inner, outer = [], []
        outs = []
        for record in records:
            gate, up = _operands(record, "gate", tables.gate), _operands(record, "up", tables.up)
            products = np.empty((3, len(gate[2])), dtype=np.float32)
            if len(up[2]) != products.shape[1]:
                raise ValueError(f"a gate of {len(gate[2])} rows does not fit an up matrix of {len(up[2])}")
            down_table = self._empty_tables(1, products[2])[0]
            settings, rooms = (activation.beta, activation.linear_beta), (products[0], products[1], products[2])
            work = partial(expert_kernels.gated_tiles, gate, up, settings, rooms, self._books[2], down_table)
            inner.append((work, _n_tiles(products.shape[1])))
            down = _operands(record, "down", down_table)
            outs.append(np.empty(len(down[2]), dtype=np.float32))
            outer.append((partial(expert_kernels.multiply_tiles, *down, outs[-1]), _n_tiles(outs[-1].size)))
        self._team.run_all(inner)
        self._team.run_all(outer)
        return outs

    def _empty_tables(self, n_kinds: int, x: F32) -> F32:
        """Room for tables of x [cols]: [kinds, vectors, stages, entries]."""
        if x.dtype != np.float32 or x.ndim != 1 or x.size % VEC_DIM:
            raise ValueError(f"{x.dtype} {list(x.shape)} cannot be cut into vectors of {VEC_DIM} f32 elements")
        _, n_stages, _, n_entries = self._books.shape
        return np.empty((n_kinds, x.size // VEC_DIM, n_stages, n_entries), dtype=np.float32)


# one matrix of a record as the kernels take it: codes in tile order, table, bits of the channel scales
Operands = tuple[npt.NDArray[np.uint8], F32, npt.NDArray[np.uint16]]


def _operands(record: ExpertRecord, kind: str, table: F32) -> Operands:
    indices, scales = record.indices[kind], record.scales[kind]
    expected = _n_tiles(scales.size) * len(table) * TILE_ROWS * (2 if table.shape[1] == 2 else 3)
    if indices.size != expected:
        raise ValueError(f"{indices.size} index bytes do not fit {scales.size} rows of {len(table)} vectors")
    return indices, table, scale_bits(scales)


def _n_tiles(n_rows: int) -> int:
    return -(-n_rows // TILE_ROWS)
