"""A container small enough for its bytes to be damaged one by one: two layers, one of them with two experts."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from container.indices import pack_indices
from container.layout import (
    CODEBOOKS_NAME,
    MANIFEST_NAME,
    TRUNK_ALIGNMENT,
    TRUNK_NAME,
    VEC_DIM,
    VQ3R,
    ExpertQuant,
    TrunkFormat,
    align_up,
    bank_name,
)
from container.manifest import BankEntry, FileEntry, Manifest, TrunkEntry
from container.model import KINDS, ModelConfig
from container.reader import ContainerReader
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from container.trunk import pack_rows, trunk_size, unpack_rows
from tests.checkpoints import kimi_linear_config

LAYER = 1  # the only one with experts
BASE = 2  # its first codebook; two that nobody uses come before
TRUNK: dict[str, tuple[TrunkFormat, tuple[int, ...]]] = {
    "model.norm.weight": (TrunkFormat.F32, (16,)),
    "model.embed_tokens.weight": (TrunkFormat.Q8G, (4, 130)),
    "model.layers.0.mlp.up_proj.weight": (TrunkFormat.Q4G, (3, 2, 129)),
}


def small_config(**overrides: Any) -> dict[str, Any]:
    """Config of the small container: experts of 24 × 16, gate and up, and 16 × 24, down."""
    numbers = {"num_hidden_layers": 2, "hidden_size": 16, "moe_intermediate_size": 24, "num_experts": 2}
    return kimi_linear_config(**(numbers | overrides))


def random_record(rng: np.random.Generator, layout: RecordLayout, layer: int, expert: int, base: int) -> ExpertRecord:
    """An expert record with random indices and scales."""
    indices, scales = {}, {}
    for kind in KINDS:
        rows, cols = layout.shapes[kind]
        codes = rng.integers(0, layout.quant.n_entries, (rows, cols // VEC_DIM, layout.quant.n_stages), dtype=np.uint8)
        indices[kind] = pack_indices(codes, layout.quant)
        scales[kind] = rng.standard_normal(rows).astype(np.float16)
    return ExpertRecord(layer, expert, base, indices, scales)


def small_files(quant: ExpertQuant = VQ3R, seed: int = 0, **overrides: Any) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest and the bytes of every file of the small container, manifest.json included."""
    rng = np.random.default_rng(seed)
    config = small_config(**overrides)
    model = ModelConfig.from_config(config)
    layout = RecordLayout(quant, model.expert_shapes)
    n_experts = model.moe.n_experts
    bank = b"".join(bytes(random_record(rng, layout, LAYER, e, BASE).pack(layout)) for e in range(n_experts))
    entries = rng.standard_normal((BASE + quant.n_codebooks, quant.n_entries, VEC_DIM)).astype(np.float16)
    trunk, trunk_bytes = _trunk(rng)
    files = {
        TRUNK_NAME: trunk_bytes,
        CODEBOOKS_NAME: b"".join(CodebookRecord(n, book).pack() for n, book in enumerate(entries)),
        bank_name(LAYER): bank,
    }
    manifest = Manifest(
        arch="kimi-linear",
        tensor_prefix="",
        config=config,
        expert_quant=quant,
        layers={LAYER: BankEntry(file=bank_name(LAYER), n_experts=n_experts, n_bytes=len(bank), codebook_base=BASE)},
        trunk=trunk,
        files={name: FileEntry(n_bytes=len(d), sha256=hashlib.sha256(d).hexdigest()) for name, d in files.items()},
    )
    return manifest, files | {MANIFEST_NAME: manifest.to_bytes()}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Write `files` into `folder`, which is created if needed."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def read_everything(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Open a container and decode all it holds, checksums of the records included: name → numbers."""
    found: dict[str, npt.NDArray[Any]] = {}
    with ContainerReader.open(folder) as reader:
        for entry in reader.manifest.trunk:
            values, scales = reader.read_trunk_rows(entry, 0, entry.size.rows)
            found[entry.name] = unpack_rows(values, scales, entry.shape[-1], entry.fmt)
        for layer, bank in reader.manifest.layers.items():
            found[f"codebooks {layer}"] = reader.codebooks(layer)
            for expert in range(bank.n_experts):
                record = reader.read_expert(layer, expert, check_crc=True)
                for kind in KINDS:
                    found[f"{layer} {expert} {kind} indices"] = record.indices[kind]
                    found[f"{layer} {expert} {kind} scales"] = record.scales[kind]
    return found


def _trunk(rng: np.random.Generator) -> tuple[tuple[TrunkEntry, ...], bytes]:
    entries, data = [], bytearray()
    for name, (fmt, shape) in TRUNK.items():
        data += bytes(align_up(len(data), TRUNK_ALIGNMENT) - len(data))
        weights = rng.standard_normal(shape).astype(np.float32).reshape(-1, shape[-1])
        values, scales = pack_rows(weights, fmt)
        stored = values.tobytes() + scales.tobytes()
        size = trunk_size(shape, fmt)
        entry = TrunkEntry(
            name=name,
            fmt=fmt,
            shape=shape,
            offset=len(data),
            n_bytes=size.total_bytes,
            scale_offset=None if fmt is TrunkFormat.F32 else len(data) + size.values_bytes,
            crc32=zlib.crc32(stored),
        )
        entries.append(entry)
        data += stored
    return tuple(entries), bytes(data)
