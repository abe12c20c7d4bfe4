"""Random containers, written with the bytes layer alone: no checkpoint, no converter.

Weights are seeded and well conditioned: matrices keep the size of what they multiply, norms are near 1, decays
moderate, and router scores lie far enough apart that rounding does not change a choice. One record and one trunk
tensor are held in memory at a time, so a container may be larger than it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from container.layout import (
    CODEBOOKS_NAME,
    GROUP_SIZE,
    MANIFEST_NAME,
    MIN_QUANTISED_ELEMENTS,
    TILE_ROWS,
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
from container.publish import publish_bytes, publishing
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from container.trunk import pack_rows, trunk_size
from container.writer import BankWriter
from tests.checkpoints import k3_config, kimi_linear_config
from tests.checkpoints.inventory import TensorSpec, is_k3, tensor_table
from tests.checkpoints.weights import ROW_SPREAD, iter_tensors, matrix_size

__all__ = ["Stored", "build_container", "k3_config", "kimi_linear_config", "random_record", "trunk_parts"]

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
_Q8G_NAMES = ("embed_tokens.weight", "lm_head.weight", "block_sparse_moe.gate.weight")
# standard deviation of stored numbers that are evenly spread: -127..127 and -8..7
_INTEGER_SIZES = {TrunkFormat.Q8G: (127 * 128 / 3) ** 0.5, TrunkFormat.Q4G: (255 / 12) ** 0.5}


class Stored(NamedTuple):
    """A trunk tensor as trunk.bin holds it: `values` [rows, row_bytes], `scales` [rows, groups]."""

    name: str
    fmt: TrunkFormat
    shape: tuple[int, ...]
    values: U8
    scales: F16

    @classmethod
    def rounded(cls, name: str, array: F32, fmt: TrunkFormat) -> Stored:
        """The nearest numbers that `fmt` has."""
        return cls(name, fmt, array.shape, *pack_rows(array.reshape(-1, array.shape[-1]), fmt))


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
    random_integers: bool = False,
) -> Path:
    """Write a container for a release's config.json into `folder` (created if needed) and return it.

    `trunk_bits` 4, 8 or 32. `min_quantised_elements` lower than the format's own lets small tensors be quantised
    too. `checksums` decides about crc32 per trunk tensor and sha256 per file. `drop` leaves out trunk tensors and
    `change` maps their f32 values before they are stored, both by name without prefix. `files` are side files,
    such as a tokenizer. `random_integers` draws quantised trunk tensors as they are stored instead of rounding
    Gaussian weights: as fast as the disk, and out of reach of `change`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    canonical = canonical_config(config)
    model = ModelConfig.from_config(canonical)
    prefix = "language_model." if is_k3(config) else ""
    rng = np.random.default_rng([seed, 1])
    layers, listed, codebooks = {}, {}, b""
    for n, layer in enumerate(model.moe_layers):
        base, name = n * quant.n_codebooks, bank_name(layer)
        codebooks += b"".join(CodebookRecord(base + i, book).pack() for i, book in enumerate(_codebooks(rng, quant)))
        bank = listed[name] = _write_bank(folder / name, model, quant, layer=layer, base=base, rng=rng)
        layers[layer] = BankEntry(file=name, n_experts=model.moe.n_experts, n_bytes=bank.n_bytes, codebook_base=base)
    dropped = {prefix + name for name in drop}
    changes = {prefix + name: function for name, function in (change or {}).items()}
    tensors = []
    for spec in tensor_table(config):
        if ".experts." not in spec.name and spec.name not in dropped:
            tensors.append((spec, _format(spec, trunk_bits, min_quantised_elements)))
    stored = (
        _random_integers(spec, fmt, rng)
        if random_integers and fmt is not TrunkFormat.F32
        else _rounded(config, spec, fmt, seed, changes.get(spec.name))
        for spec, fmt in tensors
    )
    listed[TRUNK_NAME], trunk = _write_trunk(folder / TRUNK_NAME, stored, crc=checksums)
    for name, content in {CODEBOOKS_NAME: codebooks, **(files or {})}.items():
        publish_bytes(folder / name, content)
        listed[name] = FileEntry.of_bytes(content)
    manifest = Manifest(
        arch="kimi-k3" if is_k3(config) else "kimi-linear",
        tensor_prefix=prefix,
        config=canonical,
        expert_quant=quant,
        layers=layers,
        trunk=trunk,
        files=listed if checksums else {},
        provenance={"tool": "tests", "seed": seed},
    )
    publish_bytes(folder / MANIFEST_NAME, manifest.to_bytes())
    return folder


