"""One pass over one file of a container: every byte is read once, hashed on the way, and looked at.

Memory is a piece, or one expert record, whatever the file's size. What is wrong goes into the scan's findings;
nothing but an interruption is raised, so that one bad file never hides another.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from container.errors import FormatError, shown
from container.layout import CODEBOOK_HEADER, EXPERT_HEADER, SPECIALS_NAME, TRUNK_ALIGNMENT, ExpertQuant, TrunkFormat
from container.manifest import BankEntry, TrunkEntry
from container.model import KINDS
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from validate.report import Findings

Bytes = npt.NDArray[np.uint8]
Tick = Callable[[int], None]  # told how many bytes were read; may raise to stop

PIECE_BYTES = 4 << 20
MAX_SIDECAR_BYTES = 16 << 20


@dataclass
class FileScan:
    """What one pass found. `n_bytes` is None when the file could not be opened."""

    n_bytes: int | None = None
    bytes_read: int = 0
    sha256: str | None = None  # when it was asked for and the whole file was read
    n_records: int = 0
    n_codebooks: int = 0
    n_tensors: int = 0
    n_crc32: int = 0  # compared
    findings: Findings = field(default_factory=Findings)


class Stream:
    """A regular file read from beginning to end."""

    def __init__(self, path: Path, tick: Tick, *, hashed: bool) -> None:
        self.path = path
        self.position = 0
        self._tick = tick
        self._sha256 = hashlib.sha256() if hashed else None
        self._buffer: Bytes = np.empty(0, dtype=np.uint8)

    def __enter__(self) -> Stream:
        """Raises OSError or FormatError when it cannot be opened."""
        if not stat.S_ISREG(self.path.stat().st_mode):  # before opening: a pipe would wait for a writer
            raise FormatError(f"{self.path}: is not a regular file")
        self._file = self.path.open("rb", buffering=0)
        self.n_bytes = os.fstat(self._file.fileno()).st_size
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return self.n_bytes - self.position

    def read(self, n_bytes: int) -> Bytes:
        """The next bytes, in a buffer that the next call overwrites. Raises FormatError when the file ends."""
        if self._buffer.size < n_bytes:
            self._buffer = np.empty(n_bytes, dtype=np.uint8)
        piece, done = self._buffer[:n_bytes], 0
        while done < n_bytes:
            count = self._file.readinto(piece[done:].data)
            if not count:
                raise FormatError(f"{self.path}: the file ended at byte {self.position + done} while being read")
            done += count
        self.position += n_bytes
        if self._sha256 is not None:
            self._sha256.update(piece.data)
        self._tick(n_bytes)
        return piece

    def pieces(self, n_bytes: int) -> Iterator[Bytes]:
        """The next `n_bytes` in pieces; each is good until the next."""
        while n_bytes:
            yield self.read(min(n_bytes, PIECE_BYTES))
            n_bytes -= min(n_bytes, PIECE_BYTES)

    def finish(self) -> str | None:
        """Read what is left. Returns the file's sha256, when asked for."""
        for _ in self.pieces(self.left):
            pass
        return None if self._sha256 is None else self._sha256.hexdigest()


Look = Callable[[Stream, FileScan], None]


def scan_file(path: Path, look: Look, tick: Tick, *, hashed: bool) -> FileScan:
    """Read all of `path`, `look` at the beginning of it, hash it if `hashed`."""
    scan = FileScan()
    try:
        with Stream(path, tick, hashed=hashed) as stream:
            scan.n_bytes = stream.n_bytes
            try:
                look(stream, scan)
                scan.sha256 = stream.finish()
            finally:
                scan.bytes_read = stream.position
    except FileNotFoundError:
        scan.findings.problem(f"{path}: missing")
    except FormatError as error:
        scan.findings.problem(str(error))
    except OSError as error:
        scan.findings.problem(f"{path}: cannot be read ({os.strerror(error.errno or 0)})")
    return scan


