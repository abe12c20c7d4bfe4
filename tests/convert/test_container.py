"""What a conversion writes, opened again and held against the checkpoint's own numbers."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from container.layout import TrunkFormat
from container.manifest import FileEntry, Manifest
from container.model import KINDS
from container.reader import ContainerReader
from container.trunk import unpack_rows
from convert.arch import detect
from tests.checkpoints import checkpoint_tensors, logical_tensor, write_checkpoint
from tests.convert import oracle
from tests.convert.small import EMBEDDING, convert_here, relative_error, small_k3, small_kimi_linear

# of Gaussian weights; the small models' vectors are few, so their codebooks fit better
BOUNDS = {TrunkFormat.F32: 0.0, TrunkFormat.Q8G: 0.01, TrunkFormat.Q4G: 0.105}
EXPERT_BOUND = 0.13


def stored(reader, entry):
    """Values and scales of a trunk tensor, cut out of the file by hand."""
    data = (reader.folder / "trunk.bin").read_bytes()[entry.offset : entry.offset + entry.n_bytes]
    size = entry.size
    values = np.frombuffer(data[: size.values_bytes], np.uint8).reshape(size.rows, -1)
    scales = np.frombuffer(data[size.values_bytes :], "<f2").reshape(size.rows, -1)
    return values, scales


def check(output, config, tensors):
    """Every tensor of the container within its format's bound of the checkpoint's; returns the experts' error."""
    architecture = detect(config)
    sources = {tensor.name: tensor.source for tensor in architecture.trunk}
    with ContainerReader.open(output) as reader:
        assert {entry.name for entry in reader.manifest.trunk} == set(sources)
        for entry in reader.manifest.trunk:
            wanted = logical_tensor(tensors, sources[entry.name]).reshape(entry.size.rows, -1)
            values, scales = stored(reader, entry)
            found = unpack_rows(values, scales, entry.shape[-1], entry.fmt)
            assert relative_error(found, wanted) <= BOUNDS[entry.fmt], entry.name
        squared, norm = 0.0, 0.0
        for layer in reader.model.moe_layers:
            books = reader.codebooks(layer)
            for expert in range(reader.model.moe.n_experts):
                record = reader.read_expert(layer, expert, check_crc=True)
                for n, kind in enumerate(KINDS):
                    wanted = logical_tensor(tensors, architecture.experts.source(layer, expert, kind))
                    found = oracle.decode(
                        record.indices[kind], record.scales[kind], books[n], wanted.shape, reader.layout.quant
                    )
                    assert relative_error(found, wanted) < EXPERT_BOUND, (layer, expert, kind)
                    squared += oracle.squared_error(found, wanted)
                    norm += float(np.square(wanted, dtype=np.float64).sum())
    return (squared / norm) ** 0.5 if norm else None


def test_every_tensor_is_the_checkpoints(family):
    error = check(family.output, family.config, checkpoint_tensors(family.config))
    assert family.summary.relative_error == pytest.approx(error, rel=0.05)


def test_reported_errors_are_the_real_ones(family):
    """report.json against decoding everything again."""
    report = json.loads(family.files["report.json"])["relative_error"]
    architecture, tensors = detect(family.config), checkpoint_tensors(family.config)
    with ContainerReader.open(family.output) as reader:
        for layer in reader.model.moe_layers:
            books = reader.codebooks(layer)
            squared, norm = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
            for expert in range(reader.model.moe.n_experts):
                record = reader.read_expert(layer, expert)
                for n, kind in enumerate(KINDS):
                    wanted = logical_tensor(tensors, architecture.experts.source(layer, expert, kind))
                    found = oracle.decode(
                        record.indices[kind], record.scales[kind], books[n], wanted.shape, reader.layout.quant
                    )
                    squared[kind] += oracle.squared_error(found, wanted)
                    norm[kind] += float(np.square(wanted, dtype=np.float64).sum())
            for kind in KINDS:
                assert report["layers"][str(layer)][kind] == pytest.approx(
                    (squared[kind] / norm[kind]) ** 0.5, rel=1e-4
                )
            total = (sum(squared.values()) / sum(norm.values())) ** 0.5
            assert report["layers"][str(layer)]["experts"] == pytest.approx(total, rel=1e-4)
        sources = {tensor.name: tensor.source for tensor in architecture.trunk}
        for entry in reader.manifest.trunk:
            wanted = logical_tensor(tensors, sources[entry.name]).reshape(entry.size.rows, -1)
            values, scales = stored(reader, entry)
            found = relative_error(unpack_rows(values, scales, entry.shape[-1], entry.fmt), wanted)
            assert report["trunk"][entry.name] == pytest.approx(found, rel=1e-5, abs=1e-12)


