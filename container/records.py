"""The two records of format v0: an expert (one bank entry, one read) and a codebook. Pack and unpack pairs.

Numbers are believed in order: length, magic, identity, format, stride, offsets, then (on request) the crc32.
Every failure raises FormatError or IntegrityError with the file, layer and expert.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from container.errors import FormatError, IntegrityError
from container.indices import index_bytes
from container.layout import (
    ALIGNMENT,
    CODEBOOK_FMT,
    CODEBOOK_HEADER,
    CODEBOOK_MAGIC,
    EXPERT_HEADER,
    EXPERT_MAGIC,
    VEC_DIM,
    ExpertQuant,
    align_up,
)
from container.model import KINDS

Bytes = npt.NDArray[np.uint8]
F16Array = npt.NDArray[np.float16]


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of an expert record lie, for given matrix shapes; all offsets from the record's start."""

    quant: ExpertQuant
    shapes: Mapping[str, tuple[int, int]]  # kind -> (rows, cols)

    @cached_property
    def index_bytes(self) -> dict[str, int]:
        """Bytes of each kind's indices."""
        return {kind: index_bytes(self.shapes[kind], self.quant) for kind in KINDS}

    @cached_property
    def index_offsets(self) -> dict[str, int]:
        """Start of each kind's indices."""
        offsets, position = {}, EXPERT_HEADER.size
        for kind, n_bytes in self.index_bytes.items():
            offsets[kind] = position
            position += n_bytes
        return offsets

    @cached_property
    def scales_offset(self) -> int:
        """Start of the channel scales: gate, then up, then down."""
        return EXPERT_HEADER.size + sum(self.index_bytes.values())

    @cached_property
    def scales_bytes(self) -> int:
        """Bytes of all channel scales, f16."""
        return 2 * sum(self.shapes[kind][0] for kind in KINDS)

    @cached_property
    def stride_bytes(self) -> int:
        """Length of a record, padding included."""
        return align_up(self.scales_offset + self.scales_bytes, ALIGNMENT)


@dataclass(frozen=True)
class ExpertRecord:
    """One expert: raw index bytes and channel scales of its three matrices."""

    layer: int
    expert: int
    codebook_base: int
    indices: Mapping[str, Bytes]  # kind -> flat uint8 in tile order (container.indices)
    scales: Mapping[str, F16Array]  # kind -> [rows]

    def pack(self, layout: RecordLayout) -> bytearray:
        """The record's bytes: header, payload, zero padding."""
        record = bytearray(layout.stride_bytes)
        view = memoryview(record)
        offsets = layout.index_offsets
        for kind in KINDS:
            data = np.ascontiguousarray(self.indices[kind]).view(np.uint8)
            if data.size != layout.index_bytes[kind]:
                raise FormatError(
                    f"layer {self.layer} expert {self.expert} {kind}: {layout.index_bytes[kind]} index bytes expected, "
                    f"found {data.size}"
                )
            view[offsets[kind] : offsets[kind] + data.size] = data.data
        scales = np.concatenate([np.asarray(self.scales[kind], dtype="<f2").reshape(-1) for kind in KINDS])
        payload_end = layout.scales_offset + layout.scales_bytes
        if scales.nbytes != layout.scales_bytes:
            raise FormatError(f"layer {self.layer} expert {self.expert}: one scale per row expected")
        view[layout.scales_offset : payload_end] = scales.view(np.uint8).data
        EXPERT_HEADER.pack_into(
            record,
            0,
            EXPERT_MAGIC,
            self.layer,
            self.expert,
            layout.quant.fmt,
            0,
            self.codebook_base,
            0,
            0,
            layout.stride_bytes // ALIGNMENT,
            offsets["gate"],
            offsets["up"],
            offsets["down"],
            layout.scales_offset,
            zlib.crc32(view[EXPERT_HEADER.size : payload_end]),
            0,
            0,
        )
        return record

    @classmethod
    def unpack(
        cls,
        record: bytes | bytearray | memoryview,
        layout: RecordLayout,
        *,
        layer: int,
        expert: int,
        codebook_base: int,
        check_crc: bool = False,
        source: str = "record",
    ) -> ExpertRecord:
        """Read a record without copying it; the arrays are views of `record`.

        `source` names the file in messages. Raises FormatError when anything in the header contradicts what
        is expected, IntegrityError when `check_crc` finds another checksum.
        """
        where = f"{source}: layer {layer} expert {expert}"
        offsets, crc = _checked_header(
            record, layout, layer=layer, expert=expert, codebook_base=codebook_base, where=where
        )
        data = np.frombuffer(record, dtype=np.uint8)
        scales_offset = offsets[-1]
        scales_end = scales_offset + layout.scales_bytes
        if check_crc:
            found = zlib.crc32(data[EXPERT_HEADER.size : scales_end].data)
            if found != crc:
                raise IntegrityError(
                    f"{where}: crc32 is {found:#010x}, the header says {crc:#010x}: damaged record; fetch the file "
                    "anew or convert the checkpoint again"
                )
        indices = {
            kind: data[start : start + layout.index_bytes[kind]] for kind, start in zip(KINDS, offsets, strict=False)
        }
        scales, position = {}, scales_offset
        for kind in KINDS:
            end = position + 2 * layout.shapes[kind][0]
            scales[kind] = data[position:end].view("<f2")
            position = end
        return cls(layer, expert, codebook_base, indices, scales)