def random_record(rng: np.random.Generator, layout: RecordLayout, layer: int, expert: int, base: int) -> ExpertRecord:
    """An expert whose matrices keep the size of what they multiply: any indices, rows of different scales."""
    indices, scales = {}, {}
    for kind in KINDS:
        rows, cols = layout.shapes[kind]
        drawn = _random_bytes(rng, layout.index_bytes[kind])
        tiles = drawn.reshape(-1, cols // VEC_DIM, TILE_ROWS, layout.quant.vector_bytes)
        tiles[-1, :, TILE_ROWS - len(tiles) * TILE_ROWS + rows :] = 0  # rows that fill up the last tile
        indices[kind] = drawn
        scales[kind] = (np.exp(ROW_SPREAD * rng.standard_normal(rows)) * cols**-0.5).astype(np.float16)
    return ExpertRecord(layer, expert, base, indices, scales)


def trunk_parts(tensors: Iterable[Stored], *, crc: bool = True) -> Iterator[tuple[TrunkEntry, bytes]]:
    """Entry and bytes of one tensor after the other, the zeros before it included."""
    end = 0
    for name, fmt, shape, values, scales in tensors:
        offset = align_up(end, TRUNK_ALIGNMENT)
        data = values.tobytes() + scales.tobytes()
        entry = TrunkEntry(
            name=name,
            fmt=fmt,
            shape=shape,
            offset=offset,
            n_bytes=len(data),
            scale_offset=None if fmt is TrunkFormat.F32 else offset + values.nbytes,
            crc32=zlib.crc32(data) if crc else None,
        )
        yield entry, bytes(offset - end) + data
        end = offset + len(data)


def _codebooks(rng: np.random.Generator, quant: ExpertQuant) -> F16:
    """[kinds · stages, entries, 8]; each stage has half the size of the one before, all stages together size 1."""
    sizes = 0.5 ** np.arange(quant.n_stages)
    sizes /= np.sqrt(np.sum(sizes**2))
    books = rng.standard_normal((3, quant.n_stages, quant.n_entries, VEC_DIM)) * sizes[:, None, None]
    return books.reshape(-1, quant.n_entries, VEC_DIM).astype(np.float16)


def _write_bank(
    path: Path, model: ModelConfig, quant: ExpertQuant, *, layer: int, base: int, rng: np.random.Generator
) -> FileEntry:
    layout = RecordLayout(quant, model.expert_shapes)
    with BankWriter(path, layout, n_experts=model.moe.n_experts) as bank:
        for expert in range(model.moe.n_experts):
            bank.append(random_record(rng, layout, layer, expert, base))
        return bank.entry


def _random_bytes(rng: np.random.Generator, n_bytes: int) -> U8:
    """`n_bytes` any bytes; whole words are four times as fast as `rng.bytes`."""
    words = rng.integers(1 << 64, size=-(-n_bytes // 8), dtype=np.uint64)
    return words.astype("<u8", copy=False).view(np.uint8)[:n_bytes]


def _format(spec: TensorSpec, trunk_bits: int, min_quantised_elements: int) -> TrunkFormat:
    """As the format prescribes: vectors and small tensors F32, embedding, head, router and vision 8 bits."""
    if trunk_bits == 32 or len(spec.shape) == 1 or prod(spec.shape) < min_quantised_elements:
        return TrunkFormat.F32
    eight = trunk_bits == 8 or spec.name.endswith(_Q8G_NAMES) or spec.name.startswith(("vision_tower", "mm_projector"))
    return TrunkFormat.Q8G if eight else TrunkFormat.Q4G


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    """The stored shape: a 4-D convolution kernel is flattened."""
    flat = spec.name.endswith("patch_embed.proj.weight")
    return (spec.shape[0], prod(spec.shape[1:])) if flat else spec.shape


def _rounded(
    config: Mapping[str, Any], spec: TensorSpec, fmt: TrunkFormat, seed: int, change: Callable[[F32], F32] | None
) -> Stored:
    [(_, array)] = iter_tensors(config, [spec], seed=seed)
    weights = array.astype(np.float32)
    return Stored.rounded(spec.name, (change(weights) if change else weights).reshape(_shape(spec)), fmt)


def _random_integers(spec: TensorSpec, fmt: TrunkFormat, rng: np.random.Generator) -> Stored:
    """Evenly spread numbers under scales of either sign (so that the mean of -8..7 leaves no trace)."""
    shape = _shape(spec)
    if shape[-1] % GROUP_SIZE:
        raise ValueError(f"{spec.name} {list(shape)}: whole groups of {GROUP_SIZE} expected")
    size = trunk_size(shape, fmt)
    values = _random_bytes(rng, size.values_bytes).reshape(size.rows, -1)
    if fmt is TrunkFormat.Q8G:
        integers = values.view(np.int8)
        np.maximum(integers, -127, out=integers)
    spread = np.exp(ROW_SPREAD * rng.standard_normal((size.rows, 1), dtype=np.float32))
    signs = rng.choice(np.array([-1, 1], dtype=np.float32), (size.rows, size.row_scale_bytes // 2))
    scales = signs * spread * np.float32(matrix_size(spec.name, spec.shape) / _INTEGER_SIZES[fmt])
    return Stored(spec.name, fmt, shape, values, scales.astype(np.float16))


def _write_trunk(path: Path, tensors: Iterable[Stored], *, crc: bool) -> tuple[FileEntry, tuple[TrunkEntry, ...]]:
    entries, sha256 = [], hashlib.sha256()
    with publishing(path) as file:
        for entry, data in trunk_parts(tensors, crc=crc):
            file.write(data)
            sha256.update(data)
            entries.append(entry)
        n_bytes = file.tell()
    return FileEntry(n_bytes=n_bytes, sha256=sha256.hexdigest()), tuple(entries)