def test_checksums_and_identity(family):
    manifest = Manifest.read(family.output)
    assert manifest.arch == ("kimi-k3" if family.config["model_type"] == "kimi_k3" else "kimi-linear")
    for entry in manifest.trunk:
        data = family.files["trunk.bin"][entry.offset : entry.offset + entry.n_bytes]
        assert zlib.crc32(data) == entry.crc32, entry.name
    unchecked = {"manifest.json", "report.json", "report.html", "chat.json"}  # the last is the user's to edit
    assert dict(manifest.files) == {
        name: FileEntry.of_bytes(data) for name, data in family.files.items() if name not in unchecked
    }
    assert not (family.output / ".build").exists()


def test_padding_of_a_log_is_kept(k3):
    """K3's A_log has whole blocks of 128; heads fill the beginning and zeros follow."""
    with ContainerReader.open(k3.output) as reader:
        entry = reader.trunk["language_model.model.layers.0.self_attn.A_log"]
        values, _ = stored(reader, entry)
    a_log = values.reshape(-1).view("<f4")
    assert entry.shape == (128,)
    assert a_log[:2].all()
    assert not a_log[2:].any()


VARIANTS = {
    "MXFP4 outside the experts": (small_k3(), {"resident_mxfp4": True}),
    "one file without index": (small_k3(), {"single_file": True}),
    "bf16 experts": (small_k3(quantization_config=None), {}),
    "Kimi-Linear in one file": (small_kimi_linear(), {"single_file": True}),
    "one shard with an index": (small_k3(), {"n_shards": 1}),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.usefixtures("in_this_process")
def test_other_layouts(tmp_path, name):
    config, layout = VARIANTS[name]
    resident = layout.get("resident_mxfp4", False)
    source = write_checkpoint(tmp_path / "checkpoint", config, **layout)
    summary, _ = convert_here(source, tmp_path / "out")
    assert summary.complete
    check(tmp_path / "out", config, checkpoint_tensors(config, resident_mxfp4=resident))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.usefixtures("in_this_process")
def test_f16_and_f32_checkpoints(tmp_path, dtype):
    config = small_kimi_linear()
    tensors = {name: array.astype(dtype) for name, array in checkpoint_tensors(config).items()}
    source = write_checkpoint(tmp_path / "checkpoint", config, tensors)
    convert_here(source, tmp_path / "out")
    check(tmp_path / "out", config, tensors)


@pytest.mark.usefixtures("in_this_process")
def test_a_model_without_experts(tmp_path):
    config = small_kimi_linear(first_k_dense_replace=3)
    source = write_checkpoint(tmp_path / "checkpoint", config)
    summary, _ = convert_here(source, tmp_path / "out")
    assert (summary.complete, summary.relative_error) == (True, None)
    assert check(tmp_path / "out", config, checkpoint_tensors(config)) is None
    assert (tmp_path / "out" / "codebooks.bin").read_bytes() == b""


@pytest.mark.usefixtures("in_this_process")
def test_zero_and_tiny_experts(tmp_path):
    """A zero expert, zero rows, rows of 1e-30 and a huge row in one checkpoint: zeros decode to zeros."""
    config = small_k3(quantization_config=None)
    tensors = checkpoint_tensors(config)
    names = [detect(config).experts.source(1, expert, "gate") for expert in range(4)]
    tensors[names[0]][:] = 0
    tensors[names[1]][3] = 0
    tensors[names[2]][5] = (tensors[names[2]][5].astype(np.float32) * 1e-30).astype(tensors[names[2]].dtype)
    tensors[names[3]][7] = (tensors[names[3]][7].astype(np.float32) * 1e30).astype(tensors[names[3]].dtype)
    source = write_checkpoint(tmp_path / "checkpoint", config, tensors)
    convert_here(source, tmp_path / "out")
    with ContainerReader.open(tmp_path / "out") as reader:
        scales = [reader.read_expert(1, expert).scales["gate"] for expert in range(4)]
    assert not scales[0].any()
    assert scales[1][3] == 0
    assert (np.delete(scales[1], 3) > 0).all()
    assert scales[2][5] == np.float16(2.0**-24)
    assert scales[3][7] == np.float16(65504)
    assert all(np.isfinite(each).all() for each in scales)


def test_the_embedding_is_8_bits_and_the_dense_mlp_4(k3):
    formats = {entry.name: entry.fmt for entry in Manifest.read(k3.output).trunk}
    assert formats[EMBEDDING] is TrunkFormat.Q8G
    assert formats["language_model.model.layers.0.mlp.gate_proj.weight"] is TrunkFormat.Q4G
