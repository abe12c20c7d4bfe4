"""The searches of convert/beam.py and convert/greedy.py in torch, for any device: the same codes, to the bit.

Every number that a choice depends on is computed as on the processor: the same f32 additions in the same order, the
same tags in the lowest bits of the costs, the same buckets. A fused multiply-add, which torch does not offer, is done
in f64: there the product of two f32 is exact, and the sum is rounded to f32 as the fused one would be, but for one case
in 2^29 where two roundings differ from one. So no matrix product and no TF32 takes part, and devices agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from container.layout import VEC_DIM
from convert.beam import ROW_BITS, BeamTables, bucket_groups
from convert.simd import N_LANES

ROW_MASK = (1 << ROW_BITS) - 1
F32_BYTES = 4


@dataclass(frozen=True)
class TorchGreedy:
    """Codebooks made ready for greedy search on a device."""

    entries: Tensor  # [stages, n, 8] f32
    half_norms: Tensor  # [stages, n] f32: |c|² / 2

    @classmethod
    def of(cls, entries: npt.NDArray[np.float32], device: torch.device) -> TorchGreedy:
        """Tables of `entries` [stages, n, 8]."""
        half_norms = np.square(entries).sum(axis=-1) / 2
        return cls(torch.tensor(entries, device=device), torch.tensor(half_norms, device=device))

    def search(self, vectors: Tensor) -> Tensor:
        """Codes [m, stages] u8 of `vectors` [m, 8] f32; of equally near entries the first."""
        left = vectors.clone()
        codes = []
        for entries, half_norms in zip(self.entries, self.half_norms, strict=True):
            chosen = fused_products(left, -entries, half_norms).argmin(dim=1)
            left -= entries[chosen]
            codes.append(chosen.to(torch.uint8))
        return torch.stack(codes, dim=1)

    @property
    def bytes_per_vector(self) -> int:
        """Most bytes that a search holds at once for each of its vectors."""
        return F32_BYTES * (2 * int(self.half_norms.shape[1]) + 8 * VEC_DIM)


@dataclass(frozen=True)
class TorchBeam:
    """Codebooks made ready for beam search on a device. See BeamTables for the meaning."""

    width: int
    columns: Tensor  # [stages × n, 8] f32: -2 × the entries
    norms: Tensor  # [stages × n] f32
    products: Tensor  # [stages, stages, n, n] f32

    @classmethod
    def of(cls, entries: npt.NDArray[np.float32], width: int, device: torch.device) -> TorchBeam:
        """Tables of `entries` [stages, n, 8], 2 to 4 stages, n a multiple of 64 up to 256."""
        n_stages, n, _ = entries.shape
        tables = BeamTables.of(entries)
        return cls(
            width,
            torch.tensor(-2 * entries.reshape(-1, VEC_DIM), device=device),
            torch.tensor(tables.norms, device=device),
            torch.tensor(tables.products, device=device).view(n_stages, n_stages, n, n),
        )

    def search(self, vectors: Tensor) -> Tensor:
        """Codes [m, stages] u8 of `vectors` [m, 8] f32."""
        _, n_stages, n, _ = self.products.shape
        dots = fused_products(vectors, self.columns, self.norms).view(len(vectors), n_stages, n)
        costs = _squared_norms(vectors)[:, None]
        picks = torch.empty((len(vectors), 1, 0), dtype=torch.int64, device=vectors.device)
        for stage in range(n_stages - 1):
            groups = bucket_groups(stage, self.width)
            keys = self._buckets(dots[:, stage], picks, costs, groups)
            costs, picks = self._drawn(keys, picks, groups)
        return self._finish(dots[:, -1], picks, costs).to(torch.uint8)

    @property
    def bytes_per_vector(self) -> int:
        """Most bytes that a search holds at once for each of its vectors."""
        _, n_stages, n, _ = self.products.shape
        candidates = 2 * self.width * n
        drawing = 10 * self.width * N_LANES
        return F32_BYTES * (2 * n_stages * n + candidates + drawing)

    def _candidates(self, dots: Tensor, picks: Tensor) -> Tensor:
        """What each entry of a stage would add to the squared error, given a beam's choices: [m, beams, n].

        `dots` [m, n] of this stage, `picks` [m, beams, stages before].
        """
        stage = picks.shape[2]
        if stage == 0:
            return dots[:, None].clone()
        total = self._with(picks, 0).add_(dots[:, None])
        for i in range(1, stage):
            total.add_(self._with(picks, i))
        return total

    def _with(self, picks: Tensor, i: int) -> Tensor:
        """Products of stage i's chosen entries with all entries of the stage after `picks`: [m, beams, n]."""
        m, n_beams, stage = picks.shape
        table = self.products[i, stage]
        return table.index_select(0, picks[:, :, i].reshape(-1)).view(m, n_beams, len(table))

    def _buckets(self, dots: Tensor, picks: Tensor, costs: Tensor, groups: int) -> Tensor:
        """The smallest cost of every bucket, its row within the bucket in the lowest bits: [m, beams × groups × 16]."""
        m, n_beams = costs.shape
        total = self._candidates(dots, picks).add_(costs[:, :, None])
        rows = total.shape[2] // (groups * N_LANES)
        numbers = torch.arange(rows, dtype=torch.int32, device=dots.device)
        bits = total.view(torch.int32).view(m, n_beams, rows, groups * N_LANES)
        bits.bitwise_and_(~ROW_MASK).bitwise_or_(numbers[:, None])
        return bits.view(torch.float32).amin(dim=2).view(m, n_beams * groups * N_LANES)

    def _drawn(self, keys: Tensor, picks: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """The `width` smallest buckets as beams: their costs [m, width] and choices [m, width, stages so far + 1]."""
        n_buckets = keys.shape[1]
        tag_mask = (1 << ((n_buckets << ROW_BITS) - 1).bit_length()) - 1
        tags = torch.arange(n_buckets, dtype=torch.int32, device=keys.device) << ROW_BITS
        keys = (keys.view(torch.int32) & ~(tag_mask & ~ROW_MASK) | tags).view(torch.float32)
        # all keys of a vector differ, so their order is one and the same everywhere
        drawn = keys.topk(self.width, dim=1, largest=False, sorted=True).values.view(torch.int32)
        tag = (drawn & tag_mask).to(torch.int64)
        row, bucket = tag & ROW_MASK, tag >> ROW_BITS
        lane, group, beam = bucket % N_LANES, bucket // N_LANES % groups, bucket // (N_LANES * groups)
        entry = (row * groups + group) * N_LANES + lane
        old = picks.gather(1, beam[:, :, None].expand(-1, -1, picks.shape[2]))
        return (drawn & ~tag_mask).view(torch.float32), torch.cat([old, entry[:, :, None]], dim=2)

    def _finish(self, dots: Tensor, picks: Tensor, costs: Tensor) -> Tensor:
        """The last stage: the one cheapest entry over all beams of a vector; codes [m, stages] i64."""
        m, n_beams, _ = picks.shape
        candidates = self._candidates(dots, picks).view(m, n_beams, dots.shape[1] // N_LANES, N_LANES)
        smallest = candidates.amin(dim=2).add_(costs[:, :, None])
        # of equals the first lane, and of that lane's the first beam
        winner = smallest.transpose(1, 2).reshape(m, N_LANES * n_beams).argmin(dim=1)
        lane, beam = winner // n_beams, winner % n_beams
        vector = torch.arange(m, device=dots.device)
        row = candidates[vector, beam, :, lane].argmin(dim=1)
        return torch.cat([picks[vector, beam], (row * N_LANES + lane)[:, None]], dim=1)


def fused_products(x: Tensor, columns: Tensor, start: Tensor) -> Tensor:
    """start[c] + Σ x[v, d]·columns[c, d] as f32 [m, c]: eight fused multiply-adds in the order of d, each rounded."""
    wide, total = columns.to(torch.float64), start.expand(len(x), -1).clone()
    for d in range(VEC_DIM):
        torch.addcmul(total, x[:, d, None].to(torch.float64), wide[:, d], out=total)
    return total


def chunked_search(tables: TorchGreedy | TorchBeam, vectors: Tensor, chunk_bytes: int) -> Tensor:
    """Codes [m, stages] u8 of `vectors` [m, 8], searched in pieces that take about `chunk_bytes` each."""
    step = max(1, chunk_bytes // tables.bytes_per_vector)
    starts = range(0, max(1, len(vectors)), step)
    return torch.cat([tables.search(vectors[start : start + step]) for start in starts])


def _squared_norms(x: Tensor) -> Tensor:
    """Σ x² [m]: products and sums rounded one by one, in order."""
    total = x[:, 0] * x[:, 0]
    for d in range(1, VEC_DIM):
        total = total + x[:, d] * x[:, d]
    return total
