"""Where weights come from: what hub folders tell, and that two sources are told apart."""

from __future__ import annotations

import json
import shutil

import pytest

from container.checkpoint import Checkpoint
from convert.options import ConvertOptions
from convert.provenance import LIBRARIES, origin_of, provenance, version
from convert.quality import Quality
from download.folder import SourceFolder
from download.ledger import Ledger, Origin
from tests.checkpoints import checkpoint_tensors
from tests.convert.small import EMBEDDING, small_k3, write_small

REVISION = "0123456789abcdef0123456789abcdef01234567"


def identity(folder, **options):
    options = ConvertOptions(source=folder, output=folder.parent / "container", **options)
    return provenance(Checkpoint.open(folder), options)


def origin(folder):
    return origin_of(folder, Ledger(SourceFolder(folder).ledger))


def test_a_hub_snapshot(tmp_path):
    folder = tmp_path / "models--moonshotai--Kimi-K3" / "snapshots" / REVISION
    folder.mkdir(parents=True)
    assert origin(folder) == Origin("moonshotai/Kimi-K3", REVISION)
    (tmp_path / "link").symlink_to(folder)
    assert origin(tmp_path / "link") == Origin("moonshotai/Kimi-K3", REVISION)


def test_a_download_into_a_folder(tmp_path):
    record = tmp_path / ".cache" / "huggingface" / "download" / "config.json.metadata"
    record.parent.mkdir(parents=True)
    record.write_text(f"{REVISION}\nd2\n1.0\n")
    assert origin(tmp_path) == Origin(None, REVISION)
    record.write_text("")
    assert origin(tmp_path) == Origin(None, None)


def test_a_folder_with_a_ledger(tmp_path):
    Ledger(SourceFolder(tmp_path).ledger).say_source(Origin("moonshotai/Kimi-K3", REVISION))
    assert origin(tmp_path) == Origin("moonshotai/Kimi-K3", REVISION)


def test_a_plain_folder(tmp_path):
    assert origin(tmp_path) == Origin(None, None)


def test_what_is_recorded(k3):
    found = identity(k3.source, seed=5, workers=3)
    assert found["options"] == {
        "seed": 5,
        "trunk_bits": 4,
        "format": "VQ3R",
        "quality": "balanced",
        "device": "cpu",
    }
    assert set(found["libraries"]) == set(LIBRARIES)
    assert found["libraries"]["numpy"] == version("numpy") != "unknown"
    shards = {path.name: path.stat().st_size for path in k3.source.glob("*.safetensors")}
    assert {name: shard["bytes"] for name, shard in found["source"]["shards"].items()} == shards
    assert json.loads(json.dumps(found)) == found
    assert str(k3.source) not in json.dumps(found)  # the same weights elsewhere are the same weights


def test_a_device_counts_by_its_kind(k3):
    """Not by its number; and torch's version may change what a GPU gives."""
    found = identity(k3.source, device="cuda:1")
    assert found == identity(k3.source, device="cuda") | {"source": found["source"]}
    assert found["options"]["device"] == "cuda"
    assert set(found["libraries"]) == {*LIBRARIES, "torch"}


def test_the_manifest_holds_it(k3):
    assert json.loads(k3.files["manifest.json"])["provenance"] == identity(k3.source, quality=Quality.FAST)


def test_a_copy_is_the_same_source(k3, tmp_path):
    assert identity(shutil.copytree(k3.source, tmp_path / "copy")) == identity(k3.source)


def test_other_weights_of_the_same_shape_are_another_source(k3, tmp_path):
    other = write_small(tmp_path / "other", checkpoint_tensors(small_k3(), seed=1))
    first, second = identity(k3.source)["source"], identity(other)["source"]
    assert first["config_sha256"] == second["config_sha256"]
    for name, shard in first["shards"].items():
        assert shard["bytes"] == second["shards"][name]["bytes"]
        assert shard["header_sha256"] == second["shards"][name]["header_sha256"]
        assert shard["sample_sha256"] != second["shards"][name]["sample_sha256"]


def test_one_fine_tuned_tensor_is_noticed(k3, tmp_path):
    tensors = checkpoint_tensors(small_k3())
    tensors[EMBEDDING] = (tensors[EMBEDDING].astype("f4") * 1.01).astype(tensors[EMBEDDING].dtype)
    other = write_small(tmp_path / "other", tensors)
    assert identity(other) != identity(k3.source)


@pytest.mark.parametrize("change", [{"seed": 1}, {"trunk_bits": 8}, {"device": "cuda"}])
def test_shaping_options_are_part_of_it(k3, change):
    assert identity(k3.source, **change) != identity(k3.source)


def test_an_unknown_distribution():
    assert version("no-such-distribution-here") == "unknown"
