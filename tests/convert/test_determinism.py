"""The same checkpoint, seed and options give the same bytes: whatever the workers, the pieces and the place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints import checkpoint_tensors, write_checkpoint
from tests.convert.small import (
    assert_same,
    contents,
    convert_here,
    differences,
    edit_json,
    small_k3,
    small_shard_names,
    write_small,
)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_matter(tmp_path, k3, workers):
    convert_here(k3.source, tmp_path / "out", workers=workers)
    assert_same(tmp_path / "out", k3.files)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("cores", [1, 4])
def test_threads_do_not_matter(tmp_path, monkeypatch, k3, cores):
    monkeypatch.setattr("convert.prepare.available_cores", lambda: cores)
    convert_here(k3.source, tmp_path / "out", workers=1)
    assert_same(tmp_path / "out", k3.files)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("pieces", [[{2}, {0, 1}], [{0}, {1}, {2}], [{1, 2}]])
def test_pieces_do_not_matter(tmp_path, k3, pieces):
    output = tmp_path / "out"
    for n, piece in enumerate(pieces):
        summary, _ = convert_here(k3.source, output, layers=frozenset(piece))
        done = sum(map(len, pieces[: n + 1]))
        assert (summary.complete, summary.n_jobs_done, summary.n_jobs_left) == (False, len(piece), 5 - done)
        assert not (output / "manifest.json").exists()
    summary, log = convert_here(k3.source, output)
    assert (summary.complete, summary.n_jobs_left) == (True, 0)
    assert f"{5 - summary.n_jobs_done} of 5 jobs were finished before; proving them" in log
    assert_same(output, k3.files)


@pytest.mark.usefixtures("in_this_process")
def test_a_finished_piece_is_not_repeated(tmp_path, k3):
    convert_here(k3.source, tmp_path / "out", layers=frozenset({1}))
    before = (tmp_path / "out" / "experts-L1.bin").stat()
    summary, _ = convert_here(k3.source, tmp_path / "out", layers=frozenset({1}))
    after = (tmp_path / "out" / "experts-L1.bin").stat()
    assert summary.n_jobs_done == 0
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.usefixtures("in_this_process")
def test_the_place_does_not_matter(tmp_path, monkeypatch, k3):
    """Another folder, reached by a relative path."""
    shutil.copytree(k3.source, tmp_path / "elsewhere" / "weights")
    monkeypatch.chdir(tmp_path)
    convert_here(k3.source.__class__("elsewhere/weights"), k3.source.__class__("out"))
    assert_same(tmp_path / "out", k3.files)


def scatter(folder: Path, n_shards: int = 3) -> None:
    """Deal a checkpoint's tensors out to its shards in turn."""
    tensors = checkpoint_tensors(small_k3())
    shards = small_shard_names()
    weight_map = {tensor: shards[n % n_shards] for n, tensor in enumerate(tensors)}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    edit_json(folder / "model.safetensors.index.json", lambda index: index.update(weight_map=weight_map))


@pytest.mark.usefixtures("in_this_process")
def test_the_shards_do_not_matter_for_the_weights(tmp_path, k3):
    """One shard, three, or every tensor in another than its neighbours: only the provenance differs."""
    config = small_k3()
    for name, kind in (("one", {"single_file": True}), ("five", {"n_shards": 5}), ("scattered", {})):
        source = write_checkpoint(tmp_path / name, config, **kind)
        if name == "scattered":
            scatter(source)
        convert_here(source, tmp_path / f"{name} out")
        found = contents(tmp_path / f"{name} out")
        manifest, expected = (json.loads(files["manifest.json"]) for files in (found, k3.files))
        assert manifest.pop("provenance") != expected.pop("provenance")
        assert manifest == expected
        assert differences(found, k3.files) == ["manifest.json"]


@pytest.mark.usefixtures("in_this_process")
def test_the_seed_matters(tmp_path, k3):
    convert_here(k3.source, tmp_path / "out", seed=1)
    found = contents(tmp_path / "out")
    assert found["codebooks.bin"] != k3.files["codebooks.bin"]
    assert found["experts-L1.bin"] != k3.files["experts-L1.bin"]
    assert found["trunk.bin"] == k3.files["trunk.bin"]  # nothing random in the trunk


@pytest.mark.usefixtures("in_this_process")
def test_the_trunk_bits_matter(tmp_path, k3):
    convert_here(k3.source, tmp_path / "out", trunk_bits=8)
    found = contents(tmp_path / "out")
    assert len(found["trunk.bin"]) > len(k3.files["trunk.bin"])
    assert found["experts-L1.bin"] == k3.files["experts-L1.bin"]


@pytest.mark.usefixtures("in_this_process")
def test_a_layer_is_encoded_alike_in_any_company(tmp_path, k3):
    """Other layers' weights do not reach a layer's codebooks."""
    tensors = checkpoint_tensors(small_k3())
    for name in tensors:
        if ".layers.1." in name and name.endswith("_packed"):
            tensors[name] = np.roll(tensors[name], 1, axis=0)
    convert_here(write_small(tmp_path / "checkpoint", tensors), tmp_path / "out")
    found = contents(tmp_path / "out")
    assert found["experts-L2.bin"] == k3.files["experts-L2.bin"]
    assert found["experts-L1.bin"] != k3.files["experts-L1.bin"]