def _checked_header(
    record: bytes | bytearray | memoryview,
    layout: RecordLayout,
    *,
    layer: int,
    expert: int,
    codebook_base: int,
    where: str,
) -> tuple[tuple[int, int, int, int], int]:
    """Offsets (gate, up, down, scales) and crc32 of a record whose header holds what it must."""
    if len(record) < EXPERT_HEADER.size:
        raise FormatError(f"{where}: {len(record)} bytes are too few for a record header ({EXPERT_HEADER.size})")
    fields = EXPERT_HEADER.unpack_from(record)
    magic, found_layer, found_expert, fmt, flags, base, lowrank, _, pages = fields[:9]
    offsets, crc = fields[9:13], fields[13]
    stride = layout.stride_bytes
    for what, found, expected in (
        ("magic", magic, EXPERT_MAGIC),
        ("layer", found_layer, layer),
        ("expert", found_expert, expert),
        ("format", fmt, int(layout.quant.fmt)),
        ("flags", flags, 0),
        ("codebook base", base, codebook_base),
        ("lowrank id", lowrank, 0),
        ("record length", pages * ALIGNMENT, stride),
        ("bytes read", len(record), stride),
        ("gate offset", offsets[0], EXPERT_HEADER.size),
    ):
        if found != expected:
            raise FormatError(f"{where}: {what} is {found:#x}, expected {expected:#x}")
    lengths = [*layout.index_bytes.values(), layout.scales_bytes]
    ends = [*offsets[1:], stride]
    for name, start, length, end in zip((*KINDS, "scales"), offsets, lengths, ends, strict=True):
        if start + length > end:
            raise FormatError(f"{where}: {name} at {start} needs {length} bytes but must end by {end}")
    return (offsets[0], offsets[1], offsets[2], offsets[3]), crc


@dataclass(frozen=True)
class CodebookRecord:
    """One codebook: `entries` [n_entries, 8] f16."""

    id: int
    entries: F16Array

    @staticmethod
    def size(n_entries: int) -> int:
        """Bytes of a codebook record."""
        return CODEBOOK_HEADER.size + 2 * n_entries * VEC_DIM

    def pack(self) -> bytes:
        """The record's bytes. Raises FormatError when the entries are not [n, 8] finite numbers."""
        if self.entries.ndim != 2 or self.entries.shape[1] != VEC_DIM or not np.isfinite(self.entries).all():
            raise FormatError(f"codebook {self.id}: entries must be finite and [n, {VEC_DIM}]")
        n_entries = len(self.entries)
        header = CODEBOOK_HEADER.pack(CODEBOOK_MAGIC, self.id, CODEBOOK_FMT, VEC_DIM, n_entries, 0)
        return header + np.ascontiguousarray(self.entries, dtype="<f2").tobytes()

    @classmethod
    def unpack(cls, record: bytes | memoryview, *, codebook_id: int, n_entries: int, source: str) -> CodebookRecord:
        """Read one record. Raises FormatError when it is not codebook `codebook_id` with `n_entries` finite entries."""
        where = f"{source}: codebook {codebook_id}"
        if len(record) != cls.size(n_entries):
            raise FormatError(f"{where}: {cls.size(n_entries)} bytes expected, found {len(record)}")
        magic, found_id, fmt, vec_dim, found_entries, _ = CODEBOOK_HEADER.unpack_from(record)
        for what, found, expected in (
            ("magic", magic, CODEBOOK_MAGIC),
            ("id", found_id, codebook_id),
            ("format", fmt, CODEBOOK_FMT),
            ("vec_dim", vec_dim, VEC_DIM),
            ("entries", found_entries, n_entries),
        ):
            if found != expected:
                raise FormatError(f"{where}: {what} is {found:#x}, expected {expected:#x}")
        entries = np.frombuffer(record, dtype="<f2", offset=CODEBOOK_HEADER.size).reshape(n_entries, VEC_DIM)
        if not np.isfinite(entries).all():
            raise FormatError(f"{where}: an entry is NaN or infinite")
        return cls(codebook_id, entries)
