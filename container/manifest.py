"""manifest.json as typed, frozen dataclasses ⇄ JSON. The manifest is the commit record: published last.

Keys of format v0 keep their names and meanings; `files`, `provenance` and a trunk entry's `crc32` are ours
and optional on reading, so containers of other writers open too. Unknown keys are ignored, as other readers do.
"""

from __future__ import annotations

import hashlib
import os
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from container.errors import FormatError, shown
from container.json_object import JsonObject, is_count
from container.layout import (
    CODEBOOKS_NAME,
    EXPERT_QUANTS,
    FORMAT_VERSION,
    GROUP_SIZE,
    MANIFEST_NAME,
    MAX_U16,
    TILE_ROWS,
    TRUNK_NAME,
    VEC_DIM,
    ExpertFormat,
    ExpertQuant,
    TrunkFormat,
    is_plain_file_name,
)
from container.strict_json import json_bytes, parse_object
from container.trunk import TrunkSize, trunk_size

MAX_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class TrunkEntry:
    """One tensor of trunk.bin. Offsets are absolute; `n_bytes` covers values and scales."""

    name: str
    fmt: TrunkFormat
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    scale_offset: int | None = None  # grouped formats only
    crc32: int | None = None  # of all n_bytes, ours

    @property
    def size(self) -> TrunkSize:
        """Rows and bytes per row."""
        return trunk_size(self.shape, self.fmt)

    def to_json(self) -> dict[str, Any]:
        """The entry as format v0 spells it."""
        entry: dict[str, Any] = {"name": self.name, "fmt": int(self.fmt), "off": self.offset}
        entry |= {"shape": list(self.shape), "bytes": self.n_bytes}
        if self.scale_offset is not None:
            entry |= {"group": GROUP_SIZE, "scale_off": self.scale_offset}
        if self.crc32 is not None:
            entry["crc32"] = self.crc32
        return entry

    @classmethod
    def from_json(cls, raw: Any, where: str) -> TrunkEntry:
        """Raises FormatError, naming `where`, for anything that does not fit the format."""
        keys = JsonObject(raw, where)
        name = keys.text("name")
        keys = JsonObject(raw, f"{where} ({name})")
        fmt_number = keys.count("fmt")
        if fmt_number not in list(TrunkFormat):
            raise FormatError(f"{keys.where}: fmt {fmt_number} is not one we read ({_choices(TrunkFormat)})")
        fmt = TrunkFormat(fmt_number)
        shape = keys.value("shape")
        if not isinstance(shape, list) or not 1 <= len(shape) <= 4 or not all(is_count(n, least=1) for n in shape):
            raise FormatError(f"{keys.where}: shape must be 1 to 4 positive whole numbers, found {shown(shape)}")
        grouped = fmt is not TrunkFormat.F32
        if grouped and keys.count("group") != GROUP_SIZE:
            raise FormatError(f"{keys.where}: group must be {GROUP_SIZE}, found {keys.count('group')}")
        entry = cls(
            name=name,
            fmt=fmt,
            shape=tuple(shape),
            offset=keys.count("off"),
            n_bytes=keys.count("bytes"),
            scale_offset=keys.count("scale_off") if grouped else None,
            crc32=keys.count("crc32", most=0xFFFFFFFF) if "crc32" in raw else None,
        )
        entry._check(keys.where)
        return entry

    def _check(self, where: str) -> None:
        size = self.size
        values_end = self.offset + size.values_bytes
        end = self.offset + self.n_bytes
        if self.scale_offset is None:
            fits = self.n_bytes == size.values_bytes
        else:
            fits = values_end <= self.scale_offset and self.scale_offset + size.rows * size.row_scale_bytes <= end
        if not fits:
            raise FormatError(
                f"{where}: {self.fmt.name} of shape {list(self.shape)} takes {size.total_bytes} bytes, which do not "
                f"fit bytes {self.n_bytes}, off {self.offset}, scale_off {self.scale_offset}"
            )


