"""Safetensors headers read by ourselves, because the library gives no byte ranges.

File: u64 header length, JSON header, tensor bytes. Everything is checked before it is used, and nothing is
allocated on the file's bare word: length against the file, JSON, known dtypes, shape × dtype = byte range,
no overlap, no hole, no trailing byte (source of the rules: the format section of safetensors' README).
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container.errors import ShardError, shown
from container.strict_json import parse_object

# The library refuses larger headers too; K3's are 0.8 MB.
MAX_HEADER_BYTES = 100_000_000
LENGTH = struct.Struct("<Q")
# numpy's and torch's limit; without one, the product of a hostile shape takes minutes
MAX_DIMENSIONS = 64

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True)
class ShardTensor:
    """One tensor of a shard; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class ShardHeader:
    """All tensors of one shard, in file order, and the file's size."""

    path: Path
    file_bytes: int
    data_offset: int  # where the header ends and the tensors begin
    tensors: dict[str, ShardTensor]


def read_shard_header(path: Path) -> ShardHeader:
    """Read and check the header of one safetensors file.

    Raises ShardError, naming the file and the tensor, when the file is absent, truncated, too long, or its
    header contradicts itself.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ShardError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            start = file.read(LENGTH.size)
            raw = file.read(header_size(start, status.st_size, path) - LENGTH.size)
    except OSError as error:
        raise ShardError(f"{path}: cannot be read ({os.strerror(error.errno or 0)})") from None
    return parse_shard_header(start + raw, status.st_size, path)


def parse_shard_header(raw: bytes, file_bytes: int, path: Path) -> ShardHeader:
    """Check the first bytes of a shard of `file_bytes`, from its first byte to its first weight; `path` names it.

    Raises ShardError as `read_shard_header` does.
    """
    data_offset = header_size(raw[: LENGTH.size], file_bytes, path)
    if len(raw) != data_offset:
        raise ShardError(f"{path}: the file ended inside its header")
    entries = _parse(raw[LENGTH.size :], path)
    tensors = sorted(
        (_tensor(name, entry, data_offset, path) for name, entry in entries.items()),
        key=lambda tensor: (tensor.offset, tensor.n_bytes, tensor.name),
    )
    _check_tiling(tensors, data_offset, file_bytes, path)
    return ShardHeader(path, file_bytes, data_offset, {tensor.name: tensor for tensor in tensors})


def header_size(start: bytes, file_bytes: int, path: Path) -> int:
    """Bytes from a shard's first to its first weight, by its first 8 bytes. Raises ShardError."""
    if len(start) < LENGTH.size:
        raise ShardError(f"{path}: {file_bytes} bytes are too few for a safetensors file")
    (length,) = LENGTH.unpack(start)
    if length > MAX_HEADER_BYTES:
        raise ShardError(f"{path}: header of {length} bytes announced, at most {MAX_HEADER_BYTES} allowed")
    if LENGTH.size + length > file_bytes:
        raise ShardError(
            f"{path}: header of {length} bytes announced in a file of {file_bytes}: truncated, download it again"
        )
    return LENGTH.size + int(length)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        entries = parse_object(raw)
    except ValueError as error:
        raise ShardError(f"{path}: header is not valid JSON ({error})") from None
    if not raw.startswith(b"{"):
        raise ShardError(f"{path}: header must be a JSON object starting at its first byte")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ShardError(f"{path}: __metadata__ must map strings to strings")
    return entries


def _tensor(name: str, entry: Any, data_offset: int, path: Path) -> ShardTensor:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ShardError(f"{where}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ShardError(f"{where}: unknown dtype {shown(dtype)}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise ShardError(f"{where}: shape must list at most {MAX_DIMENSIONS} whole numbers, found {shown(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ShardError(f"{where}: data_offsets must be two rising whole numbers, found {shown(offsets)}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    start, end = offsets
    if (end - start) * 8 != bits:
        raise ShardError(
            f"{where}: {dtype} of shape {shown(shape)} takes {shown(bits)} bits, data_offsets give {(end - start) * 8}"
        )
    return ShardTensor(name, dtype, tuple(shape), data_offset + start, end - start)


def _check_tiling(tensors: list[ShardTensor], data_offset: int, file_bytes: int, path: Path) -> None:
    """Tensors must cover the data exactly: no overlap, no hole, no trailing byte, no missing end."""
    position = data_offset
    for tensor in tensors:
        if tensor.offset != position:
            problem = "overlaps the one before it" if tensor.offset < position else "leaves a hole before it"
            raise ShardError(f"{path}: tensor {tensor.name} {problem} (starts at {tensor.offset}, expected {position})")
        position += tensor.n_bytes
    if position > file_bytes:
        raise ShardError(
            f"{path}: {position} bytes expected from the header, found {file_bytes}: truncated, download it again"
        )
    if position < file_bytes:
        raise ShardError(f"{path}: {file_bytes - position} bytes follow the last tensor")


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 for value in values
    )
