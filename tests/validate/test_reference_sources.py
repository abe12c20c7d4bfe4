"""The reference's two sources: a checkpoint folder and a container, both written to disk by the tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from container.checkpoint import Checkpoint
from container.errors import CheckError, ShardError, SourceError
from container.layout import (
    CODEBOOKS_NAME,
    GROUP_SIZE,
    MANIFEST_NAME,
    TRUNK_NAME,
    VQ3R,
    VQ4P,
    ExpertQuant,
    TrunkFormat,
    bank_name,
)
from container.manifest import BankEntry, Manifest, TrunkEntry
from container.model import KINDS, ModelConfig, canonical_config
from container.reader import ContainerReader
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from container.trunk import pack_rows, unpack_rows
from container.writer import BankWriter
from tests.checkpoints import checkpoint_tensors, k3_config, kimi_linear_config, logical_tensor, write_checkpoint
from tests.validate.small_models import prompt, small_model
from validate.pairing import source_shape
from validate.reference.model import forward
from validate.reference.sources import CheckpointTensors, ContainerTensors
from validate.reference.tensors import TensorSource

CONFIGS = {"k3": k3_config(num_hidden_layers=4), "kimi-linear": kimi_linear_config(num_hidden_layers=4)}
EXPERT = "model.layers.2.block_sparse_moe.experts.5"


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = CONFIGS[request.param]
    return chosen


# checkpoints


@pytest.mark.parametrize("resident_mxfp4", [False, True])
def test_checkpoint_tensors(config: dict[str, Any], resident_mxfp4: bool, tmp_path: Path) -> None:
    stored = checkpoint_tensors(config, seed=5, resident_mxfp4=resident_mxfp4)
    source = CheckpointTensors(Checkpoint.open(write_checkpoint(tmp_path / "c", config, stored)))
    assert isinstance(source, TensorSource)
    names = {name.removesuffix("_packed") for name in stored if not name.endswith(".weight_scale")}
    for name in names:
        expected = torch.from_numpy(logical_tensor(stored, name))
        short = name.removeprefix("language_model.")
        assert torch.equal(source[short], expected), name
        if expected.ndim == 2:
            n_rows = len(expected)
            for start, stop in ((0, 1), (n_rows // 2, n_rows), (n_rows - 1, n_rows + 7), (n_rows + 1, n_rows + 2)):
                assert torch.equal(source.rows(short, start, stop), expected[start:stop]), (name, start, stop)


def test_forward_from_a_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    model, tensors = small_model(config)
    source = CheckpointTensors(Checkpoint.open(write_checkpoint(tmp_path / "c", config)))
    ids = prompt(3, model.vocab_size)
    assert torch.equal(forward(source, model, ids).logits, forward(tensors, model, ids).logits)


def test_checkpoint_defects_are_named(tmp_path: Path) -> None:
    config, name = CONFIGS["k3"], f"language_model.{EXPERT}.w1.weight"
    stored = checkpoint_tensors(config)

    def source(folder: str, changes: Mapping[str, Any], without: str = "") -> CheckpointTensors:
        tensors = {key: value for key, value in (stored | dict(changes)).items() if key != without}
        return CheckpointTensors(Checkpoint.open(write_checkpoint(tmp_path / folder, config, tensors)))

    with pytest.raises(SourceError, match=rf"{name}_scale"):
        source("no scale", {}, f"{name}_scale")[f"{EXPERT}.w1.weight"]
    with pytest.raises(KeyError, match=rf"{EXPERT}.w1.weight"):
        source("no bytes", {}, f"{name}_packed")[f"{EXPERT}.w1.weight"]
    wide = {f"{name}_scale": stored[f"{name}_scale"].astype(np.float32)}
    with pytest.raises(ShardError, match=rf"`{name}_scale` is F32 of shape \[96, 4\], expected U8"):
        source("scale dtype", wide)[f"{EXPERT}.w1.weight"]
    embedding = "model.embed_tokens.weight"
    for shape in ((), (0, 256)):
        empty = {f"language_model.{embedding}": np.zeros(shape, dtype=np.float32)}
        with pytest.raises(ShardError, match=rf"`language_model.{embedding}` has shape \[.*\], expected rows"):
            source(f"shape {shape}", empty).rows(embedding, 0, 1)
    scalar = source("scalar", {f"{name}_packed": np.zeros((), dtype=np.uint8)})
    with pytest.raises(ShardError, match=rf"`{name}_packed` has shape \[\], expected two"):
        source_shape(scalar, f"{EXPERT}.w1.weight")


# containers


def write_container(folder: Path, config: Mapping[str, Any], quant: ExpertQuant) -> dict[str, np.ndarray]:
    """A container of random experts and of the seeded trunk; returns what its tensors mean, by full name."""
    folder.mkdir()
    canonical = canonical_config(config)
    model = ModelConfig.from_config(canonical)
    prefix = "language_model." if "text_config" in config else ""
    rng = np.random.default_rng(9)
    meaning: dict[str, np.ndarray] = {}
    trunk, data = [], bytearray()
    stored = checkpoint_tensors(config)
    plain = sorted(name for name in stored if "experts." not in name or "shared" in name)
    for number, name in enumerate(plain):
        tensor = stored[name].astype(np.float32)
        fmt = list(TrunkFormat)[number % 3] if tensor.ndim == 2 else TrunkFormat.F32
        rows = tensor.reshape(-1, tensor.shape[-1])
        values, scales = pack_rows(rows, fmt)
        meaning[name] = unpack_rows(values, scales, rows.shape[1], fmt).reshape(tensor.shape)
        offset = len(data)
        data += values.tobytes()
        gap = 0 if fmt is TrunkFormat.F32 else 64 * (number % 2)  # scales need not follow at once
        data += bytes(gap) + scales.tobytes()
        scale_offset = None if fmt is TrunkFormat.F32 else offset + values.nbytes + gap
        entry = TrunkEntry(
            name=name, fmt=fmt, shape=tensor.shape, offset=offset, n_bytes=len(data) - offset, scale_offset=scale_offset
        )
        trunk.append(entry)
    (folder / TRUNK_NAME).write_bytes(data)
    layout, layers, books = RecordLayout(quant, model.expert_shapes), {}, bytearray()
    for position, layer in enumerate(model.moe_layers):
        base = position * quant.n_codebooks
        entries = (rng.standard_normal((3, quant.n_stages, quant.n_entries, 8)) * 0.05).astype(np.float16)
        for number, book in enumerate(entries.reshape(-1, quant.n_entries, 8)):
            books += CodebookRecord(base + number, book).pack()
        with BankWriter(folder / bank_name(layer), layout, n_experts=model.moe.n_experts) as bank:
            for expert in range(model.moe.n_experts):
                at = f"{prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}."
                bank.append(random_record(rng, layout, entries, (layer, expert, base), at, meaning))
        n_bytes = layout.stride_bytes * model.moe.n_experts
        layers[layer] = BankEntry(
            file=bank_name(layer), n_experts=model.moe.n_experts, n_bytes=n_bytes, codebook_base=base
        )
    (folder / CODEBOOKS_NAME).write_bytes(books)
    manifest = Manifest(
        arch="test", tensor_prefix=prefix, config=canonical, expert_quant=quant, layers=layers, trunk=tuple(trunk)
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return meaning


def random_record(
    rng: np.random.Generator,
    layout: RecordLayout,
    codebooks: np.ndarray,
    numbers: tuple[int, int, int],
    at: str,
    meaning: dict[str, np.ndarray],
) -> ExpertRecord:
    """An expert of random codes, written tile by tile with plain loops; its matrices go into `meaning`."""
    quant = layout.quant
    indices, scales = {}, {}
    for k, kind in enumerate(KINDS):
        rows, cols = layout.shapes[kind]
        codes = rng.integers(0, quant.n_entries, (rows, cols // 8, quant.n_stages))
        scales[kind] = rng.uniform(0.5, 1.5, rows).astype(np.float16)
        vectors = sum(codebooks[k, s].astype(np.float32)[codes[:, :, s]] for s in range(quant.n_stages))
        matrix = vectors.reshape(rows, cols) * scales[kind].astype(np.float32)[:, None]
        meaning[f"{at}{ {'gate': 'w1', 'up': 'w3', 'down': 'w2'}[kind] }.weight"] = matrix
        out = bytearray()
        for tile in range(0, rows, 64):
            for vector in range(cols // 8):
                for row in range(tile, tile + 64):
                    out += vector_bytes(codes[row, vector] if row < rows else codes[0, 0] * 0, quant)
        indices[kind] = np.frombuffer(out, dtype=np.uint8)
    return ExpertRecord(*numbers, indices, scales)


def vector_bytes(codes: np.ndarray, quant: ExpertQuant) -> bytes:
    if quant is VQ4P:
        return sum(int(code) << 6 * stage for stage, code in enumerate(codes)).to_bytes(3, "little")
    return bytes(codes.tolist())


@pytest.fixture(scope="module", params=[VQ3R, VQ4P], ids=lambda quant: quant.fmt.name)
def written(
    request: pytest.FixtureRequest, config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("written") / "container"
    return folder, write_container(folder, config, request.param)


@pytest.fixture
def container(written: tuple[Path, dict[str, np.ndarray]]) -> Iterator[tuple[ContainerReader, dict[str, np.ndarray]]]:
    folder, meaning = written
    with ContainerReader.open(folder) as reader:
        yield reader, meaning


def test_container_tensors(container: tuple[ContainerReader, dict[str, np.ndarray]]) -> None:
    reader, meaning = container
    source = ContainerTensors(reader)
    assert isinstance(source, TensorSource)
    assert {entry.fmt for entry in reader.trunk.values()} == set(TrunkFormat)
    assert any(entry.shape[-1] % GROUP_SIZE for entry in reader.trunk.values() if entry.fmt is not TrunkFormat.F32)
    for name, matrix in meaning.items():
        expected = torch.from_numpy(matrix)
        short = name.removeprefix("language_model.")
        found = source[short]
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        if expected.ndim == 2:
            n_rows = len(expected)
            for start, stop in ((0, 1), (n_rows // 2, n_rows), (n_rows - 1, n_rows + 7), (n_rows + 1, n_rows + 2)):
                assert torch.equal(source.rows(short, start, stop), found[start:stop]), (name, start, stop)


def test_forward_from_a_container(container: tuple[ContainerReader, dict[str, np.ndarray]]) -> None:
    reader, meaning = container
    tensors = {name.removeprefix("language_model."): torch.from_numpy(matrix) for name, matrix in meaning.items()}
    ids = prompt(3, reader.model.vocab_size)
    found = forward(ContainerTensors(reader), reader.model, ids).logits
    torch.testing.assert_close(found, forward(tensors, reader.model, ids).logits, rtol=1e-4, atol=1e-4)


def test_one_read_per_expert(
    container: tuple[ContainerReader, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _ = container
    reads: list[tuple[int, int]] = []
    original = ContainerReader.read_expert

    def counted(self: ContainerReader, layer: int, expert: int, *, check_crc: bool = False) -> ExpertRecord:
        reads.append((layer, expert))
        return original(self, layer, expert, check_crc=check_crc)

    monkeypatch.setattr(ContainerReader, "read_expert", counted)
    routing = forward(ContainerTensors(reader), reader.model, [3, 4, 5]).routing
    assert reads == [(layer, expert) for layer, ids in routing.items() for expert in ids.unique().tolist()]


def test_same_expert_of_another_layer_is_another_record(
    container: tuple[ContainerReader, dict[str, np.ndarray]],
) -> None:
    reader, meaning = container
    source = ContainerTensors(reader)
    for layer in (1, 2, 1):
        name = f"model.layers.{layer}.block_sparse_moe.experts.5.w3.weight"
        expected = torch.from_numpy(meaning[reader.manifest.tensor_prefix + name])
        torch.testing.assert_close(source[name], expected, rtol=1e-6, atol=1e-7)


def test_absent_names_are_missing_tensors(container: tuple[ContainerReader, dict[str, np.ndarray]]) -> None:
    reader, _ = container
    source = ContainerTensors(reader)
    for name in (
        "model.layers.9.input_layernorm.weight",
        f"{EXPERT}1.w1.weight",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    ):
        with pytest.raises(KeyError, match=name):
            source[name]
        with pytest.raises(KeyError, match=name):
            source.rows(name, 0, 1)
    del reader.trunk[f"{reader.manifest.tensor_prefix}model.norm.weight"]
    with pytest.raises(CheckError, match=r"tensor `model\.norm\.weight` is missing"):
        forward(source, reader.model, [1])
