"""The two places the reference reads weights from: a container, and the checkpoint it was made of."""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt
from torch import Tensor

from container.checkpoint import Checkpoint
from container.errors import ShardError
from container.manifest import TrunkEntry
from container.model import KINDS
from container.reader import ContainerReader
from container.records import ExpertRecord
from container.shards import ShardTensor
from validate.reference.decode import (
    decode_expert_matrix,
    decode_mxfp4,
    decode_plain,
    decode_trunk_rows,
    trunk_row_bytes,
)

WRAPPER_PREFIX = "language_model."  # of the text model's tensors in a multimodal release

EXPERT_NAME = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
KIND_OF = {"w1": "gate", "w3": "up", "w2": "down"}


class ContainerTensors:
    """A container's tensors, decoded (a `TensorSource`). Keeps one expert's record and one layer's codebooks."""

    def __init__(self, reader: ContainerReader) -> None:
        self.reader = reader
        self._record: ExpertRecord | None = None
        self._codebooks: tuple[int, npt.NDArray[np.float16]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        expert = EXPERT_NAME.fullmatch(name)
        if expert:
            return self._expert_matrix(name, int(expert[1]), int(expert[2]), KIND_OF[expert[3]])
        entry = self._entry(name)
        return self._trunk_rows(entry, 0, None).reshape(entry.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of matrix `name`; only these are read when it is a trunk tensor."""
        if EXPERT_NAME.fullmatch(name):
            return self[name][start:stop]
        entry = self._entry(name)
        return self._trunk_rows(entry, start, stop)

    def _entry(self, name: str) -> TrunkEntry:
        for full_name in (self.reader.manifest.tensor_prefix + name, name):
            if full_name in self.reader.trunk:
                return self.reader.trunk[full_name]
        raise KeyError(name)

    def _trunk_rows(self, entry: TrunkEntry, start: int, stop: int | None) -> Tensor:
        rows = range(math.prod(entry.shape[:-1]))[start:stop]
        n_cols = entry.shape[-1]
        value_bytes, scale_bytes = trunk_row_bytes(entry.fmt, n_cols)
        values = self.reader.read_trunk_range(entry, rows.start * value_bytes, len(rows) * value_bytes)
        scales = np.empty(0, dtype=np.uint8)
        if entry.scale_offset is not None:
            scales_start = entry.scale_offset - entry.offset + rows.start * scale_bytes
            scales = self.reader.read_trunk_range(entry, scales_start, len(rows) * scale_bytes)
        return decode_trunk_rows(entry.fmt, values, scales, n_cols)

    def _expert_matrix(self, name: str, layer: int, expert: int, kind: str) -> Tensor:
        bank = self.reader.manifest.layers.get(layer)
        if bank is None or expert >= bank.n_experts:
            raise KeyError(name)
        record = self._record
        if record is None or (record.layer, record.expert) != (layer, expert):
            record = self._record = self.reader.read_expert(layer, expert)
        if self._codebooks is None or self._codebooks[0] != layer:
            self._codebooks = (layer, self.reader.codebooks(layer))
        return decode_expert_matrix(
            self.reader.manifest.expert_quant.fmt,
            record.indices[kind],
            self._codebooks[1][KINDS.index(kind)],
            record.scales[kind],
            self.reader.model.expert_shapes[kind],
        )


class CheckpointTensors:
    """A checkpoint's tensors (a `TensorSource`): F32, F16 and BF16 as they are, MXFP4 where a packed pair stands."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.prefix = WRAPPER_PREFIX if "text_config" in checkpoint.config else ""

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored_name(name)
        if stored in self.checkpoint:
            entry = self.checkpoint.entry(stored)
            return decode_plain(self.checkpoint.read(stored), entry.dtype, entry.shape, stored)
        return self._mxfp4_rows(stored, 0, None)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of matrix `name`; only these are read."""
        stored = self._stored_name(name)
        if stored not in self.checkpoint:
            return self._mxfp4_rows(stored, start, stop)
        entry = self.checkpoint.entry(stored)
        raw, n_rows = self._row_bytes(entry, start, stop)
        return decode_plain(raw.reshape(-1), entry.dtype, (n_rows, *entry.shape[1:]), stored)

    def _stored_name(self, name: str) -> str:
        """Name in the checkpoint, of the plain tensor or of a packed pair without its endings; else KeyError."""
        for stored in (self.prefix + name, name):
            if stored in self.checkpoint or (stored.endswith(".weight") and f"{stored}_packed" in self.checkpoint):
                return stored
        raise KeyError(name)

    def _mxfp4_rows(self, stored: str, start: int, stop: int | None) -> Tensor:
        packed = self._byte_rows(f"{stored}_packed", start, stop)
        return decode_mxfp4(packed, self._byte_rows(f"{stored}_scale", start, stop), stored)

    def _byte_rows(self, name: str, start: int, stop: int | None) -> npt.NDArray[np.uint8]:
        entry = self.checkpoint.entry(name)
        if entry.dtype != "U8" or len(entry.shape) != 2:
            raise ShardError(
                f"{self.checkpoint.folder}: tensor `{name}` is {entry.dtype} of shape {list(entry.shape)}, expected U8 "
                "with two dimensions, as one half of an MXFP4 pair"
            )
        raw, n_rows = self._row_bytes(entry, start, stop)
        return raw.reshape(n_rows, entry.shape[1])

    def _row_bytes(self, entry: ShardTensor, start: int, stop: int | None) -> tuple[npt.NDArray[np.uint8], int]:
        """Raw bytes of the slice start:stop along the first dimension, and how many rows that is."""
        if not entry.shape or 0 in entry.shape:
            raise ShardError(
                f"{self.checkpoint.folder}: tensor `{entry.name}` has shape {list(entry.shape)}, expected rows"
            )
        rows = range(entry.shape[0])[start:stop]
        row_bytes = entry.n_bytes // entry.shape[0]
        return self.checkpoint.read(entry.name, rows.start * row_bytes, len(rows) * row_bytes), len(rows)