@dataclass(frozen=True, kw_only=True)
class BankEntry:
    """One layer's expert bank."""

    file: str
    n_experts: int
    n_bytes: int
    codebook_base: int

    @property
    def stride_bytes(self) -> int:
        """Bytes of one record."""
        return self.n_bytes // self.n_experts

    def to_json(self) -> dict[str, Any]:
        """The entry as format v0 spells it."""
        return {
            "file": self.file,
            "experts": self.n_experts,
            "bytes": self.n_bytes,
            "codebook_base": self.codebook_base,
        }

    @classmethod
    def from_json(cls, raw: Any, where: str) -> BankEntry:
        """Raises FormatError, naming `where`, for anything that does not fit the format."""
        keys = JsonObject(raw, where)
        entry = cls(
            file=keys.file_name("file"),
            n_experts=keys.count("experts", least=1),
            n_bytes=keys.count("bytes", least=1),
            codebook_base=keys.count("codebook_base", most=MAX_U16),
        )
        if entry.n_bytes % entry.n_experts:
            raise FormatError(f"{where}: {entry.n_bytes} bytes are no whole number for {entry.n_experts} experts")
        return entry


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file of the container; ours."""

    n_bytes: int
    sha256: str

    @classmethod
    def of_bytes(cls, data: bytes) -> FileEntry:
        """The entry of a small file that holds `data`."""
        return cls(n_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> FileEntry:
        """The entry of a file as it is on disk, read in pieces. Raises OSError."""
        with path.open("rb") as file:
            return cls(n_bytes=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())

    def to_json(self) -> dict[str, Any]:
        """The entry as this project spells it."""
        return {"bytes": self.n_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, raw: Any, where: str) -> FileEntry:
        """Raises FormatError, naming `where`, for anything that does not fit."""
        keys = JsonObject(raw, where)
        sha256 = keys.text("sha256")
        if len(sha256) != 64 or not set(sha256) <= set(string.hexdigits.lower()):
            raise FormatError(f"{where}: `sha256` must be 64 lower-case hexadecimal digits, found {shown(sha256)}")
        return cls(n_bytes=keys.count("bytes"), sha256=sha256)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole manifest. `config` is canonical (container.model.canonical_config)."""

    arch: str
    tensor_prefix: str
    config: Mapping[str, Any]
    expert_quant: ExpertQuant
    layers: Mapping[int, BankEntry]
    trunk: tuple[TrunkEntry, ...]
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The manifest as a JSON object; key order is fixed, so equal manifests give equal bytes."""
        quant = self.expert_quant
        return {
            "format_version": FORMAT_VERSION,
            "arch": self.arch,
            "tensor_prefix": self.tensor_prefix,
            "config": dict(self.config),
            "expert_quant": {
                "fmt": quant.fmt.name,
                "stages": quant.n_stages,
                "vec_dim": VEC_DIM,
                "entries": quant.n_entries,
                "index_block": TILE_ROWS,
                "index_bits": quant.index_bits,
                "bits_per_weight": quant.bits_per_weight,
            },
            "layers": {str(layer): self.layers[layer].to_json() for layer in sorted(self.layers)},
            "trunk": [entry.to_json() for entry in self.trunk],
            "files": {name: self.files[name].to_json() for name in sorted(self.files)},
            "provenance": dict(self.provenance),
        }

    def to_bytes(self) -> bytes:
        """The bytes of manifest.json."""
        return json_bytes(self.to_json())

    @classmethod
    def from_json(cls, raw: Any, where: str = MANIFEST_NAME) -> Manifest:
        """Raises FormatError, naming `where` and the key, for anything that does not fit the format."""
        keys = JsonObject(raw, where)
        version = keys.value("format_version")
        if not is_count(version) or version != FORMAT_VERSION:
            raise FormatError(
                f"{where}: format_version is {shown(version)}; this program reads version {FORMAT_VERSION}"
            )
        layers = {
            _layer_number(key, where): BankEntry.from_json(value, f"{where}: layer {key}")
            for key, value in keys.mapping("layers").items()
        }
        _check_bank_names(layers, where)
        trunk_list = keys.value("trunk")
        if not isinstance(trunk_list, list):
            raise FormatError(f"{where}: `trunk` must be a list")
        trunk = tuple(TrunkEntry.from_json(entry, f"{where}: trunk[{n}]") for n, entry in enumerate(trunk_list))
        names = [entry.name for entry in trunk]
        if len(set(names)) != len(names):
            raise FormatError(f"{where}: trunk tensor {_duplicate(names)} is listed twice")
        files = keys.mapping("files") if "files" in raw else {}
        for name in files:
            if not is_plain_file_name(name):
                raise FormatError(f"{where}: `files` must name plain file names, found {shown(name)}")
        return cls(
            arch=keys.text("arch"),
            tensor_prefix=keys.text("tensor_prefix"),
            config=keys.mapping("config"),
            expert_quant=_expert_quant(keys.mapping("expert_quant"), f"{where}: expert_quant"),
            layers=layers,
            trunk=trunk,
            files={name: FileEntry.from_json(value, f"{where}: files.{name}") for name, value in files.items()},
            provenance=keys.mapping("provenance") if "provenance" in raw else {},
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read `folder`/manifest.json. Raises FormatError when it is absent, too large, no JSON or wrong."""
        path = folder / MANIFEST_NAME
        try:
            if not path.is_file():
                raise FormatError(f"{path}: no such file; is {folder} a container, and was its conversion finished?")
            n_bytes = path.stat().st_size
            if n_bytes > MAX_MANIFEST_BYTES:
                raise FormatError(f"{path}: {n_bytes} bytes are more than a manifest can have ({MAX_MANIFEST_BYTES})")
            raw = parse_object(path.read_bytes())
        except OSError as error:
            raise FormatError(f"{path}: cannot be read ({os.strerror(error.errno or 0)})") from None
        except ValueError as error:
            raise FormatError(f"{path}: not valid JSON ({error})") from None
        return cls.from_json(raw, str(path))


