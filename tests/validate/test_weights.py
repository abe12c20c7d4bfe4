"""The container against its checkpoint: figures against an independent calculation, and every way of being wrong."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from container.checkpoint import Checkpoint
from container.indices import unpack_indices
from container.layout import TRUNK_NAME, VQ2R, VQ4P, TrunkFormat
from container.manifest import Manifest
from container.model import KINDS
from container.reader import ContainerReader
from container.trunk import unpack_rows
from tests.checkpoints import kimi_linear_config, logical_tensor
from tests.validate.conftest import Converted, converted
from tests.validate.damage import edit_manifest, layout_of, overwrite, seal
from validate import weights as weights_module
from validate.render import report_text
from validate.report import Findings, KindError, Report, StructureReport, TensorError, WeightsReport
from validate.weights import check_weights, difference, evenly_spread

BANK = "experts-L1.bin"


def check(made: Converted, **options: Any) -> tuple[WeightsReport, Findings]:
    options = {"n_experts": None, "n_threads": 2, **options}
    with ContainerReader.open(made.container) as reader:
        return check_weights(reader, Checkpoint.open(made.checkpoint), **options, stream=io.StringIO())


def copy(made: Converted, folder: Path) -> Converted:
    """A copy to damage."""
    shutil.copytree(made.container, folder / "container")
    shutil.copytree(made.checkpoint, folder / "checkpoint")
    return Converted(made.config, folder / "checkpoint", folder / "container")


def blamed(made: Converted) -> list[str]:
    """Names of the tensors that problems are about; there must be no other problem."""
    listed = check(made)[1].problems
    assert all(problem.startswith("tensor ") for problem in listed), listed
    return [problem.removeprefix("tensor ").split(":")[0] for problem in listed]


def expert(number: int, matrix: str, layer: int = 1) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{number}.{matrix}.weight"


# what is right


@pytest.mark.parametrize("which", ["k3", "kimi_linear"])
def test_a_conversion_is_within_its_bounds(request, which):
    made = request.getfixturevalue(which)
    report, findings = check(made)
    assert (findings.problems, findings.notes) == ([], [])
    assert report.ok
    manifest = Manifest.read(made.container)
    n_experts = 8 * len(manifest.layers)
    assert len(report.tensors) == len(manifest.trunk) + 3 * n_experts
    assert set(report.kinds) == {"gate", "up", "down", "F32", "Q8G", "Q4G"}
    for kind in KINDS:
        assert report.kinds[kind].n_tensors == n_experts
        assert report.kinds[kind].n_weights == n_experts * math.prod(layout_of(made.container).shapes[kind])
        assert 0.05 < report.kinds[kind].relative_error <= report.kinds[kind].worst < 0.20
    assert report.kinds["F32"].relative_error == report.kinds["F32"].worst == 0
    assert 0.005 < report.kinds["Q8G"].relative_error < 0.008
    assert 0.09 < report.kinds["Q4G"].relative_error < 0.105
    trunk = sum(math.prod(entry.shape) for entry in manifest.trunk)
    assert sum(report.kinds[fmt].n_weights for fmt in ("F32", "Q8G", "Q4G")) == trunk


@pytest.mark.parametrize("which", ["k3", "kimi_linear"])
def test_the_figures_are_those_of_an_independent_calculation(request, which):
    """Decoded on both sides by the packing code's counterparts instead of the reference."""
    made = request.getfixturevalue(which)
    source: dict[str, Any] = {}
    for shard in sorted(made.checkpoint.glob("*.safetensors")):
        source |= load_file(shard)
    found = {tensor.name: tensor.relative_error for tensor in check(made)[0].tensors}
    with ContainerReader.open(made.container) as reader:
        prefix = reader.manifest.tensor_prefix
        for entry in reader.manifest.trunk:
            wanted = logical_tensor(source, entry.name).reshape(-1, entry.shape[-1])
            decoded = unpack_rows(*reader.read_trunk_rows(entry, 0, entry.size.rows), entry.shape[-1], entry.fmt)
            error = np.linalg.norm(decoded.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64))
            assert found[entry.name.removeprefix(prefix)] == pytest.approx(error, rel=1e-6)
        record, books = reader.read_expert(2, 5), reader.codebooks(2).astype(np.float64)
        for kind, matrix in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            wanted = logical_tensor(source, prefix + expert(5, matrix, layer=2))
            codes = unpack_indices(record.indices[kind], wanted.shape, reader.manifest.expert_quant)
            decoded = sum(books[KINDS.index(kind), stage][codes[:, :, stage]] for stage in range(3))
            decoded = decoded.reshape(wanted.shape) * record.scales[kind].astype(np.float64)[:, None]
            error = np.linalg.norm(decoded - wanted) / np.linalg.norm(wanted.astype(np.float64))
            assert found[expert(5, matrix, layer=2)] == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize(("quant", "least", "most"), [(VQ2R, 0.15, 0.38), (VQ4P, 0.10, 0.23)], ids=["VQ2R", "VQ4P"])
