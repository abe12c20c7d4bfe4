"""Small random containers, written with the bytes layer alone: no checkpoint, no converter.

Weights are seeded and well conditioned: matrices keep the size of what they multiply, norms are near 1, decays
moderate, and router scores lie far enough apart that rounding does not change a choice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from container.indices import pack_indices
from container.layout import (
    CODEBOOKS_NAME,
    MANIFEST_NAME,
    MIN_QUANTISED_ELEMENTS,
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
from container.model import KINDS, ModelConfig, canonical_config
from container.publish import publish_bytes
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from container.trunk import pack_rows
from container.writer import BankWriter
from tests.checkpoints import k3_config, kimi_linear_config
from tests.checkpoints.inventory import TensorSpec, is_k3, tensor_table
from tests.checkpoints.weights import iter_tensors

__all__ = ["build_container", "k3_config", "kimi_linear_config"]

F32 = npt.NDArray[np.float32]
_Q8G_NAMES = ("embed_tokens.weight", "lm_head.weight", "block_sparse_moe.gate.weight")


def build_container(
    folder: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    quant: ExpertQuant = VQ3R,
    trunk_bits: int = 4,
    min_quantised_elements: int = MIN_QUANTISED_ELEMENTS,
    checksums: bool = True,
    drop: tuple[str, ...] = (),
    change: Mapping[str, Callable[[F32], F32]] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a container for a release's config.json into `folder` (created if needed) and return it.

    `trunk_bits` 4, 8 or 32. `min_quantised_elements` lower than the format's own lets small tensors be quantised
    too. `checksums` decides about crc32 per trunk tensor and sha256 per file. `drop` leaves out trunk tensors and
    `change` maps their f32 values before they are stored, both by name without prefix. `files` are side files,
    such as a tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    canonical = canonical_config(config)
    model = ModelConfig.from_config(canonical)
    prefix = "language_model." if is_k3(config) else ""
    rng = np.random.default_rng([seed, 1])
    layers, banks, codebooks = {}, {}, []
    for n, layer in enumerate(model.moe_layers):
        base = n * quant.n_codebooks
        books = _codebooks(rng, quant)
        codebooks += [CodebookRecord(base + i, book).pack() for i, book in enumerate(books)]
        banks[bank_name(layer)] = _write_bank(folder, model, quant, layer=layer, base=base, rng=rng)
        layers[layer] = BankEntry(
            file=bank_name(layer),
            n_experts=model.moe.n_experts,
            n_bytes=banks[bank_name(layer)].n_bytes,
            codebook_base=base,
        )
    dropped = {prefix + name for name in drop}
    table = [spec for spec in tensor_table(config) if ".experts." not in spec.name and spec.name not in dropped]
    formats = {spec.name: _format(spec, trunk_bits, min_quantised_elements) for spec in table}
    changes = {prefix + name: function for name, function in (change or {}).items()}
    weights = (
        (name, changes.get(name, np.asarray)(array.astype(np.float32)))
        for name, array in iter_tensors(config, table, seed=seed)
    )
    trunk_bytes, entries = _trunk(weights, formats, crc=checksums)
    contents = {TRUNK_NAME: trunk_bytes, CODEBOOKS_NAME: b"".join(codebooks), **(files or {})}
    for name, content in contents.items():
        publish_bytes(folder / name, content)
    listed = {name: FileEntry.of_bytes(content) for name, content in contents.items()}
    manifest = Manifest(
        arch="kimi-k3" if is_k3(config) else "kimi-linear",
        tensor_prefix=prefix,
        config=canonical,
        expert_quant=quant,
        layers=layers,
        trunk=tuple(entries),
        files=banks | listed if checksums else {},
        provenance={"tool": "tests", "seed": seed},
    )
    publish_bytes(folder / MANIFEST_NAME, manifest.to_bytes())
    return folder


def _codebooks(rng: np.random.Generator, quant: ExpertQuant) -> npt.NDArray[np.float16]:
    """[kinds · stages, entries, 8]; each stage has half the size of the one before, all stages together size 1."""
    sizes = 0.5 ** np.arange(quant.n_stages)
    sizes /= np.sqrt(np.sum(sizes**2))
    books = rng.standard_normal((3, quant.n_stages, quant.n_entries, VEC_DIM)) * sizes[:, None, None]
    return books.reshape(-1, quant.n_entries, VEC_DIM).astype(np.float16)


def _write_bank(
    folder: Path, model: ModelConfig, quant: ExpertQuant, *, layer: int, base: int, rng: np.random.Generator
) -> FileEntry:
    layout = RecordLayout(quant, model.expert_shapes)
    with BankWriter(folder / bank_name(layer), layout, n_experts=model.moe.n_experts) as bank:
        for expert in range(model.moe.n_experts):
            indices, scales = {}, {}
            for kind in KINDS:
                rows, cols = layout.shapes[kind]
                codes = rng.integers(quant.n_entries, size=(rows, cols // VEC_DIM, quant.n_stages), dtype=np.uint8)
                indices[kind] = pack_indices(codes, quant)
                scales[kind] = (np.exp(0.2 * rng.standard_normal(rows)) * cols**-0.5).astype(np.float16)
            bank.append(ExpertRecord(layer, expert, base, indices, scales))
        return bank.entry


def _format(spec: TensorSpec, trunk_bits: int, min_quantised_elements: int) -> TrunkFormat:
    """As the format prescribes: vectors and small tensors F32, embedding, head, router and vision 8 bits."""
    if trunk_bits == 32 or len(spec.shape) == 1 or np.prod(spec.shape) < min_quantised_elements:
        return TrunkFormat.F32
    eight = trunk_bits == 8 or spec.name.endswith(_Q8G_NAMES) or spec.name.startswith(("vision_tower", "mm_projector"))
    return TrunkFormat.Q8G if eight else TrunkFormat.Q4G


def _trunk(
    tensors: Iterator[tuple[str, F32]], formats: Mapping[str, TrunkFormat], *, crc: bool
) -> tuple[bytes, list[TrunkEntry]]:
    """trunk.bin and its entries, one tensor after the other."""
    content, entries = bytearray(), []
    for name, array in tensors:
        content += bytes(align_up(len(content), TRUNK_ALIGNMENT) - len(content))
        shape = array.shape
        if name.endswith("patch_embed.proj.weight"):  # a 4-D convolution kernel is stored flattened
            shape = (shape[0], int(np.prod(shape[1:])))
        values, scales = pack_rows(array.reshape(-1, shape[-1]), formats[name])
        data = values.tobytes() + scales.tobytes()
        entry = TrunkEntry(
            name=name,
            fmt=formats[name],
            shape=shape,
            offset=len(content),
            n_bytes=len(data),
            scale_offset=None if formats[name] is TrunkFormat.F32 else len(content) + values.nbytes,
            crc32=zlib.crc32(data) if crc else None,
        )
        entries.append(entry)
        content += data
    return bytes(content), entries
