"""What a layer's experts do with many tokens at once: index tiles unpacked to f32 in blocks of rows, then BLAS.

Between two matrices everything is kept transposed, [rows, tokens]: so BLAS is fastest, and scales belong to rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from container.layout import TILE_ROWS, VEC_DIM
from container.model import KINDS
from container.records import ExpertRecord
from runtime.compute import row_kernels, unpack_kernels
from runtime.compute.gates import F32, Activation
from runtime.compute.products import buffers, row_blocks, unpacking_room
from runtime.compute.team import Team

Ids = npt.NDArray[np.int64]

_GATED_ROWS = 256  # rows of gate and of up that are unpacked together


class ExpertProducts:
    """One layer's codebooks, and the products of its expert matrices with many tokens."""

    def __init__(self, codebooks: npt.NDArray[np.float16], activation: Activation, team: Team) -> None:
        """`codebooks` [3 kinds, stages, entries, 8], as the container's reader gives them."""
        self._n_stages = codebooks.shape[1]
        self._entries = dict(zip(KINDS, codebooks.astype(np.float32).reshape(len(KINDS), -1), strict=True))
        self._activation = activation
        self._team = team

    def add_expert(self, record: ExpertRecord, x: F32, tokens: Ids, weights: F32, total: F32) -> None:
        """total[:, tokens[i]] += weights[i] · down(activation(gate x[i], up x[i])).

        x [n, width], tokens and weights [n], no token twice; total [width, T].
        """
        inner = self._gated(record, x)
        scales = record.scales["down"].astype(np.float32)
        blocks = row_blocks(len(total), len(inner))

        def part(start: int, stop: int) -> None:
            for rows in blocks[start:stop]:
                out = buffers.take("down", (rows.stop - rows.start) * len(x)).reshape(-1, len(x))
                np.matmul(self._unpacked(record, ("down",), rows, len(inner)), inner, out=out)
                row_kernels.add_columns(out, scales[rows], tokens, weights, total[rows])

        self._team.run(part, len(blocks))

    def _gated(self, record: ExpertRecord, x: F32) -> F32:
        """activation(gate x, up x) of x [n, cols], transposed: [rows of gate, n]."""
        n_rows, cols = record.scales["gate"].size, x.shape[1]
        out = np.empty((n_rows, len(x)), dtype=np.float32)
        scales = [record.scales[kind].astype(np.float32) for kind in ("gate", "up")]
        blocks = row_blocks(n_rows, 2 * cols, most=_GATED_ROWS)

        def part(start: int, stop: int) -> None:
            for rows in blocks[start:stop]:
                both = buffers.take("gated", 2 * (rows.stop - rows.start) * len(x)).reshape(2, -1, len(x))
                np.matmul(self._unpacked(record, ("gate", "up"), rows, cols), x.T, out=both.reshape(-1, len(x)))
                both[0] *= scales[0][rows, None]
                both[1] *= scales[1][rows, None]
                self._activation(both[0], both[1], out[rows])

        self._team.run(part, len(blocks))
        return out

    def _unpacked(self, record: ExpertRecord, kinds: tuple[str, ...], rows: slice, cols: int) -> F32:
        """`rows` of some matrices one below the other, without their scales: [kinds · rows, cols]."""
        n_rows = rows.stop - rows.start
        flat, out = unpacking_room(len(kinds) * n_rows, cols)
        stride = flat.size // len(out)
        for n, kind in enumerate(kinds):
            n_tiles = -(-record.scales[kind].size // TILE_ROWS)
            tiles = record.indices[kind].reshape(n_tiles, cols // VEC_DIM, TILE_ROWS, -1)
            for first in range(0, n_rows, TILE_ROWS):
                tile = tiles[(rows.start + first) // TILE_ROWS]
                target = flat[(n * n_rows + first) * stride :]
                n_wanted = min(TILE_ROWS, n_rows - first)
                unpack_kernels.unpack_tile(tile, self._entries[kind], self._n_stages, target, stride, n_wanted)
        return out