def test_other_expert_formats_are_within_their_bounds(tmp_path, quant, least, most):
    made = converted(tmp_path, kimi_linear_config(num_hidden_layers=2), quant=quant)
    report, findings = check(made)
    assert findings.problems == []
    assert all(least < report.kinds[kind].worst < most for kind in KINDS)
    assert {tensor.fmt for tensor in report.tensors if tensor.kind in KINDS} == {quant.fmt.name}


def test_strips_change_nothing(k3, monkeypatch):
    whole = check(k3)[0]
    monkeypatch.setattr(weights_module, "STRIP_WEIGHTS", 1000)
    strips = check(k3, n_threads=1)[0]
    assert [tensor.name for tensor in strips.tensors] == [tensor.name for tensor in whole.tensors]
    for a, b in zip(strips.tensors, whole.tensors, strict=True):
        assert a.relative_error == pytest.approx(b.relative_error, rel=1e-9)


def test_some_experts_of_each_layer(k3):
    report, findings = check(k3, n_experts=3)
    assert findings.problems == []
    assert findings.notes[0] == "only 3 of 8 experts of each layer were compared"
    for layer in (1, 2, 3):
        of_layer = {tensor.name for tensor in report.tensors if f".{layer}.block_sparse_moe.experts." in tensor.name}
        assert of_layer == {expert(number, matrix, layer) for number in (0, 4, 7) for matrix in ("w1", "w2", "w3")}
    assert sum(tensor.kind == "trunk" for tensor in report.tensors) == len(Manifest.read(k3.container).trunk)


@given(st.integers(1, 1000), st.none() | st.integers(1, 1100))
def test_evenly_spread(n_all, n_wanted):
    numbers = evenly_spread(n_all, n_wanted)
    assert list(numbers) == sorted(set(numbers))
    assert len(numbers) == (n_all if n_wanted is None else min(n_all, n_wanted))
    assert numbers[0] == 0
    if n_wanted != 1:
        assert numbers[-1] == n_all - 1
        steps = np.diff(numbers)
        assert not steps.size or steps.max() - steps.min() <= 1


# zero tensors


@pytest.mark.parametrize(
    ("found", "expected", "error"), [(0.0, 0.0, 0.0), (1e-30, 0.0, math.inf), (0.0, 2.0, 1.0), (3.0, 2.0, 0.5)]
)
def test_the_error_of_zero_and_other_tensors(found, expected, error):
    assert difference(torch.full((2, 3), found), torch.full((6,), expected)).relative_error == error


def test_an_infinite_error_is_null_in_json():
    kind = KindError(relative_error=math.inf, worst=math.inf, bound=0.0, n_tensors=1, n_weights=1)
    tensor = TensorError(name="t", kind="trunk", fmt="F32", relative_error=math.inf)
    weights = WeightsReport(ok=False, tensors=[tensor], kinds={"F32": kind}, seconds=0.0)
    report = Report(
        container="c", structure=StructureReport(ok=True), weights=weights, logits=None, text=None, findings=Findings()
    )
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))["weights"]
    assert found["tensors"][0]["relative_error"] is None
    assert found["relative_error"] == {"F32": None}
    assert "worst: t (F32) inf%" in report_text(report)


def test_a_zero_source_tensor_must_stay_zero(kimi_linear, tmp_path):
    made = copy(kimi_linear, tmp_path)
    tensors = load_file(made.checkpoint / "model.safetensors")
    for name in ("model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.q_proj.weight", expert(3, "w2")):
        tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors, made.checkpoint / "model.safetensors", metadata={"format": "pt"})
    report, findings = check(made)
    assert findings.n_problems == 3
    assert all("relative error inf%" in problem for problem in findings.problems)
    infinite = {tensor.name for tensor in report.tensors if tensor.relative_error == math.inf}
    assert len(infinite) == 3


