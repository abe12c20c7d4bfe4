"""A container small enough for its bytes to be damaged one by one: two layers, one of them with two experts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from container.layout import (
    CODEBOOKS_NAME,
    MANIFEST_NAME,
    TRUNK_NAME,
    VEC_DIM,
    VQ3R,
    ExpertQuant,
    TrunkFormat,
    bank_name,
)
from container.manifest import BankEntry, FileEntry, Manifest, TrunkEntry
from container.model import KINDS, ModelConfig
from container.reader import ContainerReader
from container.records import CodebookRecord, RecordLayout
from container.trunk import unpack_rows
from tests.containers import Stored, kimi_linear_config, random_record, trunk_parts

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
    tensors = (
        Stored.rounded(name, rng.standard_normal(shape, dtype=np.float32), fmt) for name, (fmt, shape) in TRUNK.items()
    )
    entries, parts = zip(*trunk_parts(tensors), strict=True)
    return entries, b"".join(parts)
