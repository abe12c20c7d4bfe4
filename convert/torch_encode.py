"""Encoding rows of an expert matrix on a torch device: decode, scale, search and fit there, pack on the host.

What goes to the device are the shard's raw bytes, what comes back are codes and three sums a row. Two threads at a time
have a turn on the device, each with its own stream: while the kernels of one run, the other copies its bytes there,
or packs what came back, and a third thread reads the next expert.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from container.layout import TILE_ROWS, VEC_DIM, ExpertQuant
from convert.device import SEARCH_BYTES, STRIP_WEIGHTS
from convert.encode import Codes, EncodedRows, F32Array, F64Array, Numbers, encoded_rows, improve_odd_rows
from convert.source import RawRows, SourceTensor
from convert.timing import Timing
from convert.torch_decode import decode
from convert.torch_device import device_named
from convert.torch_search import TorchBeam, TorchGreedy, chunked_search


class TorchEncoder:
    """The codebooks of one kind on a device: the same codes as `convert.encode.Encoder`."""

    def __init__(self, entries: F32Array, quant: ExpertQuant, beam_width: int, device: str) -> None:
        """`entries` [stages, n, 8] are f16-rounded; `beam_width` 1 is greedy search; `device` is not cpu."""
        self.entries = entries
        self.quant = quant
        self.device = device_named(device)
        with self.device.turn():  # these copies are finished when they return, so any stream may use them
            self._tables = (
                TorchBeam.of(entries, beam_width, self.device.torch)
                if beam_width > 1
                else TorchGreedy.of(entries, self.device.torch)
            )
            self._books = torch.tensor(entries, device=self.device.torch)

    def search(self, vectors: F32Array) -> Codes:
        """Codes [n, stages] of `vectors` [n, 8], row-scaled."""
        with self.device.turn():
            on_device = self.device.put(vectors).view(torch.float32).view(-1, VEC_DIM)
            return np.asarray(chunked_search(self._tables, on_device, SEARCH_BYTES).cpu())

    def strip_rows(self, cols: int) -> int:
        """A whole matrix of a real model, but no more than the device's memory is reckoned with."""
        return max(1, STRIP_WEIGHTS // (cols * TILE_ROWS)) * TILE_ROWS

    def encode(self, source: SourceTensor, raw: RawRows, timing: Timing) -> EncodedRows | int:
        """Encode rows of `source`, read as `raw`. Returns the first row with NaN or infinity instead, if any.

        `timing` counts the whole turn as encoding: the device works while the host is ahead.
        """
        with timing.step("encode"):
            with self.device.turn():
                rows, scales = _scaled(decode(self.device, source, raw))
                row_scales = scales.cpu().numpy()
                if not np.isfinite(row_scales).all():
                    return int(np.flatnonzero(~np.isfinite(row_scales))[0])
                codes, sums = self._fitted(rows)

                def search_again(numbers: Numbers, divisors: F64Array) -> tuple[Codes, F64Array]:
                    return self._fitted(_divided(rows, numbers, divisors))

                improve_odd_rows(codes, sums, row_scales, search_again)
            return encoded_rows(codes, sums, row_scales, self.quant)

    def _fitted(self, rows: Tensor) -> tuple[Codes, F64Array]:
        """Codes [r, vectors, stages] of `rows` [r, cols], already scaled, and the sums [r, 3] of `_fit_sums`."""
        codes = chunked_search(self._tables, rows.view(-1, VEC_DIM), SEARCH_BYTES)
        sums = _fit_sums(rows, codes, self._books)
        codes = codes.view(len(rows), rows.shape[1] // VEC_DIM, self.quant.n_stages)
        return codes.cpu().numpy(), sums.cpu().numpy()


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by their root mean square, and the divisors f64 [r]: convert.kernels.scale_rows.

    The divisor of a zero row is 0, that of a row with NaN or infinity is not finite.
    """
    wide = rows.to(torch.float64)
    squares = wide.square().sum(dim=1)
    scales = (squares / rows.shape[1]).sqrt()
    factors = torch.where(squares > 0, 1 / scales, 1.0)
    return wide.mul_(factors[:, None]).to(torch.float32), scales


def _divided(rows: Tensor, numbers: Numbers, divisors: F64Array) -> Tensor:
    """Some rows, f32 [numbers, cols], divided in f64."""
    chosen = rows[torch.from_numpy(numbers).to(rows.device)].to(torch.float64)
    return chosen.div_(torch.from_numpy(divisors).to(rows.device)[:, None]).to(torch.float32)


def _fit_sums(rows: Tensor, codes: Tensor, entries: Tensor) -> Tensor:
    """(Σ x·y, Σ y·y, Σ x·x) in f64 [r, 3] of rows x and their decoded codes y: convert.kernels.fit_rows."""
    decoded = torch.zeros((len(codes), VEC_DIM), dtype=torch.float32, device=rows.device)
    for stage, book in enumerate(entries):
        decoded += book.index_select(0, codes[:, stage].to(torch.int32))
    x, y = rows.to(torch.float64), decoded.view_as(rows).to(torch.float64)
    return torch.stack([(x * y).sum(dim=1), (y * y).sum(dim=1), (x * x).sum(dim=1)], dim=1)