# weights that are wrong under right checksums


def test_gate_and_up_swapped(k3, tmp_path):
    made = copy(k3, tmp_path)
    layout = layout_of(made.container)
    path, offsets, n_bytes = made.container / BANK, layout.index_offsets, layout.index_bytes["gate"]
    record = path.read_bytes()[3 * layout.stride_bytes : 4 * layout.stride_bytes]
    gate = record[offsets["gate"] : offsets["gate"] + n_bytes]
    up = record[offsets["up"] : offsets["up"] + n_bytes]
    overwrite(path, 3 * layout.stride_bytes + offsets["gate"], up + gate)
    seal(made.container)
    assert blamed(made) == [expert(3, "w1"), expert(3, "w3")]
    errors = {tensor.name: tensor.relative_error for tensor in check(made)[0].tensors}
    assert errors[expert(3, "w1")] > 1


def test_one_row_of_an_expert_scaled_wrongly(k3, tmp_path):
    """1 % of the matrix at ten times its size."""
    made = copy(k3, tmp_path)
    layout = layout_of(made.container)
    path, at = made.container / BANK, 7 * layout.stride_bytes + layout.scales_offset
    scale = np.frombuffer(path.read_bytes()[at : at + 2], dtype="<f2")
    overwrite(path, at, (scale * np.float16(10)).tobytes())
    seal(made.container)
    assert blamed(made) == [expert(7, "w1")]


def test_codebooks_of_another_layer(k3, tmp_path):
    made = copy(k3, tmp_path)
    path = made.container / "codebooks.bin"
    size = path.stat().st_size // 27
    content = path.read_bytes()
    overwrite(path, 9 * size + 16, content[16:size])  # layer 2's first gate codebook becomes layer 1's
    seal(made.container)
    assert blamed(made) == [expert(number, "w1", layer=2) for number in range(8)]


@pytest.mark.parametrize("fmt", list(TrunkFormat))
def test_a_trunk_tensor_whose_rows_are_in_another_order(k3, tmp_path, fmt):
    made = copy(k3, tmp_path)
    path = made.container / TRUNK_NAME
    matrices = [entry for entry in Manifest.read(made.container).trunk if entry.fmt is fmt and len(entry.shape) == 2]
    entry = next(entry for entry in matrices if entry.shape[0] > 1)
    size = entry.size
    values = np.frombuffer(path.read_bytes(), dtype=np.uint8, count=size.values_bytes, offset=entry.offset)
    overwrite(path, entry.offset, np.roll(values.reshape(size.rows, -1), 1, axis=0).tobytes())
    seal(made.container)
    assert blamed(made) == [entry.name.removeprefix("language_model.")]


def test_the_last_bit_of_an_exact_tensor(k3, tmp_path):
    made = copy(k3, tmp_path)
    entry = next(entry for entry in Manifest.read(made.container).trunk if entry.name.endswith("A_log"))
    path = made.container / TRUNK_NAME
    value = np.frombuffer(path.read_bytes(), dtype="<f4", count=1, offset=entry.offset)
    overwrite(path, entry.offset, np.nextafter(value, np.float32(9)).tobytes())
    seal(made.container)
    assert blamed(made) == [entry.name.removeprefix("language_model.")]
    assert ", none allowed" in check(made)[1].problems[0]


# checkpoints that do not belong


def test_tensors_that_only_one_side_has(kimi_linear, tmp_path):
    made = copy(kimi_linear, tmp_path)
    tensors = load_file(made.checkpoint / "model.safetensors")
    missing = ["model.norm.weight", expert(2, "w3")]
    for name in missing:
        del tensors[name]
    tensors["model.extra.bias"] = np.zeros(3, dtype=np.float32)
    save_file(tensors, made.checkpoint / "model.safetensors", metadata={"format": "pt"})
    listed = check(made)[1].problems
    assert "shard 'model.safetensors' is" in listed[0]
    assert "when the container was made it was" in listed[0]
    assert listed[1:] == [
        *(f"tensor {name}: in the container, but not in {made.checkpoint}" for name in sorted(missing)),
        f"tensor model.extra.bias: in {made.checkpoint}, but not in the container",
    ]


