"""Opening a container: one `pread` per expert, trunk tensors by byte range. Memory follows what is asked for.

Opening checks the manifest against the files' sizes and against the model's shapes; a record's header is
checked on every read, its crc32 on request.
"""

from __future__ import annotations

import os
import stat
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from container.errors import ConfigError, FormatError
from container.layout import CODEBOOKS_NAME, TRUNK_NAME, VEC_DIM
from container.manifest import BankEntry, Manifest, TrunkEntry
from container.model import ModelConfig
from container.records import CodebookRecord, ExpertRecord, RecordLayout

Bytes = npt.NDArray[np.uint8]


class ContainerReader:
    """An opened container. Reads are positional, so threads may share one reader."""

    def __init__(self, folder: Path, manifest: Manifest, model: ModelConfig) -> None:
        self.folder = folder
        self.manifest = manifest
        self.model = model
        self.layout = RecordLayout(manifest.expert_quant, model.expert_shapes)
        self.trunk: dict[str, TrunkEntry] = {entry.name: entry for entry in manifest.trunk}
        self._descriptors: dict[str, int] = {}

    @classmethod
    def open(cls, folder: Path) -> ContainerReader:
        """Open a finished container. Raises FormatError when manifest, config and files do not fit together."""
        manifest = Manifest.read(folder)
        reader = cls(folder, manifest, model_of(folder, manifest))
        try:
            reader._check_banks()
            reader._check_resident(TRUNK_NAME, reader.trunk_bytes)
            reader._check_resident(CODEBOOKS_NAME, reader.codebook_bytes)
        except BaseException:
            reader.close()
            raise
        return reader

    def __enter__(self) -> ContainerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def entry(self, name: str) -> TrunkEntry:
        """Trunk entry of `name`, given without the container's tensor prefix or in full. Raises FormatError."""
        for full in (self.manifest.tensor_prefix + name, name):
            if full in self.trunk:
                return self.trunk[full]
        raise FormatError(f"{self.folder}: the trunk has no tensor {self.manifest.tensor_prefix}{name}")

    def read_trunk(self, entry: TrunkEntry) -> Bytes:
        """All bytes of a trunk tensor: values, then scales."""
        return self.read_trunk_range(entry, 0, entry.n_bytes)

    def read_trunk_range(self, entry: TrunkEntry, start_byte: int, n_bytes: int) -> Bytes:
        """`n_bytes` of a trunk tensor from `start_byte` of it on. Raises ValueError outside the tensor."""
        if start_byte < 0 or n_bytes < 0 or start_byte + n_bytes > entry.n_bytes:
            raise ValueError(f"bytes {start_byte}+{n_bytes} are outside {entry.name} ({entry.n_bytes} bytes)")
        return self._read(TRUNK_NAME, entry.offset + start_byte, n_bytes)

    def read_trunk_rows(self, entry: TrunkEntry, start: int, stop: int) -> tuple[Bytes, npt.NDArray[np.float16]]:
        """Rows `start` to `stop` of a trunk tensor: (values [rows, row_bytes], group scales [rows, groups]).

        Rows are the product of all dimensions but the last; F32 tensors have no scales, [rows, 0].
        Raises ValueError outside the tensor.
        """
        size = entry.size
        if not 0 <= start <= stop <= size.rows:
            raise ValueError(f"rows {start} to {stop} are outside {entry.name} ({size.rows} rows)")
        values = self.read_trunk_range(entry, start * size.row_bytes, (stop - start) * size.row_bytes)
        values = values.reshape(stop - start, size.row_bytes)
        if entry.scale_offset is None:
            return values, np.empty((stop - start, 0), dtype=np.float16)
        scales_start = entry.scale_offset - entry.offset + start * size.row_scale_bytes
        scales = self.read_trunk_range(entry, scales_start, (stop - start) * size.row_scale_bytes)
        return values, scales.view("<f2").reshape(stop - start, size.row_scale_bytes // 2)

    def read_expert(self, layer: int, expert: int, *, check_crc: bool = False) -> ExpertRecord:
        """One expert, by one read. Raises FormatError for a bad record, IntegrityError for a wrong crc32."""
        bank = self.bank(layer)
        if not 0 <= expert < bank.n_experts:
            raise FormatError(f"{self.folder / bank.file}: there is no expert {expert}, only {bank.n_experts}")
        record = self._read(bank.file, expert * bank.stride_bytes, bank.stride_bytes)
        return ExpertRecord.unpack(
            record.data,
            self.layout,
            layer=layer,
            expert=expert,
            codebook_base=bank.codebook_base,
            check_crc=check_crc,
            source=str(self.folder / bank.file),
        )

    def bank(self, layer: int) -> BankEntry:
        """Manifest entry of a layer's bank. Raises FormatError when the layer has none."""
        if layer not in self.manifest.layers:
            raise FormatError(f"{self.folder}: layer {layer} has no expert bank")
        return self.manifest.layers[layer]

    def codebooks(self, layer: int) -> npt.NDArray[np.float16]:
        """The layer's codebooks [3 kinds, stages, entries, 8] f16. Raises FormatError for a bad record."""
        quant = self.manifest.expert_quant
        size = CodebookRecord.size(quant.n_entries)
        base = self.bank(layer).codebook_base
        data = self._read(CODEBOOKS_NAME, base * size, quant.n_codebooks * size).data
        books = [
            CodebookRecord.unpack(
                data[n * size : (n + 1) * size],
                codebook_id=base + n,
                n_entries=quant.n_entries,
                source=str(self.folder / CODEBOOKS_NAME),
            ).entries
            for n in range(quant.n_codebooks)
        ]
        return np.stack(books).reshape(3, quant.n_stages, quant.n_entries, VEC_DIM)

    @cached_property
    def trunk_bytes(self) -> int:
        """Bytes of trunk.bin up to the end of its last tensor."""
        return max((entry.offset + entry.n_bytes for entry in self.manifest.trunk), default=0)

    @cached_property
    def codebook_bytes(self) -> int:
        """Bytes of codebooks.bin up to the end of the last layer's codebooks."""
        quant = self.manifest.expert_quant
        bases = [bank.codebook_base for bank in self.manifest.layers.values()]
        return (max(bases) + quant.n_codebooks) * CodebookRecord.size(quant.n_entries) if bases else 0

    def _check_banks(self) -> None:
        different = sorted(set(self.model.moe_layers) ^ set(self.manifest.layers))
        if different:
            raise FormatError(f"{self.folder}: banks and MoE layers of the model differ in layers {different[:10]}")
        try:
            stride_bytes = self.layout.stride_bytes
        except FormatError as error:
            raise FormatError(f"{self.folder}: {error}") from None
        for layer, bank in self.manifest.layers.items():
            for what, found, needed in (
                ("experts", bank.n_experts, self.model.moe.n_experts),
                ("bytes per record", bank.stride_bytes, stride_bytes),
            ):
                if found != needed:
                    raise FormatError(
                        f"{self.folder}: the manifest gives layer {layer} {found} {what}, its config needs {needed}"
                    )
            self._open_file(bank.file, bank.n_bytes)

    def _check_resident(self, name: str, least_bytes: int) -> None:
        """Open a file whose exact size only our own `files` key records; any writer's holds `least_bytes`."""
        recorded = self.manifest.files.get(name)
        self._open_file(name, None if recorded is None else recorded.n_bytes)
        found = os.fstat(self._descriptors[name]).st_size
        if found < least_bytes:
            raise FormatError(f"{self.folder / name}: at least {least_bytes} bytes expected, found {found}")

    def _open_file(self, name: str, n_bytes: int | None) -> None:
        path = self.folder / name
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise FormatError(f"{path}: is not a regular file")
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened ({os.strerror(error.errno or 0)})") from None
        self._descriptors[name] = descriptor
        found = os.fstat(descriptor).st_size
        if n_bytes is not None and found != n_bytes:
            raise FormatError(f"{path}: {n_bytes} bytes expected, found {found}")

    def _read(self, name: str, offset: int, n_bytes: int) -> Bytes:
        descriptor = self._descriptors[name]
        if offset + n_bytes > os.fstat(descriptor).st_size:
            raise FormatError(f"{self.folder / name}: the file ends before byte {offset + n_bytes}")
        buffer = np.empty(n_bytes, dtype=np.uint8)
        view, done = buffer.data, 0
        while done < n_bytes:
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                raise FormatError(f"{self.folder / name}: the file ended at byte {offset + done} while being read")
            done += count
        return buffer


def model_of(folder: Path, manifest: Manifest) -> ModelConfig:
    """The model that a container's manifest describes. Raises FormatError."""
    try:
        return ModelConfig.from_config(manifest.config)
    except ConfigError as error:
        raise FormatError(f"{folder}: manifest {error}") from None