def _expert_quant(raw: Any, where: str) -> ExpertQuant:
    keys = JsonObject(raw, where)
    names = {quant.fmt.name: quant for quant in EXPERT_QUANTS.values()}
    fmt = keys.text("fmt")
    if fmt not in names:
        raise FormatError(f"{where}: fmt {shown(fmt)} is not one we read ({_choices(ExpertFormat)})")
    quant = names[fmt]
    for key, expected in (
        ("stages", quant.n_stages),
        ("vec_dim", VEC_DIM),
        ("entries", quant.n_entries),
        ("index_block", TILE_ROWS),
        ("index_bits", quant.index_bits),
    ):
        if keys.count(key) != expected:
            raise FormatError(f"{where}: {fmt} has `{key}` {expected}, found {keys.count(key)}")
    return quant


def _layer_number(key: str, where: str) -> int:
    plain = key.isascii() and key.isdigit() and len(key) <= 5 and str(int(key)) == key
    if not plain or int(key) > MAX_U16:
        raise FormatError(f"{where}: layer {shown(key)} is not a plain number from 0 to {MAX_U16}")
    return int(key)


def _check_bank_names(layers: Mapping[int, BankEntry], where: str) -> None:
    names = [MANIFEST_NAME, TRUNK_NAME, CODEBOOKS_NAME, *(bank.file for bank in layers.values())]
    if len(set(names)) != len(names):
        raise FormatError(f"{where}: `layers` must give each bank a file of its own, {_duplicate(names)} is used twice")


def _duplicate(names: list[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def _choices(formats: type[ExpertFormat] | type[TrunkFormat]) -> str:
    return ", ".join(f"{fmt.name} = {fmt.value}" for fmt in formats)