def test_a_missing_shard_is_named_once(k3, tmp_path):
    made = copy(k3, tmp_path)
    shards = sorted(made.checkpoint.glob("*.safetensors"))
    n_lost = len(load_file(shards[1]))
    shards[1].unlink()
    report, findings = check(made)
    assert findings.problems == [f"{shards[1]}: missing; its tensors were not compared"]
    n_all = len(Manifest.read(k3.container).trunk) + 3 * 24
    assert n_all - n_lost < len(report.tensors) < n_all  # an MXFP4 pair is one tensor


@pytest.mark.parametrize(("gone", "left"), [("_scale", "_packed"), ("_packed", "_scale")])
def test_half_an_mxfp4_pair_of_an_expert_that_is_not_compared(k3, tmp_path, gone, left):
    made = copy(k3, tmp_path)
    name = f"language_model.{expert(3, 'w1')}"
    index = made.checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][name + gone]
    index.write_text(json.dumps(content))
    _, findings = check(made, n_experts=1)
    assert findings.problems == [
        f"tensor {name}{left}: in {made.checkpoint} without {name}{gone}, the other half of its MXFP4 pair"
    ]


def test_a_truncated_shard(k3, tmp_path):
    made = copy(k3, tmp_path)
    shard = sorted(made.checkpoint.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    listed = check(made)[1].problems
    assert any("when the container was made" in problem for problem in listed)
    assert any(problem.startswith("tensor ") and "truncated" in problem for problem in listed)


def test_the_tokenizer_is_the_checkpoints(k3, tmp_path):
    made = copy(k3, tmp_path)
    tokenizer = made.container / "tokenizer.model"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"IA== 99999\n")
    assert check(made)[1].problems == [f"{tokenizer}: differs from the checkpoint's tiktoken.model"]
    tokenizer.unlink()
    assert check(made)[1].problems == [f"{tokenizer}: missing, though the checkpoint has tiktoken.model"]
    (made.checkpoint / "tiktoken.model").unlink()
    _, findings = check(made)
    assert findings.ok
    assert f"{made.checkpoint} has no tokenizer to compare with" in findings.notes


def test_another_config(k3, tmp_path):
    made = copy(k3, tmp_path)
    path = made.checkpoint / "config.json"
    config = json.loads(path.read_bytes())
    config["text_config"]["rms_norm_eps"] = 1e-6
    config["vision_config"]["new"] = [1]
    path.write_text(json.dumps(config))
    assert check(made)[1].problems == [
        f"config: `_outer.vision_config.new` is 'absent' in the container, [1] in {made.checkpoint}",
        f"config: `rms_norm_eps` is 1e-05 in the container, 1e-06 in {made.checkpoint}",
    ]


def test_another_shape_and_a_weight_that_is_no_number(kimi_linear, tmp_path):
    made = copy(kimi_linear, tmp_path)
    tensors = load_file(made.checkpoint / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, made.checkpoint / "model.safetensors", metadata={"format": "pt"})
    listed = "\n".join(check(made)[1].problems)
    assert f"tensor {name}: not compared: shape [512, 256] in the container, [256, 512] in the checkpoint" in listed
    assert "tensor model.norm.weight: not compared: reference: tensor `model.norm.weight` holds NaN" in listed


@pytest.mark.parametrize("provenance", [{}, {"source": 7}, {"source": {"shards": []}}])
def test_a_container_that_does_not_record_its_shards(kimi_linear, tmp_path, provenance):
    made = copy(kimi_linear, tmp_path)
    edit_manifest(made.container, lambda manifest: manifest.update(provenance=provenance))
    findings = check(made)[1]
    assert findings.problems == []
    assert findings.notes == ["the container does not record which shards it was made of"]


@pytest.mark.parametrize("shards", [{"model.safetensors": 7}, {"model.safetensors": {}}, {"x": {"bytes": 1}}])
def test_a_provenance_that_names_other_shards(kimi_linear, tmp_path, shards):
    made = copy(kimi_linear, tmp_path)
    edit_manifest(made.container, lambda manifest: manifest["provenance"]["source"].update(shards=shards))
    listed = check(made)[1].problems
    assert all("Is this another release?" in problem for problem in listed)
    assert len(listed) == len({*shards, "model.safetensors"})
