"""Changing containers on purpose, and making their checksums right again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from container.layout import EXPERT_HEADER, TRUNK_NAME
from container.manifest import FileEntry, Manifest
from container.model import ModelConfig
from container.records import RecordLayout

CRC32_OFFSET = 36  # of the header field


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Change one byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Write over a piece of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change manifest.json as JSON."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def layout_of(folder: Path) -> RecordLayout:
    """The record layout of a container."""
    manifest = Manifest.read(folder)
    return RecordLayout(manifest.expert_quant, ModelConfig.from_config(manifest.config).expert_shapes)


def seal(folder: Path) -> None:
    """Make every checksum fit the bytes: of the records, of the trunk's tensors, of the files."""
    manifest, layout = Manifest.read(folder), layout_of(folder)
    end = layout.scales_offset + layout.scales_bytes
    for bank in manifest.layers.values():
        for start in range(0, bank.n_bytes, bank.stride_bytes):
            record = (folder / bank.file).read_bytes()[start : start + bank.stride_bytes]
            crc = zlib.crc32(record[EXPERT_HEADER.size : end])
            overwrite(folder / bank.file, start + CRC32_OFFSET, crc.to_bytes(4, "little"))
    trunk = (folder / TRUNK_NAME).read_bytes()
    entries = tuple(
        replace(entry, crc32=zlib.crc32(trunk[entry.offset : entry.offset + entry.n_bytes])) for entry in manifest.trunk
    )
    files = {name: FileEntry.of_file(folder / name) for name in manifest.files}
    (folder / "manifest.json").write_bytes(replace(manifest, trunk=entries, files=files).to_bytes())