def look_at_bank(layer: int, bank: BankEntry, layout: RecordLayout) -> Look:
    """Every record: header, crc32, finite channel scales, zero padding."""

    def look(stream: Stream, scan: FileScan) -> None:
        stride = layout.stride_bytes
        for expert in range(min(bank.n_experts, stream.n_bytes // stride)):
            record = stream.read(stride)
            where = f"{stream.path}: layer {layer} expert {expert}"
            try:
                unpacked = ExpertRecord.unpack(
                    record.data,
                    layout,
                    layer=layer,
                    expert=expert,
                    codebook_base=bank.codebook_base,
                    check_crc=True,
                    source=str(stream.path),
                )
            except FormatError as error:
                scan.findings.problem(str(error))
            else:
                _look_at_record(record, unpacked, scan.findings, where)
                scan.n_crc32 += 1
            scan.n_records += 1

    return look


def _look_at_record(record: Bytes, unpacked: ExpertRecord, findings: Findings, where: str) -> None:
    """What a reader does not check: reserved fields, channel scales, padding."""
    fields = EXPERT_HEADER.unpack_from(record.data)
    reserved, scales_offset = (fields[7], *fields[14:]), fields[12]
    if any(reserved):
        findings.problem(f"{where}: the reserved header fields are {', '.join(map(hex, reserved))}, expected 0")
    for kind in KINDS:
        bad = np.flatnonzero(~np.isfinite(unpacked.scales[kind]))
        if bad.size:
            findings.problem(
                f"{where} {kind}: {bad.size} channel scale(s) are NaN or infinite, the first of row {int(bad[0])}"
            )
    padding = scales_offset + sum(scales.nbytes for scales in unpacked.scales.values())
    used = np.flatnonzero(record[padding:])
    if used.size:
        findings.problem(f"{where}: byte {padding + int(used[0])} of the record lies in its padding and is not 0")


def look_at_codebooks(quant: ExpertQuant) -> Look:
    """Every record of the file, whoever uses it: header, id in order, finite entries."""

    def look(stream: Stream, scan: FileScan) -> None:
        n_bytes = CodebookRecord.size(quant.n_entries)
        for codebook_id in range(stream.n_bytes // n_bytes):
            record = stream.read(n_bytes)
            try:
                CodebookRecord.unpack(
                    record.data, codebook_id=codebook_id, n_entries=quant.n_entries, source=str(stream.path)
                )
            except FormatError as error:
                scan.findings.problem(str(error))
            reserved = CODEBOOK_HEADER.unpack_from(record.data)[5]
            if reserved:
                scan.findings.problem(
                    f"{stream.path}: codebook {codebook_id}: the reserved header field is {reserved:#x}, expected 0"
                )
            scan.n_codebooks += 1
        if stream.left:
            scan.findings.problem(
                f"{stream.path}: {stream.left} bytes follow the last whole codebook ({n_bytes} bytes each)"
            )

    return look


def look_at_trunk(trunk: tuple[TrunkEntry, ...]) -> Look:
    """Every tensor: inside the file, apart from the others, crc32 where given, finite; every gap: short and zero."""

    def look(stream: Stream, scan: FileScan) -> None:
        before = "the start"
        for entry in sorted(trunk, key=lambda entry: entry.offset):
            where = f"{stream.path}: {entry.name}"
            end = entry.offset + entry.n_bytes
            if end > stream.n_bytes:
                scan.findings.problem(f"{where}: takes bytes {entry.offset} to {end}, the file has {stream.n_bytes}")
            elif entry.offset < stream.position:
                scan.findings.problem(f"{where}: starts at byte {entry.offset}, inside {before}")
            else:
                _look_at_gap(
                    stream, scan.findings, entry.offset - stream.position, f"between {before} and {entry.name}"
                )
                _look_at_tensor(stream, scan, entry, where)
                before = entry.name
        _look_at_gap(stream, scan.findings, stream.left, f"after {before}")

    return look


def _look_at_gap(stream: Stream, findings: Findings, n_bytes: int, where: str) -> None:
    start, n_used = stream.position, 0
    for piece in stream.pieces(n_bytes):
        n_used += int(np.count_nonzero(piece))
    if n_bytes >= TRUNK_ALIGNMENT:
        findings.problem(
            f"{stream.path}: {n_bytes} bytes at {start}, {where}, belong to no tensor; a gap has at most "
            f"{TRUNK_ALIGNMENT - 1}"
        )
    if n_used:
        findings.problem(f"{stream.path}: {n_used} of {n_bytes} bytes at {start}, {where}, are not 0")


def _look_at_tensor(stream: Stream, scan: FileScan, entry: TrunkEntry, where: str) -> None:
    crc, finite, n_used = 0, True, 0
    for part, n_bytes in _parts(entry):
        for piece in stream.pieces(n_bytes):
            crc = zlib.crc32(piece.data, crc)
            if part == "gap":
                n_used += int(np.count_nonzero(piece))
            elif part != "integers":
                finite = finite and bool(np.isfinite(piece.view(part)).all())
    scan.n_tensors += 1
    scan.n_crc32 += entry.crc32 is not None
    if entry.crc32 not in (None, crc):
        scan.findings.problem(f"{where}: crc32 is {crc:#010x}, the manifest says {entry.crc32:#010x}: damaged tensor")
    if not finite:
        what = "values" if entry.fmt is TrunkFormat.F32 else "group scales"
        scan.findings.problem(f"{where}: {what} are NaN or infinite")
    n_unused = entry.n_bytes - entry.size.total_bytes
    if n_used or n_unused >= 2 * TRUNK_ALIGNMENT:
        scan.findings.problem(f"{where}: {n_unused} of its bytes are neither values nor scales, {n_used} of them not 0")


def _parts(entry: TrunkEntry) -> list[tuple[str, int]]:
    """What a tensor's bytes are, in order: a numpy dtype of floats, "integers" or "gap"; and how many."""
    values_bytes = entry.size.values_bytes
    if entry.scale_offset is None:
        return [("<f4", values_bytes)]
    gap = entry.scale_offset - entry.offset - values_bytes
    scales_bytes = entry.size.total_bytes - values_bytes
    rest = entry.n_bytes - entry.size.total_bytes - gap
    return [("integers", values_bytes), ("gap", gap), ("<f2", scales_bytes), ("gap", rest)]


def look_at_nothing(stream: Stream, scan: FileScan) -> None:
    """For a file whose bytes only its checksum can judge."""


def look_at_json(stream: Stream, scan: FileScan) -> None:
    """A sidecar that must be valid JSON; specials.json must list ids and texts."""
    if stream.n_bytes > MAX_SIDECAR_BYTES:
        scan.findings.problem(f"{stream.path}: {stream.n_bytes} bytes are too many for a sidecar ({MAX_SIDECAR_BYTES})")
        return
    try:
        value = json.loads(stream.read(stream.n_bytes).tobytes())
    except (ValueError, RecursionError) as error:
        scan.findings.problem(f"{stream.path}: not valid JSON ({shown(str(error))})")
        return
    if stream.path.name != SPECIALS_NAME:
        if not isinstance(value, dict):
            scan.findings.problem(f"{stream.path}: must hold an object, found {type(value).__name__}")
    elif not isinstance(value, list) or not all(
        isinstance(special, dict) and type(special.get("id")) is int and isinstance(special.get("text"), str)
        for special in value
    ):
        scan.findings.problem(f'{stream.path}: must list objects {{"id": number, "text": string}}')
